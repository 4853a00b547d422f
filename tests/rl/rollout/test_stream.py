"""Requests that come at any time: the same samples as all at once, by weights that are known for every token; and
episodes that wait for nobody.
"""

import random
import threading
import time

import pytest

from terrella.core.errors import ConfigError, DeadlineError, WorkerError
from terrella.data.trajectory import Invalid, Role
from terrella.rl.multiturn import Limits, joined, rollout_worlds
from terrella.rl.rollout import embedded
from terrella.rl.rollout import stream as stream_file
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams, interleave
from terrella.rl.rollout.stream import Stream
from terrella.tests.rl.rollout.test_continuous import gib, mixed
from terrella.tests.rl.rollout.test_embedded_sampler import CONFIG, weights

NAMED = weights()
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PAGE", 4)


def exact(**options) -> EmbeddedSampler:
    return EmbeddedSampler(lambda: NAMED, CONFIG, version=lambda: 5, batch_invariant=True, keep=True, **options)


@pytest.fixture
def streams():
    opened: list[Stream] = []

    def make(sampler) -> Stream:
        opened.append(Stream(sampler))
        return opened[-1]

    yield make
    for stream in opened:
        stream.close()


class World:
    """A few turns whose contexts grow by what was sampled; each step takes its time."""

    def __init__(self, number: int, slow: random.Random | None = None) -> None:
        self.prompt_id, self.sample_index, self.slow = number // 2, number % 2, slow
        self.ids, self.left = (1 + number % 5, 2), 1 + number % 3

    def context(self):
        return self.ids if self.left else None

    def receive(self, sample) -> None:
        if self.slow is not None:
            time.sleep(self.slow.uniform(0, 0.05))
        self.ids, self.left = (*self.ids, *sample.ids, 7, 8), self.left - 1

    def score(self):
        return [0.0], float(len(self.ids)), {}


@pytest.mark.parametrize("options", [{}, {"copy": 3}, {"cache_gib": gib(120)}])
def test_independent_episodes_are_those_of_lock_step_to_the_bit(streams, options) -> None:
    params = SamplingParams(6, stop_ids=(3,))
    makers = [lambda i=i: World(i) for i in range(10)]
    expected = rollout_worlds(exact(), makers, params, 9)
    slow = random.Random(1)
    stream = streams(exact(**options))
    assert rollout_worlds(stream, [lambda i=i: World(i, slow) for i in range(10)], params, 9) == expected
    assert rollout(stream, [World(i) for i in range(10)], params, 9)[3].reward == expected[3].reward


def test_requests_of_any_shape_join_at_any_time(streams) -> None:
    asked = mixed(16, stop_ids=(3,)) + mixed(3, top_k=3)
    expected = exact().generate(asked)
    stream, answers = streams(exact()), []
    for number, request in enumerate(asked):
        answers.append(stream.submit(request))
        time.sleep(0.01 * (number % 3))
    assert [answer.result(WAIT_S) for answer in answers] == expected


def test_weights_change_between_windows_and_every_token_knows_its_own(streams) -> None:
    """Each token's log-prob is that of its version after the whole context, as if no other version had been there."""
    held = {name: x.clone() for name, x in NAMED.items()}
    history, version, reached = [], 0, threading.Event()
    sampler = EmbeddedSampler(lambda: held, CONFIG, version=lambda: version, batch_invariant=True, keep=True)
    stream = streams(sampler)
    asked = [SampleRequest((1 + i, 2), (0, i), SamplingParams(50), ((20, (4, 5)),)) for i in range(3)]
    history.append({name: x.clone() for name, x in held.items()})
    answers = [stream.submit(request) for request in asked]
    for _ in range(8):
        if all(answer.done() for answer in answers):
            break
        time.sleep(0.05)
        with stream.paused(WAIT_S):
            for x in held.values():
                x.mul_(1.05)
            version += 1
            history.append({name: x.clone() for name, x in held.items()})
    reached.set()
    mixed_ones = 0
    for request, answer in zip(asked, answers, strict=True):
        sample = answer.result(WAIT_S)
        assert isinstance(sample, Sample)
        by = sample.versions or (sample.weight_version,) * len(sample.ids)
        assert list(by) == sorted(by) and min(by) == sample.weight_version
        mixed_ones += len(set(by)) > 1
        for at, (own, given) in enumerate(zip(by, sample.given, strict=True)):
            if given or at % 7:
                continue
            one = EmbeddedSampler(lambda own=own: history[own], CONFIG, batch_invariant=True)
            before = (*request.ids, *sample.ids[:at])
            logprob = teacher(one, before, sample.ids[at])
            assert logprob == pytest.approx(sample.logprobs[at], abs=1e-6)
    assert mixed_ones


