"""Sokoban: dynamics on visible states, scalar and vectorised, and the World over them.

Everything a step needs is visible: a box or player on a target has a symbol of its own, so the fixed layer follows from
the picture. Shape suffixes: B parallel games, C cells of a room (row-major).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from .sokoban_rooms import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    TARGET,
    RoomConfig,
    make_room,
)
from .sokoban_text import MEANINGS, SYMBOLS, coordinate_sentence, with_coordinates

UP, DOWN, LEFT, RIGHT = 1, 2, 3, 4
ACTIONS = {UP: "Up", DOWN: "Down", LEFT: "Left", RIGHT: "Right"}
STEP_COST, BOX_REWARD, FINISH_REWARD = -0.1, 1.0, 10.0
_LEAVE = {PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}
_ENTER = {FLOOR: PLAYER, TARGET: PLAYER_ON_TARGET, BOX: PLAYER, BOX_ON_TARGET: PLAYER_ON_TARGET}
_LAND = {FLOOR: BOX, TARGET: BOX_ON_TARGET}


def _transition(here: int, ahead: int, beyond: int) -> tuple[int, int, int]:
    """New codes of the player's cell, the cell ahead and the one beyond it."""
    if here not in _LEAVE or ahead not in _ENTER:
        return here, ahead, beyond
    if ahead in (BOX, BOX_ON_TARGET):
        if beyond not in _LAND:
            return here, ahead, beyond
        return _LEAVE[here], _ENTER[ahead], _LAND[beyond]
    return _LEAVE[here], _ENTER[ahead], beyond


# One row per (here, ahead, beyond) in base 7.
_NEXT = np.array([_transition(*cells) for cells in itertools.product(range(7), repeat=3)], dtype=np.uint8)
_NEXT_HERE, _NEXT_AHEAD, _NEXT_BEYOND = (np.ascontiguousarray(_NEXT[:, i]) for i in range(3))
_MOVED = _NEXT_HERE != np.arange(343) // 49
_BEFORE = np.array(list(itertools.product(range(7), repeat=3)))
_GAIN = ((_NEXT == BOX_ON_TARGET).sum(1) - (_BEFORE == BOX_ON_TARGET).sum(1)).astype(np.int8)
_TRIPLES = [tuple(int(c) for c in row) for row in _NEXT]


def encode(codes: bytes | np.ndarray, width: int = 6) -> str:
    """Visible codes to text: one symbol a cell, rows joined by newlines."""
    symbols = [SYMBOLS[c] for c in bytes(codes)]
    return "\n".join("".join(symbols[i : i + width]) for i in range(0, len(symbols), width))


def decode(text: str) -> bytes:
    """Text to visible codes, row-major; raises ValueError on an unknown symbol."""
    return bytes(SYMBOLS.index(symbol) for symbol in text if symbol != "\n")


def next_codes(codes: bytes, action: int, width: int = 6) -> bytes:
    """The state after an action, as visible codes. Pure; an impossible move leaves the state as it is."""
    player = next((i for i, c in enumerate(codes) if c >= PLAYER), None)
    if player is None:
        raise ValueError("this state has no player")
    delta = (-width, width, -1, 1)[action - 1]
    ahead, beyond = player + delta, player + 2 * delta
    if not 0 <= beyond < len(codes):
        beyond = ahead  # ahead is then the border wall, or the move is refused as a push against itself
    here, front, back = _TRIPLES[codes[player] * 49 + codes[ahead] * 7 + codes[beyond]]
    after = bytearray(codes)
    after[beyond] = back
    after[ahead] = front
    after[player] = here
    return bytes(after)


def next_text(text: str, action: int) -> str:
    """The state text after an action (1 Up, 2 Down, 3 Left, 4 Right). Pure: the visible text is the whole state."""
    width = text.index("\n")
    return encode(next_codes(decode(text), action, width), width)


def solved(codes: bytes) -> bool:
    """Whether every box stands on a target."""
    return BOX not in codes


def step_reward(before: bytes, after: bytes) -> float:
    """The reward of one action: -0.1, a point for each box that reaches (or minus one that leaves) a target, ten for
    the last.
    """
    gain = after.count(BOX_ON_TARGET) - before.count(BOX_ON_TARGET)
    return (
        STEP_COST
        + (BOX_REWARD if gain > 0 else -BOX_REWARD if gain < 0 else 0.0)
        + (FINISH_REWARD if solved(after) else 0.0)
    )


def shortest_solution(codes: bytes, width: int = 6, limit: int = 100) -> list[int] | None:
    """A shortest list of actions that solves the room, or None when there is none within `limit` actions (breadth
    first).
    """
    if solved(codes):
        return []
    layer: list[tuple[bytes, list[int]]] = [(codes, [])]
    seen = {codes}
    for _ in range(limit):
        following = []
        for state, path in layer:
            for action in ACTIONS:
                after = next_codes(state, action, width)
                if after in seen:
                    continue
                if solved(after):
                    return [*path, action]
                seen.add(after)
                following.append((after, [*path, action]))
        layer = following
    return None


