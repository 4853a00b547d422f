"""FrozenLake: walk over ice to the goal, sometimes slipping. The slip is a setting, and its ceiling is computed, not
assumed.

Shape suffixes: B parallel games, R maps, S cells, D directions (0 left, 1 down, 2 right, 3 up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started

ACTIONS = {1: "Left", 2: "Down", 3: "Right", 4: "Up"}
LEGEND = {"P": "player", "_": "frozen", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}
ICE, HOLE, START, GOAL = "F", "H", "S", "G"
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


@dataclass(frozen=True)
class FrozenLakeConfig:
    """`success_rate` is the chance of the intended direction; the rest is split between the two perpendicular ones.

    `coupled` draws the slips from the very stream that drew the map, as the public release did: a policy can then read
    coming slips off the map. It exists for parity only.
    """

    size: int = 4
    frozen: float = 0.8
    success_rate: float = 1 / 3
    coupled: bool = False
    # what the text is: the picture, the places with it, or the places alone
    observation: Literal["grid", "grid_coord", "coord"] = "grid"

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 32 or not 0 < self.frozen <= 1 or not 0 < self.success_rate <= 1:
            raise ValueError(f"size: must be 2..32, and frozen and success_rate in (0, 1], not {self}")


def _connected(board: np.ndarray, start: tuple[int, int], goal: tuple[int, int]) -> bool:
    size = len(board)
    frontier, seen = [start], {start}
    while frontier:
        row, col = frontier.pop()
        for dr, dc in _MOVES:
            cell = row + dr, col + dc
            if 0 <= cell[0] < size and 0 <= cell[1] < size and cell not in seen and board[cell] != HOLE:
                if cell == goal:
                    return True
                seen.add(cell)
                frontier.append(cell)
    return False


def make_map(config: FrozenLakeConfig, seed: int) -> tuple[str, ...]:
    """The map of a seed as rows of F, H, S, G; start and goal are uniform and connected."""
    rng = np.random.default_rng(seed)
    while True:
        board = rng.choice([ICE, HOLE], (config.size, config.size), p=[config.frozen, 1 - config.frozen])
        start = tuple(int(i) for i in rng.integers(config.size, size=2))
        goal = tuple(int(i) for i in rng.integers(config.size, size=2))
        if start == goal:
            continue
        board[start], board[goal] = START, GOAL
        if _connected(board, start, goal):  # type: ignore[arg-type]
            return tuple("".join(row) for row in board)


def slip_stream(config: FrozenLakeConfig, seed: int, sample: int) -> np.random.Generator:
    """The uniforms that decide slips: a child of the seed of its own for every sample, or the map's stream when
    coupled.
    """
    if config.coupled:
        rng = np.random.default_rng(seed)
        rng.random()  # the public environment spends its first draw on choosing the start cell
        return rng
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, sample)))


def slip(direction: int, uniform: float, success_rate: float) -> int:
    """The direction really taken: one to the left of it, itself, or one to the right."""
    if success_rate >= 1:
        return direction
    fail = (1 - success_rate) / 2
    return (direction + (-1 if fail > uniform else 0 if fail + success_rate > uniform else 1)) % 4


def transitions(rows: tuple[str, ...]) -> np.ndarray:
    """next_SD: the cell reached from every cell by every direction; holes and the goal keep the player."""
    size, flat = len(rows), "".join(rows)
    table = np.empty((size * size, 4), dtype=np.int64)
    for cell, letter in enumerate(flat):
        row, col = divmod(cell, size)
        for direction, (dr, dc) in enumerate(_MOVES):
            r, c = min(max(row + dr, 0), size - 1), min(max(col + dc, 0), size - 1)
            table[cell, direction] = cell if letter in (HOLE, GOAL) else r * size + c
    return table


def success_within(rows: tuple[str, ...], success_rate: float, horizon: int, policy: str = "best") -> float:
    """The chance of reaching the goal within `horizon` actions, by dynamic programming: of the best policy, or of
    uniform actions.
    """
    table_SD, flat = transitions(rows), "".join(rows)
    goal_S = np.array([letter == GOAL for letter in flat], dtype=float)
    fail = (1 - success_rate) / 2
    value_S = goal_S.copy()
    for _ in range(horizon):
        reached_SD = value_S[table_SD]
        mixed_SD = success_rate * reached_SD + fail * (np.roll(reached_SD, 1, axis=1) + np.roll(reached_SD, -1, axis=1))
        value_S = np.maximum(mixed_SD.max(1) if policy == "best" else mixed_SD.mean(1), goal_S)
    return float(value_S[flat.index(START)])


def coordinate_sentence(text: str) -> str:
    """Player, holes and goal as zero-indexed (row,col), row-major."""
    cells = {symbol: [] for symbol in LEGEND}
    for r, row in enumerate(text.split("\n")):
        for c, symbol in enumerate(row):
            cells[symbol].append(f"({r},{c})")
    holes = cells["O"]
    where = next(
        f"{name} {cells[s][0]}"
        for s, name in (("P", "Player"), ("X", "Player in hole"), ("√", "Player on goal"))
        if cells[s]
    )
    parts = [where]
    if holes:
        listed = holes[0] if len(holes) == 1 else f"{', '.join(holes[:-1])} and {holes[-1]}"
        parts.append(f"{'hole' if len(holes) == 1 else 'holes'} at {listed}")
    if cells["G"]:
        parts.append(f"goal at {cells['G'][0]}")
    return "; ".join(parts) + "."


class FrozenLake(World):
    """Reach the goal without falling into a hole."""

    name = "frozen_lake"
    Config = FrozenLakeConfig
    action_words = ACTIONS
    grid_words = LEGEND
    render_modes = ("text", "text_with_coordinates")

    def __init__(self, **settings: Any) -> None:
        self.config = FrozenLakeConfig(**settings)
        self.rows: tuple[str, ...] | None = None

    def _start(self, rows: tuple[str, ...], seed: int, sample: int) -> None:
        self.rows, self.seed, self.sample, self.draws = rows, seed, sample, 0
        self.table_SD = transitions(rows)
        self.cell = "".join(rows).index(START)
        self.slips = slip_stream(self.config, seed, sample)

    def reset(self, seed: int, sample: int = 0) -> str:
        self._start(make_map(self.config, seed), seed, sample)
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.rows)
        assert self.rows is not None
        if action not in ACTIONS:
            raise WorldFault(f"frozen_lake: action {action!r} is not one of {sorted(ACTIONS)}")
        before, letters = self.cell, "".join(self.rows)
        direction = slip(int(action) - 1, float(self.slips.random()), self.config.success_rate)
        self.draws += 1
        self.cell = int(self.table_SD[before, direction])
        success = letters[self.cell] == GOAL
        info = {"action_is_effective": self.cell != before, "action_is_valid": True, "success": success}
        return StepResult(
            self.render(), float(success and before != self.cell), success or letters[self.cell] == HOLE, info
        )

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.rows)
        assert self.rows is not None
        symbols = ["_OG"[(HOLE, GOAL).index(s) + 1 if s in (HOLE, GOAL) else 0] for s in "".join(self.rows)]
        symbols[self.cell] = {"_": "P", "O": "X", "G": "√"}[symbols[self.cell]]
        size = len(self.rows)
        text = "\n".join("".join(symbols[i : i + size]) for i in range(0, size * size, size))
        places = coordinate_sentence(text)
        if mode == "text_with_coordinates":
            return f"{text}\n{places}"
        return {"grid": text, "grid_coord": f"{places}\n{text}", "coord": places}[self.config.observation]

    def snapshot(self) -> Snapshot:
        check_started(self, self.rows)
        state = {
            "rows": list(self.rows or ()),
            "seed": self.seed,
            "sample": self.sample,
            "draws": self.draws,
            "cell": self.cell,
        }
        return {"world": self.name, **state}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name or len(snapshot["rows"]) != self.config.size:
            raise WorldFault(f"frozen_lake: not a snapshot of a {self.config.size}x{self.config.size} lake")
        self._start(tuple(snapshot["rows"]), int(snapshot["seed"]), int(snapshot["sample"]))
        self.slips.random(int(snapshot["draws"]))
        self.draws, self.cell = int(snapshot["draws"]), int(snapshot["cell"])