def teacher(sampler: EmbeddedSampler, context: tuple[int, ...], token: int) -> float:
    """The log-prob of a token after a context."""
    (sample,) = sampler.generate([SampleRequest(context, (0,), SamplingParams(1, allowed=(token, token + 1)))])
    assert isinstance(sample, Sample) and sample.ids == (token,)
    return sample.logprobs[0]


def test_versions_reach_trajectories_and_their_age_is_measured() -> None:
    request = SampleRequest((1,), (0,), SamplingParams(4), ((2, (9,)),))
    sample = interleave([5, 6, 7], [-1.0, -1.0, -1.0], request, "stop", [3, 3, 4])
    assert sample.versions == (3, 3, 3, 4) and sample.weight_version == 3
    later = Sample((8,), (-1.0,), "stop", 5)
    (whole,) = joined([((1,), sample), ((1, *sample.ids, 2), later)])
    assert whole.token_versions == (3, 3, 3, 3, 4, 5, 5) and whole.weight_version == 3
    assert [v for v, role in zip(whole.versions, whole.roles, strict=True) if role == Role.ACTION] == [3, 3, 4, 5]


class Slow:
    """A sampler that is no stream's own; counts what it is asked at once."""

    def __init__(self) -> None:
        self.gate, self.sizes = threading.Event(), []

    def generate(self, requests):
        self.sizes.append(len(requests))
        assert self.gate.wait(WAIT_S)
        return [Sample((1,), (-0.5,), "length", 0) for _ in requests]


def test_a_slow_world_does_not_hold_up_the_others(streams) -> None:
    """The first episode's world waits until all others have been played to their end."""
    over = threading.Semaphore(0)

    class Last(World):
        def receive(self, sample) -> None:
            for _ in range(5):
                assert over.acquire(timeout=WAIT_S)
            super().receive(sample)

    class Other(World):
        def score(self):
            over.release()
            return super().score()

    makers = [lambda: Last(0), *(lambda i=i: Other(i) for i in range(1, 6))]
    played = rollout_worlds(streams(exact()), makers, SamplingParams(3), 0, Limits(workers=8, world_s=WAIT_S))
    assert not any(isinstance(t.reward, Invalid) for t in played)


def test_faults_and_the_end_reach_everybody_who_waits(streams) -> None:
    stream = streams(exact())
    long = SampleRequest((1,) * CONFIG.max_positions, (0,), SamplingParams(5))
    with pytest.raises(ConfigError, match="max_positions"):
        stream.submit(long).result(WAIT_S)
    with pytest.raises(ConfigError, match="max_positions"):
        stream.submit(SampleRequest((1,), (0,), SamplingParams(5)))
    slow = Slow()
    other = streams(slow)
    first = other.submit(SampleRequest((1,), (0,), SamplingParams(1)))
    while not slow.sizes:
        time.sleep(0.01)
    with pytest.raises(DeadlineError, match="pause within"), other.paused(0.05):
        pass
    rest = [other.submit(SampleRequest((1,), (i,), SamplingParams(1))) for i in range(3)]
    slow.gate.set()
    assert all(answer.result(WAIT_S).ids == (1,) for answer in (first, *rest)) and slow.sizes == [1, 3]
    slow.gate.clear()
    lost = other.submit(SampleRequest((1,), (0,), SamplingParams(1)))
    while len(slow.sizes) < 3:
        time.sleep(0.01)
    threading.Timer(0.1, slow.gate.set).start()
    other.close()
    with pytest.raises(WorkerError, match="closed"):
        lost.result(WAIT_S)


def test_a_sampler_that_does_not_stop_hides_no_error(monkeypatch) -> None:
    monkeypatch.setattr(stream_file, "CLOSE_S", 0.2)
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def generate(self, requests):
            begun.set()
            go_on.wait(WAIT_S)
            return [Invalid("late")] * len(requests)

    stream = Stream(Slow())
    stream.submit(SampleRequest((1,), (0,), SamplingParams(1)))
    assert begun.wait(WAIT_S)
    with pytest.raises(ConfigError, match="what ended the stage"):
        try:
            raise ConfigError("what ended the stage")
        finally:
            stream.close()
    with pytest.raises(DeadlineError, match="did not stop within 0 s"):
        stream.close()
    go_on.set()
    stream.close()
