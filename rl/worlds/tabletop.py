"""A table-top scene in MuJoCo, seen from above: push a block to a goal, open or close a drawer. The only file that
imports mujoco.

An action is (dx, dy, done): where the pusher goes in metres, and whether the policy says it has finished.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.rng import fold, uniform

SCENE = Path(__file__).with_name("tabletop.xml")
TASKS = {"push": "push the red block onto the green square", "open": "open the drawer", "close": "close the drawer"}
STEP = 0.045  # metres a step at most
SUBSTEPS = 20
JOINTS = ("pusher_x", "pusher_y", "block_x", "block_y", "block_turn", "goal_x", "goal_y", "drawer")
REACHED, OPENED, CLOSED = 0.05, 0.12, 0.03  # metres


LARGE = {"block": 0.055, "goal": 0.065, "pusher": 0.026}  # half widths in metres; the pusher still fits the handle
GROWN = 0.026  # metres more between the middles of pusher and block where they touch


@dataclass(frozen=True)
class Table:
    """How the scene is built, seen and stepped through."""

    height: int = 64  # of a frame
    width: int = 64
    stride: int = 1  # tenths of a second from frame to frame; an action reaches as many times as far
    large: bool = False  # block, goal and pusher cover about twice the pixels

    @property
    def reach(self) -> float:
        """Metres that an action moves the pusher at most."""
        return STEP * self.stride

    @property
    def grown(self) -> float:
        """What large things add to distances."""
        return GROWN if self.large else 0.0

    @property
    def action_ranges(self) -> tuple[tuple[float, float], ...]:
        return ((-self.reach, self.reach), (-self.reach, self.reach), (0.0, 1.0))


PLAIN = Table()


@dataclass(frozen=True)
class Scene:
    """The true state in metres; the drawer's is how far it is open."""

    pusher: tuple[float, float]
    block: tuple[float, float]
    goal: tuple[float, float]
    drawer: float

    def success(self, task: str) -> bool:
        if task == "push":
            return float(np.hypot(self.block[0] - self.goal[0], self.block[1] - self.goal[1])) < REACHED
        return self.drawer > OPENED if task == "open" else self.drawer < CLOSED


def load_mujoco() -> Any:
    """The simulator; without a screen it draws through EGL, or what MUJOCO_GL says (osmesa needs no driver)."""
    if "mujoco" in sys.modules and "MUJOCO_GL" not in os.environ and "DISPLAY" not in os.environ:
        raise ConfigError(
            "MuJoCo was imported before it was told how to draw without a screen; set MUJOCO_GL=egl in the environment"
        )
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        import mujoco
    except ImportError as error:
        raise ConfigError("the table-top world needs MuJoCo; install terrella[video]") from error
    return mujoco


@lru_cache(maxsize=2)
def _model(large: bool) -> Any:
    spec = load_mujoco().MjSpec.from_file(str(SCENE))
    for name, half in LARGE.items() if large else ():
        size = spec.geom(name).size
        size[: 1 if name == "pusher" else 2] = half
    return spec.compile()


class Tabletop:
    """One instance of a task; the same seed gives the same episode for the same actions."""

    def __init__(self, table: Table = PLAIN) -> None:
        self.mujoco, self.table = load_mujoco(), table
        self.model = _model(table.large)
        self.data = self.mujoco.MjData(self.model)
        self.place = {name: int(self.model.joint(name).qposadr[0]) for name in JOINTS}
        self._renderer: Any = None
        self.task = "push"

    def reset(self, seed: int, task: str) -> None:
        """Place everything by chance, nothing overlapping; the drawer begins closed, or open where it is to be
        closed.
        """
        if task not in TASKS:
            raise ConfigError(f"task: '{task}' is none of {', '.join(TASKS)}")
        self.task = task
        self.mujoco.mj_resetData(self.model, self.data)
        key = fold(seed, sorted(TASKS).index(task))

        def between(low: float, high: float, *part: int) -> float:
            return low + (high - low) * uniform(key, *part)

        found = None
        for tries in range(200):
            low = -0.12 if task == "push" else -0.26
            high = 0.03 if task == "push" else -0.18
            block = np.array([between(-0.2, 0.2, tries, 0), between(low, high, tries, 1)])
            goal = np.array(
                [between(-0.24, 0.24, tries, 2), between(-0.26, 0.06 if task == "push" else -0.18, tries, 3)]
            )
            pusher = np.array([between(-0.27, 0.27, tries, 4), between(-0.27, -0.05, tries, 5)])
            apart = min(np.linalg.norm(block - pusher) - 0.09, np.linalg.norm(block - goal) - 0.13)
            if apart > self.table.grown:
                found = (block, goal, pusher)
                break
        assert found is not None
        block, goal, pusher = found
        drawer = between(0.12, 0.15, 6) if task == "close" else 0.0
        values = (*pusher, *block, between(-0.7, 0.7, 7), *goal, drawer)
        for name, value in zip(JOINTS, values, strict=True):
            self.data.qpos[self.place[name]] = value
        self.data.ctrl[:] = pusher
        self.mujoco.mj_forward(self.model, self.data)

    def step(self, action: np.ndarray) -> None:
        """Move the pusher by the first two numbers, a tenth of a second for each part of the stride."""
        reach, stride = self.table.reach, self.table.stride
        move = np.clip(np.asarray(action[:2], np.float64), -reach, reach)
        if not np.isfinite(move).all():
            raise ValueError("an action is not finite")
        here = self.data.qpos[[self.place["pusher_x"], self.place["pusher_y"]]]
        for part in range(1, stride + 1):
            self.data.ctrl[:] = np.clip(here + move * (part / stride), -0.31, 0.31)
            self.mujoco.mj_step(self.model, self.data, nstep=SUBSTEPS)

    def scene(self) -> Scene:
        q = {name: float(self.data.qpos[at]) for name, at in self.place.items()}
        return Scene(
            (q["pusher_x"], q["pusher_y"]), (q["block_x"], q["block_y"]), (q["goal_x"], q["goal_y"]), q["drawer"]
        )

    def frame(self) -> np.ndarray:
        """uint8 [H, W, 3]."""
        if self._renderer is None:
            self._renderer = self.mujoco.Renderer(self.model, self.table.height, self.table.width)
            for flag in (self.mujoco.mjtRndFlag.mjRND_SHADOW, self.mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0  # shadows cost ten times the rest
        self._renderer.update_scene(self.data, camera="top")
        return self._renderer.render().copy()

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON values."""
        held = {
            "task": self.task,
            "qpos": self.data.qpos.tolist(),
            "qvel": self.data.qvel.tolist(),
            "ctrl": self.data.ctrl.tolist(),
        }
        return held | {"warm": self.data.qacc_warmstart.tolist(), "time": self.data.time}

    def restore(self, held: dict[str, Any]) -> None:
        self.mujoco.mj_resetData(self.model, self.data)
        self.task = held["task"]
        self.data.qpos[:], self.data.qvel[:], self.data.ctrl[:] = held["qpos"], held["qvel"], held["ctrl"]
        self.data.qacc_warmstart[:], self.data.time = held["warm"], held["time"]
        self.mujoco.mj_forward(self.model, self.data)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