def step_batch(
    cells_BC: np.ndarray, player_B: np.ndarray, action_B: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Step B games in place; returns (moved_B bool, gain_B int8: boxes that reached a target minus boxes that left
    one).
    """
    flat = cells_BC.reshape(-1)
    size = cells_BC.shape[1]
    delta_B = np.array([0, -width, width, -1, 1])[action_B]
    here_B = np.arange(0, flat.size, size) + player_B
    ahead_B = here_B + delta_B
    # Where this leaves the room the cell ahead is border wall, so the move is refused whatever is read here.
    beyond_B = np.clip(ahead_B + delta_B, 0, flat.size - 1)
    key_B = flat[here_B].astype(np.int64) * 49 + flat[ahead_B].astype(np.int64) * 7 + flat[beyond_B]
    moved_B = _MOVED[key_B]
    move_B = np.flatnonzero(moved_B)
    key_B2 = key_B[move_B]
    flat[here_B[move_B]] = _NEXT_HERE[key_B2]
    flat[ahead_B[move_B]] = _NEXT_AHEAD[key_B2]
    flat[beyond_B[move_B]] = _NEXT_BEYOND[key_B2]
    player_B += delta_B * moved_B
    return moved_B, _GAIN[key_B]


@dataclass(frozen=True)
class SokobanConfig(RoomConfig):
    """Rooms, the limit of steps, and the words of the prompt: seven symbols by visible code, four words for up,
    down, left and right.
    """

    max_steps: int = 100
    # what the text is: the picture, the places with it, or the places alone
    observation: Literal["grid", "grid_coord", "coord"] = "grid"
    grid: str = SYMBOLS
    actions: tuple[str, ...] = tuple(ACTIONS.values())

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.grid) != 7 or len(set(self.grid)) != 7 or set(self.grid) & set("\n ();"):
            raise ValueError(
                f"grid: must be seven different symbols, none a space, bracket or semicolon, not {self.grid!r}"
            )
        if len({word.lower() for word in self.actions}) != 4 or len(self.actions) != 4:
            raise ValueError(f"actions: must be four different words (for up, down, left, right), not {self.actions}")
        if self.observation == "coord" and not self.open:
            raise ValueError("observation: coord does not tell where inner walls are; it needs open: true")


@lru_cache(maxsize=4096)
def _room_of(config: RoomConfig, seed: int) -> bytes:
    """A room once made is kept: the samples of a group all begin in it."""
    return make_room(config, seed)[0]


class Sokoban(World):
    """Push every box onto a target."""

    name = "sokoban"
    Config = SokobanConfig
    render_modes = ("text", "text_with_coordinates")

    def __init__(self, **settings: Any) -> None:
        self.config = SokobanConfig(**settings)
        self._rooms = RoomConfig(**{f.name: getattr(self.config, f.name) for f in fields(RoomConfig)})
        self.grid_words = dict(zip(self.config.grid, MEANINGS, strict=True))
        self.action_words = dict(enumerate(self.config.actions, start=1))
        self.codes: bytes | None = None
        self.steps = 0

    def reset(self, seed: int, sample: int = 0) -> str:
        self.codes = _room_of(self._rooms, seed)
        self.steps = 0
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.codes)
        before = self.codes
        assert before is not None and self.action_words is not None
        if action not in self.action_words:
            raise WorldFault(f"sokoban: action {action!r} is not one of {sorted(self.action_words)}")
        after = next_codes(before, int(action), self.config.width)
        self.codes = after
        self.steps += 1
        success = solved(after)
        # Every effective action moves the player, and only those change the picture.
        info = {"action_is_effective": after != before, "action_is_valid": True, "success": success}
        return StepResult(
            self.render(), step_reward(before, after), success or self.steps >= self.config.max_steps, info
        )

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.codes)
        assert self.codes is not None
        text = encode(self.codes, self.config.width).translate(str.maketrans(SYMBOLS, self.config.grid))
        if mode == "text_with_coordinates":
            return with_coordinates(text, self.config.grid)
        if self.config.observation == "grid":
            return text
        places = coordinate_sentence(text, self.config.grid)
        return places if self.config.observation == "coord" else f"{places}\n{text}"

    def drawing(self) -> str | None:
        return None if self.codes is None else encode(self.codes, self.config.width)

    def snapshot(self) -> Snapshot:
        check_started(self, self.codes)
        return {"world": self.name, "codes": list(self.codes or b""), "steps": self.steps}

    def restore(self, snapshot: Snapshot) -> None:
        cells = self.config.height * self.config.width
        if snapshot.get("world") != self.name or len(snapshot["codes"]) != cells:
            raise WorldFault(f"sokoban: not a snapshot of a {self.config.height}x{self.config.width} room")
        self.codes, self.steps = bytes(snapshot["codes"]), int(snapshot["steps"])
