"""Sokoban rooms by reverse play. The order of random draws is that of the public generator, so a seed gives the same
room.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from .base import WorldFault, next_seed

# Visible cell codes: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target.
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
MAX_STATES = 300_000
TRIES = 4
# Floor masks of the random walk, as (row, column) offsets from the walker.
MASKS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
WALK = ((1, 0), (0, 1), (-1, 0), (0, -1))


class NoRoom(Exception):
    """This seed gives no room."""


@dataclass(frozen=True)
class RoomConfig:
    """Size and difficulty of generated rooms."""

    height: int = 6
    width: int = 6
    boxes: int = 1
    search_depth: int = 300
    open: bool = False  # floor everywhere inside the border, so that things' places are the whole state

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 4 or self.height * self.width > 256:
            raise ValueError(
                f"height: rooms are at least 4x4 and hold at most 256 cells, not {self.height}x{self.width}"
            )
        if self.boxes < 1 or self.search_depth < 2:
            raise ValueError(
                f"boxes: at least 1, and search_depth at least 2, not {self.boxes} and {self.search_depth}"
            )


def _topology(rng: random.Random, height: int, width: int, steps: int) -> bytearray:
    direction = rng.choice(WALK)
    row, col = rng.randint(1, height - 1), rng.randint(1, width - 1)
    level = bytearray(height * width)
    for _ in range(steps):
        if rng.random() < 0.35:
            direction = rng.choice(WALK)
        row = max(min(row + direction[0], height - 2), 1)
        col = max(min(col + direction[1], width - 2), 1)
        for dr, dc in rng.choice(MASKS):
            level[(row + dr) * width + col + dc] = FLOOR
    level[:width] = level[-width:] = bytes(width)
    for row in range(height):
        level[row * width] = level[row * width + width - 1] = WALL
    return level


def _place(level: bytearray, rng: np.random.RandomState, boxes: int) -> tuple[int, list[int]]:
    """A player cell and one target per box, uniform on the floor left over."""
    free = [i for i, cell in enumerate(level) if cell == FLOOR]
    if len(free) <= boxes + 1:
        raise NoRoom
    player = free.pop(int(rng.randint(len(free))))
    return player, [free.pop(int(rng.randint(len(free)))) for _ in range(boxes)]


def _reverse_play(
    level: bytearray, width: int, player: int, targets: list[int], depth: int
) -> tuple[int, tuple[int, ...], int]:
    """Depth-first search over pull moves; returns the player, the boxes and the displacement of the best state.

    A state is known by its picture, in which a box that was ever pulled differs from one that was not: the memo key
    keeps both sets of boxes as bit masks. The first path to a picture decides its score, as in the public generator.
    """
    targets = sorted(targets)
    target_bits = sum(1 << t for t in targets)
    wall_bits = sum(1 << i for i, cell in enumerate(level) if cell == WALL)
    cells = len(level)
    place = [(i // width, i % width) for i in range(cells)]
    distance = [[abs(r - place[t][0]) + abs(c - place[t][1]) for r, c in place] for t in targets]
    start = tuple(targets)
    best_score, best = -1, (player, start, 0)
    seen: set[int] = set()
    # Popped in the order Up, Down, Left, Right, hence pushed in reverse.
    moves = (1, -1, width, -width)
    stack = [(player, start, target_bits, 0, -1, 0, depth - 1, 0)]
    while stack:
        player, boxes, still, pulled, last, swaps, ttl, displacement = stack.pop()
        if ttl <= 0 or len(seen) >= MAX_STATES:
            continue
        key = ((still << cells | pulled) << 8) | player
        if key in seen:
            continue
        seen.add(key)
        occupied = still | pulled
        score = 0 if (occupied | 1 << player) & target_bits else swaps * displacement
        if score > best_score:
            best_score, best = score, (player, boxes, displacement)
        ttl -= 1
        if ttl <= 0:
            continue
        blocked = occupied | wall_bits
        for move in moves:
            ahead = player + move
            if blocked >> ahead & 1:
                continue
            behind = player - move
            if not occupied >> behind & 1:
                stack.append((ahead, boxes, still, pulled, last, swaps, ttl, displacement))
                continue
            which = boxes.index(behind)
            shifted = boxes[:which] + (player,) + boxes[which + 1 :]
            gain = distance[which][player] - distance[which][behind]
            stack.append(
                (
                    ahead,
                    shifted,
                    still & ~(1 << behind),
                    pulled & ~(1 << behind) | 1 << player,
                    which,
                    swaps + (which != last),
                    ttl,
                    displacement + gain,
                )
            )
    return best


def _scatter(cells: bytearray, width: int, player: int, rng: random.Random, probability: float) -> int:
    """Walk the player up to three random steps over free cells, without going back."""
    if rng.random() > probability:
        return player
    visited = {player}
    for step in range(3):
        choices = [
            player + d
            for d in (-width, width, -1, 1)
            if cells[player + d] in (FLOOR, TARGET) and player + d not in visited
        ]
        if not choices:
            break
        player = rng.choice(choices)
        visited.add(player)
        if step == 2 or rng.random() > 0.5:
            break
    return player


def _room(config: RoomConfig, seed: int) -> bytes:
    rng, np_rng = random.Random(seed), np.random.RandomState(seed)
    width = config.width
    for _ in range(TRIES):
        level = _topology(rng, config.height, width, int(1.7 * (config.height + width)))
        if config.open:
            level = bytearray(
                FLOOR if 0 < i // width < config.height - 1 and 0 < i % width < width - 1 else WALL
                for i in range(len(level))
            )
        player, targets = _place(level, np_rng, config.boxes)
        player, boxes, displacement = _reverse_play(level, width, player, targets, config.search_depth)
        if displacement > 0:
            break
    else:
        raise NoRoom
    for target in targets:
        level[target] = TARGET
    for box in boxes:
        level[box] = BOX
    player = _scatter(level, width, player, rng, 0.8 if displacement == 1 else 0.5)
    level[player] = PLAYER_ON_TARGET if level[player] == TARGET else PLAYER
    return bytes(level)


def make_room(config: RoomConfig, seed: int) -> tuple[bytes, int]:
    """The room of a seed as visible codes, row-major, and the seed that gave it (another one when the seed itself
    has no room).
    """
    for _ in range(100):
        try:
            return _room(config, seed), seed
        except NoRoom:
            seed = next_seed(seed)
    raise WorldFault(
        f"sokoban: no room in 100 seeds; lower boxes={config.boxes} or enlarge {config.height}x{config.width}"
    )


def make_rooms(config: RoomConfig, seeds: list[int] | range) -> np.ndarray:
    """A pool of rooms, [len(seeds), height*width] uint8 of visible codes."""
    return (
        np.frombuffer(b"".join(make_room(config, seed)[0] for seed in seeds), dtype=np.uint8)
        .reshape(len(seeds), -1)
        .copy()
    )
