"""Worlds in the loop: faults are Invalid within their budgets, masks cover what was sampled, every wait ends."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.data.trajectory import Invalid, Role
from terrella.rl.multiturn import Limits, joined, rollout_worlds
from terrella.rl.rollout.concurrent import run_all
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SamplingParams


class Echo:
    """A sampler that answers every context with numbers made from its key."""

    def __init__(self, faults: int = 0) -> None:
        self.faults, self.asked = faults, []

    def generate(self, requests):
        self.asked.append(len(requests))
        answers = []
        for r in requests:
            if self.faults:
                self.faults -= 1
                answers.append(Invalid("engine down"))
            else:
                n = 1 + (r.key[1] + r.key[3]) % r.params.max_new_tokens
                answers.append(Sample(tuple(100 + i for i in range(n)), (-0.5,) * n, "length", 7))
        return answers


class Talk:
    """Turns of random lengths; the context grows by what was sampled and what the world says, or is cut to a window."""

    def __init__(self, prompt_id, says, window=False, step=lambda turn: None, reward=lambda: 1.0):
        self.prompt_id, self.sample_index = prompt_id, 0
        self.says, self.window, self.step, self.reward = says, window, step, reward
        self.ids, self.turn, self.sampled = (1, 2), 0, []

    def context(self):
        return None if self.turn == len(self.says) else self.ids

    def receive(self, sample):
        self.step(self.turn)
        self.sampled.append(sample.ids)
        said = tuple(range(200, 200 + self.says[self.turn]))
        self.ids = (1, 2, *said) if self.window else (*self.ids, *sample.ids, *said)
        self.turn += 1

    def score(self):
        value = self.reward()
        return [value] * self.turn, value, {}


LIMITS = Limits(world_s=60.0, reward_s=60.0, restarts=1)  # far beyond what a busy machine needs


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6), st.booleans())
def test_masks_cover_exactly_the_sampled_tokens(says, window) -> None:
    built = {}

    def maker(i):
        def make():
            built[i] = Talk(i, says[i], window)
            return built[i]

        return make

    for i, t in enumerate(rollout_worlds(Echo(), [maker(i) for i in range(len(says))], SamplingParams(4), 0)):
        sampled = [
            token for s in t.sequences for token, role in zip(s.ids, s.roles, strict=True) if role == Role.ACTION
        ]
        assert sampled == [token for ids in built[i].sampled for token in ids]
        for s in t.sequences:
            assert all((p == -0.5) == (role == Role.ACTION) for p, role in zip(s.logprobs, s.roles, strict=True))
            assert all(200 <= x for x, role in zip(s.ids, s.roles, strict=True) if role == Role.OBSERVATION)
        assert t.reward == 1.0 and len(t.turn_rewards) == len(says[i])
        assert len(t.sequences) == (len(says[i]) if window and any(says[i][:-1]) else 1) or window


def test_context_growth_makes_one_sequence_and_a_window_several() -> None:
    a, b = Sample((10, 11), (-1.0, -2.0), "length", 5), Sample((12,), (-3.0,), "stop", 4)
    (whole,) = joined([((1, 2), a), ((1, 2, 10, 11, 20), b)])
    assert (
        whole.ids == (1, 2, 10, 11, 20, 12)
        and whole.roles == (0, 0, 1, 1, 2, 1)
        and whole.logprobs == (0, 0, -1, -2, 0, -3)
    )
    assert whole.weight_version == 4
    assert len(joined([((1, 2), a), ((1, 20), b)])) == 2


def test_sampler_faults_are_retried_then_invalid() -> None:
    good = rollout_worlds(Echo(faults=2), [lambda: Talk(0, [1])], SamplingParams(4), 0, LIMITS)
    assert good[0].reward == 1.0
    lost = rollout_worlds(Echo(faults=10**9), [lambda: Talk(3, [1])], SamplingParams(4), 0, LIMITS)
    assert lost[0].reward == Invalid("engine down") and lost[0].prompt_id == 3 and lost[0].info == {"restarts": 1}


def test_a_hanging_world_is_invalid_and_the_others_finish_on_time() -> None:
    stuck = threading.Event()
    makers = [lambda: Talk(0, [1, 1], step=lambda turn: stuck.wait(600))] + [
        lambda i=i: Talk(i, [1, 1]) for i in range(1, 5)
    ]
    hung, *fine = rollout_worlds(Echo(), makers, SamplingParams(4), 0, Limits(world_s=3.0, reward_s=60.0, restarts=1))
    late = not stuck.is_set()  # it hangs still
    stuck.set()
    assert (
        late
        and hung.reward == Invalid("world step: did not finish within 3 s")
        and [t.reward for t in fine] == [1.0] * 4
    )


def test_a_world_that_breaks_once_is_begun_anew_and_samples_the_same() -> None:
    broken = [True]

    def step(turn):
        if turn == 1 and broken.pop() if broken else False:
            raise OSError("socket closed")

    (t,) = rollout_worlds(Echo(), [lambda: Talk(0, [1, 1], step=step)], SamplingParams(4), 0, LIMITS)
    (calm,) = rollout_worlds(Echo(), [lambda: Talk(0, [1, 1])], SamplingParams(4), 0, LIMITS)
    assert t.reward == 1.0 and t.info == {"restarts": 1} and t.sequences == calm.sequences


def test_a_reward_that_raises_or_an_endless_episode_is_invalid_and_a_bad_answer_is_zero() -> None:
    def raises():
        raise ZeroDivisionError("verifier")

    makers = [lambda: Talk(0, [1], reward=raises), lambda: Talk(1, [1], reward=lambda: 0.0)]
    bad, zero = rollout_worlds(Echo(), makers, SamplingParams(4), 0, LIMITS)
    assert bad.reward == Invalid("reward: ZeroDivisionError: verifier") and zero.reward == 0.0
    (endless,) = rollout_worlds(
        Echo(), [lambda: Talk(0, [1] * 9)], SamplingParams(4), 0, Limits(max_turns=3, restarts=0)
    )
    assert "max_turns = 3" in endless.reward.reason
    (last,) = rollout_worlds(Echo(), [lambda: Talk(0, [1] * 3)], SamplingParams(4), 0, Limits(max_turns=3, restarts=0))
    assert last.reward == 1.0  # over with the last turn that it may have


def test_run_all_keeps_order_and_is_concurrent() -> None:
    together = threading.Barrier(8, timeout=60)  # nobody passes before all eight are there
    values = run_all([lambda i=i: (together.wait(), i)[1] for i in range(8)], workers=8, deadline_s=90, what="call")
    assert values == list(range(8))


def test_run_all_gives_what_fails_or_hangs_as_invalid() -> None:
    def fails():
        raise ZeroDivisionError("call")

    hang = threading.Event()
    values = run_all([fails, hang.wait, lambda: 3], workers=1, deadline_s=1.0, what="call")
    hang.set()
    late = Invalid("call: did not finish within 1 s")
    assert values == [Invalid("call: ZeroDivisionError: call"), late, 3]
    assert run_all([], workers=1, deadline_s=1.0, what="call") == []


def test_an_error_ends_a_rollout_before_more_is_sampled() -> None:
    def fails(turn: int) -> None:
        raise ZeroDivisionError("episode")

    sampler = Echo()
    with pytest.raises(ZeroDivisionError, match="episode"):
        rollout(sampler, [Talk(0, [1, 1], step=fails), Talk(1, [1, 1])], SamplingParams(4), 0)
    assert sampler.asked == [2]
