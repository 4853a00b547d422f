"""The table top as a video model imagines it: frames by the episode's seed, drift in what is seen, snapshots through
JSON.
"""

import json
import random

import numpy as np
import pytest
import torch

from terrella.data.trajectory import Invalid
from terrella.data.video_actions import ActionBins
from terrella.data.video_layout import VideoLayout
from terrella.models.video.tokenizer import build_tokenizer
from terrella.rl.exchange.imagined import ComparedWorld
from terrella.rl.exchange.named_worlds import NamedWorld, Play
from terrella.rl.rollout.sampler import Sample, SampleRequest
from terrella.rl.video.imagine import ClipDecoder
from terrella.rl.video.real2sim import WorldModelSimulator
from terrella.rl.video.world import FrameWorld, ImaginedTable, frame_drift, read_action
from terrella.rl.worlds.base import Snapshot, StepResult, WorldFault
from terrella.rl.worlds.tabletop import Table
from terrella.tests.rl.video.helpers import COMPRESSIVE, paint


class PaintedTable(FrameWorld):
    """A true table without physics: the pusher goes where it is sent, nothing else moves."""

    name = "painted-table"

    def reset(self, seed: int, sample: int = 0) -> str:
        self.at = [0.02 * (seed % 5), -0.1]
        return self._draw()

    def _draw(self) -> str:
        places = {"pusher": tuple(self.at), "block": (0.1, 0.05), "goal": (-0.15, -0.2), "handle": (0.0, 0.16)}
        self.frame = paint(places, 16, 16)
        return self.render()

    def step(self, action: int | str) -> StepResult:
        before, numbers = self.picture(), self._numbers(action)
        self.at = [self.at[0] + float(numbers[0]), self.at[1] + float(numbers[1])]
        self._draw()
        return self._result(before, bool(numbers[2] >= 0.5), True)

    def snapshot(self) -> Snapshot:
        return {"at": self.at}

    def restore(self, snapshot: Snapshot) -> None:
        self.at = list(snapshot["at"])
        self._draw()


class Drawn:
    """A sampler whose frames depend on the key and on all of the prompt."""

    def generate(self, requests: list[SampleRequest]) -> list[Sample]:
        found = []
        for request in requests:
            rng = random.Random(repr((request.ids, request.key)))
            ids = tuple(rng.randrange(16) for _ in range(request.params.max_new_tokens))
            found.append(Sample(ids, (0.0,) * len(ids), "length", 0))
        return found


class Failing:
    """A sampler that gives nothing."""

    def generate(self, requests: list[SampleRequest]) -> list[Invalid]:
        return [Invalid("out of memory") for _ in requests]


def play_of(sampler) -> Play:
    torch.manual_seed(0)
    layout = VideoLayout(
        COMPRESSIVE.codebook,
        COMPRESSIVE.frame_tokens,
        COMPRESSIVE.context_tokens,
        1,
        2,
        False,
        action_dims=3,
        action_bins=8,
    )
    decoder = ClipDecoder(build_tokenizer(COMPRESSIVE).eval(), layout)
    bins = ActionBins(Table().action_ranges, 8)

    def make() -> ComparedWorld:
        true = PaintedTable()
        simulator = WorldModelSimulator(sampler, decoder, bins, top_k=0, repetition_penalty=1.0, seed=0)
        return ComparedWorld(ImaginedTable(true, "push", simulator), true)

    return Play(NamedWorld("imagined", make, "", 20, (16, 16)))


def walk(play: Play, actions: list[str]) -> list[tuple]:
    return [(play.step(action), play.world.picture().tobytes()) for action in actions]


def test_seeds_repeat_and_a_snapshot_goes_back() -> None:
    one, other = play_of(Drawn()), play_of(Drawn())
    assert one.reset(3) == other.reset(3) and "pusher" in one.last.text
    rng = random.Random(0)
    actions = [one.random_action(rng) for _ in range(6)]
    assert walk(one, actions[:3]) == walk(other, actions[:3])  # the third frame begins a new window
    kept = json.loads(json.dumps(one.snapshot()))
    after = walk(one, actions[3:])
    fresh = play_of(Drawn())
    fresh.restore(kept)
    assert fresh.world.picture().tobytes() == other.world.picture().tobytes()
    assert walk(fresh, actions[3:]) == after == walk(other, actions[3:])
    assert other.reset(3, sample=1).text == one.reset(3).text
    assert walk(other, actions[:1])[0][1] != walk(one, actions[:1])[0][1]  # another sample, other chance
    ended = one.step("0 0 1")
    assert ended.terminated and {"exact", "mae", "true_reward", "success"} <= set(ended.info)
    assert ended.info["true_reward"] == 1.0


def test_what_is_no_action_costs_one_and_a_sampler_that_fails_is_a_fault() -> None:
    play = play_of(Failing())
    start = play.reset(0)
    assert play.step("to the left").text == start.text and play.last.info["action_is_valid"] == 0.0
    with pytest.raises(WorldFault, match="out of memory"):
        play.step("0.01 0.01 0")
    assert [read_action(text) is None for text in ("1 2", "nan 0 0", "1, 2, 0", "0 0 1e999")] == [
        True,
        True,
        False,
        True,
    ]


def test_drift_is_of_what_is_seen() -> None:
    places = {"pusher": (0.0, -0.1), "block": (0.1, 0.05), "handle": (0.0, 0.16)}
    true = paint(places, 32, 32)
    assert frame_drift(true, true) == {"exact": 1.0, "mae": 0.0}
    assert frame_drift(paint(places | {"block": (0.2, 0.05)}, 32, 32), true)["exact"] == 0.0
    hidden = paint({name: at for name, at in places.items() if name != "pusher"}, 32, 32)
    assert frame_drift(hidden, true)["exact"] == 0.0
    paler = np.clip(true.astype(int) + 2, 0, 255).astype(np.uint8)
    assert frame_drift(paler, true)["exact"] == 1.0 and 0 < frame_drift(paler, true)["mae"] < 0.01
