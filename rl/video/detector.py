"""What a picture of the table shows: positions by colour, in metres. Checked against the simulator; it serves policies
and judges success.

Coordinates are the table's: x to the right, y up, the origin in the middle of the picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..worlds.tabletop import CLOSED, OPENED, REACHED

HALF_HEIGHT = 0.94 * math.tan(math.radians(20.0))  # metres from the middle of the picture to its edge, on the table
CAMERA = 0.94
TOPS = {"pusher": 0.07, "block": 0.06, "goal": 0.002, "handle": 0.06}  # heights of what the camera sees
HANDLE_CLOSED = 0.27 - 0.105
LEAST = 0.12  # colour below this is the table
MARGIN = 0.005  # of the drawer's marks, half a pixel at 64 px


@dataclass(frozen=True)
class Seen:
    """Positions, or None where a colour is not in the picture."""

    pusher: np.ndarray | None
    block: np.ndarray | None
    goal: np.ndarray | None
    handle: np.ndarray | None

    @property
    def drawer(self) -> float | None:
        """How far it is open."""
        return None if self.handle is None else float(HANDLE_CLOSED - self.handle[1])


def look(frame: np.ndarray) -> Seen:
    """Weighted middles of the four colours; soft weights, so that blurred predictions are read too."""
    x = frame.astype(np.float32) / 255.0
    r, g, b = x[..., 0], x[..., 1], x[..., 2]
    colours = {
        "pusher": b - np.maximum(r, g),
        "block": r - np.maximum(g, b) - 0.1,
        "goal": g - np.maximum(r, b),
        "handle": np.minimum(r, g) - b - 0.15,
    }
    return Seen(**{name: _middle(weight, TOPS[name]) for name, weight in colours.items()})


def _middle(weight_HW: np.ndarray, top: float) -> np.ndarray | None:
    H, W = weight_HW.shape
    w = np.where(weight_HW > LEAST, weight_HW, 0.0)
    if w.sum() < 1e-3 * H * W * LEAST * 2:
        return None
    rows, columns = np.arange(H) + 0.5, np.arange(W) + 0.5
    y, x = (w.sum(1) * rows).sum() / w.sum(), (w.sum(0) * columns).sum() / w.sum()
    scale = 2 * HALF_HEIGHT / H * (CAMERA - top) / CAMERA  # things nearer to the camera look further from the middle
    return np.array([(x - W / 2) * scale, (H / 2 - y) * scale])


def succeeded(task: str, last: np.ndarray, first: np.ndarray) -> bool:
    """Whether the task is done in the last frame; the goal is read from the first, where nothing covers it."""
    now = look(last)
    if task == "push":
        goal = look(first).goal
        return now.block is not None and goal is not None and float(np.linalg.norm(now.block - goal)) < REACHED
    if now.drawer is None:
        return False
    return now.drawer > OPENED - MARGIN if task == "open" else now.drawer < CLOSED + MARGIN
