"""The table top as worlds with frames: the true one in MuJoCo, and the one that a video world model imagines.

The text of a state is what the detector sees in its frame, so that players without eyes can play too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...core.rng import fold
from ..worlds.base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from ..worlds.tabletop import PLAIN, Table, Tabletop
from .detector import HALF_HEIGHT, look, succeeded

if TYPE_CHECKING:
    from .real2sim import WorldModelSimulator

ACTIONS = "dx dy done: metres to the right and up, at most {reach:g}, and 1 to end the episode (else 0)"
LONGEST = 40  # actions of an episode


def read_action(text: str) -> np.ndarray | None:
    """Three finite numbers; None where the text is anything else."""
    try:
        numbers = np.array([float(word) for word in text.replace(",", " ").split()])
    except ValueError:
        return None
    return numbers if numbers.shape == (3,) and np.isfinite(numbers).all() else None


def describe(frame: np.ndarray) -> str:
    """What is seen in a frame, in metres from the middle of the table."""
    seen = look(frame)
    places = {"pusher": seen.pusher, "block": seen.block, "goal": seen.goal}
    parts = [f"{name} {'unseen' if at is None else f'({at[0]:.3f}, {at[1]:.3f})'}" for name, at in places.items()]
    return ", ".join([*parts, "drawer unseen" if seen.drawer is None else f"drawer open by {seen.drawer:.3f}"])


def frame_drift(imagined: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """`exact`: everything is seen within a pixel of where it is. `mae`: mean difference of the colours, 0 to 1."""
    one, other, pixel = look(imagined), look(true), 2 * HALF_HEIGHT / len(true)
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("pusher", "block", "handle")]
    same = all(
        a is b if a is None or b is None else math.dist(a, b) <= pixel for a, b in pairs
    )  # the goal does not move, and the block may cover it
    difference = np.abs(imagined.astype(np.float32) - true.astype(np.float32)).mean() / 255.0
    return {"exact": float(same), "mae": float(difference)}


@dataclass(frozen=True)
class TableConfig:
    """Which task, at which table."""

    task: str = "push"
    table: Table = PLAIN


class FrameWorld(World):
    """What both worlds share: actions of three numbers, a frame, and an end when the player says so."""

    table: Table = PLAIN
    frame: np.ndarray | None = None

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        return describe(self.picture())

    def picture(self) -> np.ndarray:
        return check_started(self, self.frame)

    def parse_action(self, word: str) -> Action | None:
        return None if read_action(word) is None else word

    def random_action(self, rng: random.Random) -> str:
        reach = self.table.reach
        return f"{rng.uniform(-reach, reach):.4f} {rng.uniform(-reach, reach):.4f} 0"

    @property
    def actions(self) -> str:
        """What an action is, in words."""
        return ACTIONS.format(reach=self.table.reach)

    def _numbers(self, action: Action) -> np.ndarray:
        numbers = read_action(str(action))
        if numbers is None:
            raise WorldFault(f"{self.name}: {str(action)[:80]!r} is no action; write {self.actions}")
        return numbers

    def _result(self, before: np.ndarray, done: bool, success: bool) -> StepResult:
        info = {"success": float(success), "action_is_effective": float((before != self.picture()).any())}
        return StepResult(self.render(), float(done and success), done, info)


class TableWorld(FrameWorld):
    """The true table. MuJoCo starts with the first episode."""

    name = "tabletop"
    Config = TableConfig

    def __init__(self, task: str = TableConfig.task, table: Table = PLAIN) -> None:
        self.task, self.table = task, table
        self.scene: Tabletop | None = None

    def _scene(self) -> Tabletop:
        if self.scene is None:
            self.scene = Tabletop(self.table)
        return self.scene

    def reset(self, seed: int, sample: int = 0) -> str:
        scene = self._scene()
        scene.reset(seed, self.task)
        self.frame = scene.frame()
        return self.render()

    def step(self, action: Action) -> StepResult:
        before, numbers, scene = self.picture(), self._numbers(action), self._scene()
        scene.step(numbers)
        self.frame = scene.frame()
        return self._result(before, bool(numbers[2] >= 0.5), scene.scene().success(self.task))

    def snapshot(self) -> Snapshot:
        self.picture()
        return self._scene().snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("task") != self.task:
            raise WorldFault(f"a snapshot of {snapshot.get('task')!r} cannot be restored in {self.task!r}")
        scene = self._scene()
        scene.restore(snapshot)
        self.frame = scene.frame()

    def close(self) -> None:
        """Give back the renderer."""
        if self.scene is not None:
            self.scene.close()


class ImaginedTable(FrameWorld):
    """The table as a world model imagines it from a true first frame. Success is what the detector sees."""

    name = "imagined-tabletop"
    Config = TableConfig

    def __init__(self, true: FrameWorld, task: str, simulator: WorldModelSimulator) -> None:
        self.true, self.table, self.task, self.simulator = true, true.table, task, simulator
        self.first: np.ndarray | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.true.reset(seed, sample)
        self.simulator.seed = fold(seed, sample) >> 1
        self.first = self.simulator.reset(self.true.picture()[None])[0]
        self.frame = self.first
        return self.render()

    def step(self, action: Action) -> StepResult:
        before, numbers = self.picture(), self._numbers(action)
        try:
            self.frame = self.simulator.step(numbers[None])[0]
        except RuntimeError as error:
            raise WorldFault(f"the world model gave no frame: {error}") from error
        assert self.first is not None
        return self._result(before, bool(numbers[2] >= 0.5), succeeded(self.task, self.picture(), self.first))

    def snapshot(self) -> Snapshot:
        self.picture()
        assert self.first is not None
        return {"task": self.task, "first": self.first.tolist(), "simulator": self.simulator.snapshot()}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("task") != self.task:
            raise WorldFault(f"a snapshot of {snapshot.get('task')!r} cannot be restored in {self.task!r}")
        self.first = np.array(snapshot["first"], np.uint8)
        self.frame = self.simulator.restore(snapshot["simulator"])[0]
