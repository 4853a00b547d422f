"""Policies in a world model: the sliding window, agreement statistics on published figures, the detector on painted
tables.
"""

import math

import numpy as np
import pytest

from terrella.core.rng import uniform
from terrella.data.video_actions import ActionBins
from terrella.rl.rollout.sampler import Sample, SampleRequest
from terrella.rl.video.detector import HANDLE_CLOSED, look, succeeded
from terrella.rl.video.policies import make_policy
from terrella.rl.video.real2sim import ENDINGS, Ending, WorldModelSimulator, agreement, run_policy
from terrella.rl.worlds.tabletop import STEP, TASKS
from terrella.tests.rl.video.helpers import COMPRESSIVE, FRAME, decoder_of, paint

# success in per cent of four RT-1 policies, as published: open and close drawer
REAL = {"open": (0, 51.9, 70.4, 81.5), "close": (0, 74.1, 88.9, 92.6)}
BASE = {"open": (4.4, 18.8, 50.0, 48.9), "close": (20.0, 56.7, 76.7, 81.1)}
RLVR = {"open": (3.3, 33.3, 62.2, 62.2), "close": (18.9, 71.1, 78.9, 88.9)}


def test_agreement_on_the_published_table() -> None:
    assert [round(agreement(REAL[t], BASE[t]).gap, 1) for t in ("open", "close")] == [22.6, 15.3]
    assert [round(agreement(REAL[t], RLVR[t]).gap, 1) for t in ("open", "close")] == [12.4, 8.9]
    assert agreement(REAL["close"], RLVR["close"]).mmrv == 0.0
    # base swaps the two best (50.0 > 48.9); RLVR ties them: a tie is a violation, as the strict order is lost
    assert agreement(REAL["open"], BASE["open"]).mmrv == pytest.approx((81.5 - 70.4) * 2 / 4)
    assert agreement(REAL["open"], REAL["open"]).r == pytest.approx(1.0)
    assert agreement((0.1, 0.5, 0.9), (0.9, 0.5, 0.1)).r == pytest.approx(-1.0)
    assert math.isnan(agreement((0.1, 0.9), (0.5, 0.5)).r)
    assert np.corrcoef(REAL["open"], BASE["open"])[0, 1] == pytest.approx(agreement(REAL["open"], BASE["open"]).r)


class Echo:
    """A sampler that notes its prompts and answers with a constant frame."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.prompts, self.temperatures = tokens, [], set[float]()

    def generate(self, requests: list[SampleRequest]) -> list[Sample]:
        self.prompts.append([r.ids for r in requests])
        self.temperatures |= {r.params.temperature for r in requests}
        n = len(self.prompts)
        return [Sample((n % 16,) * self.tokens, (0.0,) * self.tokens, "length", 0) for _ in requests]


def test_the_window_slides_as_published() -> None:
    decoder = decoder_of(COMPRESSIVE)
    layout = decoder.layout
    sampler = Echo(layout.frame_tokens)
    bins = ActionBins(((-1.0, 1.0),) * 2, 8)
    world = WorldModelSimulator(sampler, decoder, bins, top_k=0, repetition_penalty=1.0, seed=0, temperature=0.3)
    first = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    assert world.reset(first).shape == first.shape
    for t in range(7):
        assert world.step(np.full((2, 2), -1.0 + t / 4)).shape == first.shape
    each = layout.frame_tokens + layout.action_dims
    lengths = [len(p[0]) - layout.context_tokens for p in sampler.prompts]
    assert lengths == [each, 2 * each, 3 * each] * 2 + [each] and sampler.temperatures == {0.3}
    context = sampler.prompts[0][0][: layout.context_tokens]
    assert all(p[0][: layout.context_tokens] == context for p in sampler.prompts)  # the context stays
    fourth = sampler.prompts[3][0][layout.context_tokens :]
    # the last predicted frame begins the next window
    assert fourth[: layout.frame_tokens] == (3,) * layout.frame_tokens
    assert fourth[layout.frame_tokens :] == tuple(bins.encode(np.full((1, 2), -1.0 + 3 / 4))[0] + layout.action_start)


def test_single_step_models_read_their_history() -> None:
    decoder = decoder_of(FRAME, history=3, horizon=1)
    layout = decoder.layout
    sampler = Echo(layout.frame_tokens)
    world = WorldModelSimulator(
        sampler, decoder, ActionBins(((-1.0, 1.0),) * 2, 8), top_k=0, repetition_penalty=1.0, seed=0
    )
    world.reset(np.zeros((1, 16, 16, 3), np.uint8))
    for _ in range(5):
        world.step(np.zeros((1, 2)))
    assert {len(p[0]) for p in sampler.prompts} == {layout.prompt}
    assert all(p[0][-1] == layout.bos for p in sampler.prompts)
    assert sampler.prompts[4][0][: layout.frame_tokens] == (2,) * layout.frame_tokens


def test_a_policy_that_is_done_stands_still() -> None:
    class Two:
        def __init__(self, after: int) -> None:
            self.count, self.after = 0, after

        def reset(self, seed: int) -> None: ...

        def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
            self.count += 1
            return np.array([1.0, float(self.count > self.after)])

    decoder = decoder_of(COMPRESSIVE)
    sampler = Echo(decoder.layout.frame_tokens)
    world = WorldModelSimulator(
        sampler, decoder, ActionBins(((-1.0, 1.0),) * 2, 8), top_k=0, repetition_penalty=1.0, seed=0
    )
    ending = Ending(1, (1,), (0,))
    frames, lasted = run_policy(world, [Two(0), Two(1)], np.zeros((2, 16, 16, 3), np.uint8), ["", ""], 6, ending)
    assert frames.shape == (2, 6, 16, 16, 3) and len(sampler.prompts) == 2  # both are done after the second question
    assert (frames[:, 2:] == frames[:, 2:3]).all() and lasted.tolist() == [1, 2]


class Drawn:
    """A sampler that draws by a request's key alone, as samplers do."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def generate(self, requests: list[SampleRequest]) -> list[Sample]:
        drawn = [tuple(int(16 * uniform(*r.key, i)) for i in range(self.tokens)) for r in requests]
        return [Sample(ids, (0.0,) * self.tokens, "length", 0) for ids in drawn]


