"""SPA's worlds as an environment: seeds and tags of both splits, the random policy, lessons, and what is refused."""

from collections import Counter

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.agents.config import WorldsEnvironment
from terrella.rl.agents.tasks import WorldTasks
from terrella.rl.own.tasks import fresh_tokenizer, open_tasks
from terrella.rl.rollout.sampler import Sample


def opened(**settings) -> WorldTasks:
    return WorldTasks(WorldsEnvironment(kind="worlds", **settings), None, ByteTokenizer(), None)


def test_seeds_never_end_and_tags_take_turns() -> None:
    tasks = opened(tags=["SimpleSokoban", "FrozenLake"], weights=[3, 1], test_tags=["Sudoku"], first_seed=1000)
    order, train = tasks.order(0), tasks.of("train")
    dealt = [train[order(place)] for place in range(8)]
    assert [instance.seed for instance in dealt] == list(range(1000, 1008))
    assert Counter(instance.task.name for instance in dealt) == {"SimpleSokoban": 6, "FrozenLake": 2}
    assert [(i.task.name, i.seed) for i in tasks.some(2)] == [("Sudoku", 123), ("Sudoku", 124)]
    assert str(train[3]) == "SimpleSokoban, seed 1003" or str(train[3]) == "FrozenLake, seed 1003"
    cut = tasks.numbers(0)[-4:]  # what a stage validates on is never reached
    assert len(cut) == 4 and min(cut) > 10**8


def test_an_episode_has_all_the_turns_that_the_settings_give_it() -> None:
    """As many as its rollout allows by default, and more."""
    for turns in (100, 120):
        tasks = opened(tags=["OpenSokoban"], prompt="bare", window=1, max_turns=turns)
        (played,) = tasks.play(Silent(), [tasks.episode(tasks.of("train")[0], 0, 0)], tasks.params(1, 1.0), 0)
        assert len(played.turn_rewards) == turns and not isinstance(played.reward, Invalid)


class Silent:
    """A sampler that never names an action."""

    def generate(self, requests):
        return [Sample((120,), (-1.0,), "length", 0) for _ in requests]


def test_the_random_policy_plays_and_its_turns_are_lessons() -> None:
    tasks = opened(tags=["OpenSokoban"], fmt="state", max_turns=2, actions_per_turn=1)
    episodes = [tasks.episode(tasks.of("train")[place], place, k) for place in range(3) for k in range(2)]
    played = tasks.play(tasks.player(episodes), episodes, tasks.params(100, 1.0), 0)
    counts = tasks.counts(episodes, played)
    assert counts["actions"] == tasks.actions(played) > 0 and counts["turns"] == counts["tagged"] > 0
    assert tasks.shares(counts) == {"kept_share": 1.0} and set(tasks.scores(played, 2)) == {"pass@1", "pass@2"}
    taught = [lesson for e, t in zip(episodes, played, strict=True) for lesson in tasks.taught(e, t, 0.5)]
    assert len(taught) == counts["turns"] and len({lesson.held_out for lesson in taught}) == 2
    first = taught[0]
    assert first.fields["meta.json"]["seed"] == 10_000 and Role.STATE in first.sequence.roles
    # the true state is written into the answer
    assert first.fields["states.json"][0] in first.fields["messages.json"][1]["content"]


def test_a_model_from_scratch_reads_pieces_of_all_worlds_of_a_recipe() -> None:
    one = WorldsEnvironment(kind="worlds", tags=["OpenSokoban"])
    both = [one, WorldsEnvironment(kind="worlds", tags=["OpenSokoban"], test_tags=["Countdown"])]
    assert fresh_tokenizer([one]).vocab_size < fresh_tokenizer(both).vocab_size
    assert isinstance(fresh_tokenizer([]), ByteTokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tags": []}, "tags: at least one"),
        ({"tags": ["A", "B"], "weights": [1.0]}, "weights: one for each of the 2 tags"),
        ({"tags": ["A"], "weights": [0.0]}, "weights: .* not all 0"),
        ({"tags": ["A"], "prediction_reward": 0.5}, "fmt = state"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldsEnvironment(kind="worlds", **settings)


def test_an_unknown_tag_is_named() -> None:
    settings = WorldsEnvironment(kind="worlds", tags=["OpenSokobam"])
    with (
        pytest.raises(ConfigError, match="'OpenSokobam' is neither shipped nor in tag_files"),
        open_tasks(settings, ByteTokenizer(), None),
    ):
        pass
