"""Imagined rollouts: tasks, rewards, masks and scores, with a sampler that plays back given answers."""

import pytest

from terrella.core.errors import ConfigError
from terrella.data.trajectory import Invalid, Role
from terrella.rl.grid.evaluate import copy_baseline, score_predictions, summarise
from terrella.rl.grid.imagination import GridDynamics, ImaginationEpisode, make_task
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams

DYNAMICS = GridDynamics.of("SimpleSokoban")
TOKENIZER = DYNAMICS.tokenizer()
ROOMS = [DYNAMICS.start(seed) for seed in range(4)]
OTHER = DYNAMICS.start(99)  # a state of none of the tasks' rooms
PARAMS = SamplingParams(max_new_tokens=36)


class Oracle:
    """Answers with the true next state, except where `wrong` says otherwise; `faults` answers are Invalid first."""

    def __init__(self, wrong=lambda request: False, faults: int = 0) -> None:
        self.wrong, self.faults, self.asked = wrong, faults, []

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        answers: list[Sample | Invalid] = []
        for request in requests:
            self.asked.append(request)
            if self.faults:
                self.faults -= 1
                answers.append(Invalid("server gone"))
                continue
            text = TOKENIZER.decode(request.ids)
            after = DYNAMICS.next(text[:-1], "UDLR".index(text[-1]) + 1)
            after = OTHER if self.wrong(request) else after
            ids = tuple(TOKENIZER.encode(after))
            answers.append(Sample(ids, (-0.5,) * len(ids), "length", 7))
        return answers


def task(index: int, steps: int = 4):
    return make_task(DYNAMICS, ROOMS, index, steps, 8, seed=3)


def test_tasks_follow_the_true_world_and_their_key_alone() -> None:
    for index in range(20):
        made = task(index)
        state = made.state
        for action, truth in zip(made.actions, made.truths, strict=True):
            state = DYNAMICS.next(state, action)
            assert state == truth
        assert made == task(index)
    assert len({task(i).actions for i in range(50)}) > 30


def test_reward_is_the_share_of_exact_states() -> None:
    perfect = rollout(Oracle(), [ImaginationEpisode(task(1), 0, TOKENIZER)], PARAMS, 0)
    assert perfect[0].reward == 1.0 and perfect[0].turn_rewards == [1.0] * 4
    episode = ImaginationEpisode(task(1), 0, TOKENIZER)
    wrong_in_turn_2 = Oracle(wrong=lambda request: request.key[3] == 2)
    # from a wrong room on, the fourth state is wrong as well
    spoilt = rollout(wrong_in_turn_2, [episode], PARAMS, 0)
    assert spoilt[0].reward == 0.5 and spoilt[0].turn_rewards == [1.0, 1.0, 0.0, 0.0]


def test_each_turn_sees_only_its_own_last_prediction() -> None:
    oracle = Oracle(wrong=lambda request: request.key[3] == 0)
    rollout(oracle, [ImaginationEpisode(task(2), 0, TOKENIZER)], PARAMS, 0)
    assert TOKENIZER.decode(oracle.asked[1].ids)[:-1] == OTHER
    assert [request.key for request in oracle.asked] == [(0, 2, 0, turn) for turn in range(4)]


def test_masks_cover_exactly_the_sampled_tokens() -> None:
    for trajectory in rollout(Oracle(), [ImaginationEpisode(task(i), 0, TOKENIZER) for i in range(3)], PARAMS, 0):
        assert len(trajectory.sequences) == 4
        for sequence in trajectory.sequences:
            assert sequence.roles == (Role.PROMPT,) * 37 + (Role.ACTION,) * 36
            assert sequence.logprobs == (0.0,) * 37 + (-0.5,) * 36 and sequence.weight_version == 7


def test_faults_are_retried_then_invalid_and_never_a_zero() -> None:
    episodes = [ImaginationEpisode(task(i), 0, TOKENIZER) for i in range(2)]
    healed = rollout(Oracle(faults=3), episodes, PARAMS, 0, retries=2)
    assert [t.reward for t in healed] == [1.0, 1.0]
    broken = rollout(Oracle(faults=10_000), [ImaginationEpisode(task(1), 0, TOKENIZER)], PARAMS, 0, retries=2)
    assert broken[0].reward == Invalid("server gone")


def test_malformed_tokens_show_and_score_zero() -> None:
    class Garbage:
        def generate(self, requests):
            return [Sample((0,) * 36, (-1.0,) * 36, "length", 0) for _ in requests]

    episode = ImaginationEpisode(task(1), 0, TOKENIZER)
    assert rollout(Garbage(), [episode], PARAMS, 0)[0].reward == 0.0
    assert episode.texts()[0] == "?" * 36
    assert episode.picture(DYNAMICS)[0]["prediction"].count("\n") == 5


def test_scores_of_copy_and_oracle() -> None:
    tasks = [task(i) for i in range(200)]
    oracle = summarise([score_predictions(t, t.truths) for t in tasks])
    assert (oracle.first_exact.value, oracle.all_exact.value, oracle.all_changed.value) == (1.0, 1.0, 1.0)
    copy = summarise(copy_baseline(tasks))
    still = sum(all(truth == t.state for truth in t.truths) for t in tasks)
    assert copy.all_exact.value == pytest.approx(still / 200) and copy.first_changed.value == 0.0
    assert copy.first_changed.n == sum(t.truths[0] != t.state for t in tasks)


def test_worlds_without_a_whole_visible_grid_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'SimpleSokoban'"):
        GridDynamics.of("SimpelSokoban")
    with pytest.raises(ConfigError, match="no grid dynamics"):
        GridDynamics.of("FrozenLake")