@pytest.mark.parametrize("to_end", [True, False])
def test_an_episode_is_the_same_whatever_is_imagined_beside_it(to_end: bool) -> None:
    """Four at once, as one rank has them, and two and two: equal to their last frame, or until each is done."""

    class Until:
        def __init__(self, after: int) -> None:
            self.left = after

        def reset(self, seed: int) -> None: ...

        def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
            self.left -= 1
            return np.array([frame.mean() / 255, float(self.left < 0)])

    decoder, firsts = decoder_of(COMPRESSIVE), np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)

    def imagined(numbers: range) -> tuple[np.ndarray, np.ndarray]:
        world = WorldModelSimulator(
            Drawn(decoder.layout.frame_tokens),
            decoder,
            ActionBins(((-1.0, 1.0),) * 2, 8),
            top_k=0,
            repetition_penalty=1.0,
            seed=7,
            first=numbers[0],
        )
        players = [Until(1 + e) for e in numbers]
        return run_policy(world, players, firsts[list(numbers)], [""] * len(numbers), 8, Ending(1, (1,), (0,)), to_end)

    whole, lasted = imagined(range(4))
    parts = [imagined(range(2)), imagined(range(2, 4))]
    assert lasted.tolist() == [n for _, part in parts for n in part]
    beside = np.concatenate([clips for clips, _ in parts])
    for clip, other, n in zip(whole, beside, lasted, strict=True):
        end = len(clip) if to_end else n
        assert np.abs(clip[:end].astype(int) - other[:end]).max() <= 1  # a batch's size may round the last digit
    assert (whole[0] != whole[1]).any()


def test_an_rt1_policy_is_done_when_it_terminates_and_not_when_it_reaches_up() -> None:
    class Recorder:
        """In the place of a world model: notes actions, shows the first frames for ever."""

        def reset(self, first: np.ndarray) -> np.ndarray:
            self.first, self.actions = first, []
            return first

        def step(self, actions: np.ndarray) -> np.ndarray:
            self.actions.append(actions)
            return self.first

    class Robot:
        def __init__(self, terminate: list[tuple[int, int, int]]) -> None:
            self.terminate = iter(terminate)

        def reset(self, seed: int) -> None: ...

        def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
            # terminate_episode, then world_vector
            return np.array([0.0] * 7 + list(next(self.terminate)) + [0.0, 0.0, 2.5])

    going, over = (0, 1, 0), (1, 0, 0)
    world = Recorder()
    robots = [Robot([going, over, going, going]), Robot([going] * 3 + [over])]
    frames, lasted = run_policy(world, robots, np.zeros((2, 4, 4, 3), np.uint8), ["", ""], 9, ENDINGS["rt1"])  # type: ignore[arg-type]
    assert len(world.actions) == 4 and frames.shape[:2] == (2, 9) and lasted.tolist() == [2, 4]
    said = [[tuple(a[7:10]) == over for a in actions] for actions in world.actions]
    assert said == [[False, False], [True, False], [True, False], [True, True]]
    # one stands still, the other goes on
    assert (world.actions[2][0][10:] == 0).all() and world.actions[2][1][12] == 2.5
    assert not ENDINGS["rt1"].said(np.ones((1, 13)))[0] and ENDINGS["tabletop"].said(np.array([[0.0, 0.0, 1.0]]))[0]


def test_detector_reads_painted_tables() -> None:
    places = {"goal": (-0.2, -0.2), "block": (0.1, 0.05), "handle": (0.0, 0.1), "pusher": (0.2, -0.1)}
    for height, width in ((64, 64), (64, 80), (128, 128), (256, 320)):
        seen = look(paint(places, height, width))
        for name, place in places.items():
            assert np.abs(getattr(seen, name) - np.array(place)).max() < 0.012, (name, height)
    assert seen.drawer == pytest.approx(HANDLE_CLOSED - 0.1, abs=0.01)
    empty = look(np.full((64, 64, 3), 170, np.uint8))
    assert empty.pusher is None and empty.drawer is None
    first = paint(places)
    assert not succeeded("push", first, first) and not succeeded("open", first, first)
    assert succeeded("push", paint(places | {"block": (-0.19, -0.21)}), first)
    assert succeeded("open", paint(places | {"handle": (0.0, HANDLE_CLOSED - 0.14)}), first)
    assert succeeded("close", paint(places | {"handle": (0.0, HANDLE_CLOSED - 0.01)}), first)


def test_policies_act_within_their_reach_and_repeat() -> None:
    picture = paint({"goal": (-0.2, -0.2), "block": (0.1, 0.0), "handle": (0.0, HANDLE_CLOSED), "pusher": (0.2, -0.1)})
    for name in ("scripted", "noisy", "weak", "random"):
        for instruction in TASKS.values():
            policy = make_policy(name)
            policy.reset(5)
            first = [policy.act(picture, instruction) for _ in range(4)]
            policy.reset(5)
            again = [policy.act(picture, instruction) for _ in range(4)]
            assert np.array_equal(first, again) and np.abs(np.array(first)[:, :2]).max() <= STEP + 1e-9
    with pytest.raises(ValueError, match="instruction"):
        make_policy("scripted").act(picture, "sing")
    with pytest.raises(ValueError, match="policy"):
        make_policy("unknown")
