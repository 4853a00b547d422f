"""Sudoku with a unique solution: shuffled cyclic board, cells removed while the solution stays unique."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

from .base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started

Board = tuple[tuple[int, ...], ...]  # 0 is a blank
CLUES = {4: {"easy": 10, "medium": 9, "hard": 6}, 9: {"easy": 36, "medium": 30, "hard": 24}}
EXTRA_PASSES = 8


@dataclass(frozen=True)
class SudokuConfig:
    """Board size (4 or 9), difficulty (easy, medium, hard) and the limit of steps."""

    size: int = 4
    difficulty: str = "easy"
    max_steps: int = 30

    def __post_init__(self) -> None:
        if self.size not in CLUES or self.difficulty not in CLUES[self.size]:
            raise ValueError(
                f"size: must be 4 or 9 and difficulty easy, medium or hard, not {self.size}, {self.difficulty!r}"
            )


def _solved_board(rng: random.Random, size: int) -> list[list[int]]:
    box = math.isqrt(size)

    def shuffled_lines() -> list[int]:
        groups = list(range(box))
        rng.shuffle(groups)
        lines = []
        for group in groups:
            inner = list(range(group * box, (group + 1) * box))
            rng.shuffle(inner)
            lines += inner
        return lines

    rows, cols = shuffled_lines(), shuffled_lines()
    digits = list(range(1, size + 1))
    rng.shuffle(digits)
    return [[digits[(r * box + r // box + c) % size] for c in cols] for r in rows]


def _options(board: list[list[int]], row: int, col: int) -> list[int]:
    size, box = len(board), math.isqrt(len(board))
    used = set(board[row]) | {line[col] for line in board}
    top, left = row // box * box, col // box * box
    for line in board[top : top + box]:
        used.update(line[left : left + box])
    return [digit for digit in range(1, size + 1) if digit not in used]


def count_solutions(board: list[list[int]], limit: int = 2) -> int:
    """How many ways there are to fill the blanks, counted up to `limit`."""
    best: tuple[int, int, list[int]] | None = None
    for r, line in enumerate(board):
        for c, digit in enumerate(line):
            if digit == 0:
                options = _options(board, r, c)
                if best is None or len(options) < len(best[2]):
                    best = r, c, options
    if best is None:
        return 1
    r, c, options = best
    found = 0
    for digit in options:
        board[r][c] = digit
        found += count_solutions(board, limit - found)
        board[r][c] = 0
        if found >= limit:
            break
    return found


def make_puzzle(config: SudokuConfig, seed: int) -> tuple[Board, Board]:
    """(puzzle, solution) of a seed."""
    rng = random.Random(seed)
    size, clues = config.size, CLUES[config.size][config.difficulty]
    solution = _solved_board(rng, size)
    puzzle = [line[:] for line in solution]
    cells = [(r, c) for r in range(size) for c in range(size)]
    filled = size * size
    for _ in range(1 + EXTRA_PASSES):
        rng.shuffle(cells)
        for r, c in cells:
            if filled <= clues:
                break
            if puzzle[r][c]:
                puzzle[r][c] = 0
                if count_solutions(puzzle) == 1:
                    filled -= 1
                else:
                    puzzle[r][c] = solution[r][c]
        if filled <= clues:
            break
    return tuple(map(tuple, puzzle)), tuple(map(tuple, solution))


def render_board(board: Board) -> str:
    """All rows on one line, `| d d d d ` each, a dot for a blank."""
    return "".join("| " + "".join(f"{digit or '.'} " for digit in line) for line in board)


def coordinate_sentence(board: Board) -> str:
    """The blanks as one-indexed (row,col)."""
    blanks = [f"({r + 1},{c + 1})" for r, line in enumerate(board) for c, digit in enumerate(line) if digit == 0]
    if not blanks:
        return "No empty positions are left."
    if len(blanks) == 1:
        return f"Empty position to be filled is at {blanks[0]}."
    return f"Empty positions to be filled are at {', '.join(blanks)}."


def parse_move(action: str) -> tuple[int, int, int] | None:
    """(row, col, value), zero-indexed cell, from `row,col,value`, `row col value` or `place V at row R col C`; None
    when it is neither.
    """
    words = action.lower().replace(",", " ").split()
    if "row" in words and "col" in words:
        numbers = {i: int(w) for i, w in enumerate(words) if w.isascii() and w.isdigit() and len(w) < 4}
        row, col = words.index("row") + 1, words.index("col") + 1
        value = next((n for i, n in numbers.items() if i not in (row, col)), None)
        if row not in numbers or col not in numbers or value is None:
            return None
        return numbers[row] - 1, numbers[col] - 1, value
    if len(words) < 3 or not all(re.fullmatch(r"-?[0-9]{1,3}", w) for w in words[:3]):
        return None
    row, col, value = (int(w) for w in words[:3])
    return row - 1, col - 1, value


class Sudoku(World):
    """Fill every blank. An allowed digit is written even when it is not the solution's, so dead ends exist."""

    name = "sudoku"
    Config = SudokuConfig
    render_modes = ("text", "text_with_coordinates")

    def __init__(self, **settings: Any) -> None:
        self.config = SudokuConfig(**settings)
        self.board: list[list[int]] | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.given, self.solution = make_puzzle(self.config, seed)
        self.board, self.steps = [list(line) for line in self.given], 0
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.board)
        assert self.board is not None
        self.steps += 1
        size, move = self.config.size, parse_move(str(action))
        valid = move is not None and 0 <= move[0] < size and 0 <= move[1] < size and 1 <= move[2] <= size
        valid = valid and self.given[move[0]][move[1]] == 0  # type: ignore[index]
        effective = valid and move[2] in _options(self.board, move[0], move[1])  # type: ignore[index]
        if effective:
            row, col, value = move  # type: ignore[misc]
            self.board[row][col] = value
        # Every digit was checked against its row, column and box when written: a full board is a correct one.
        success = effective and all(all(line) for line in self.board)
        info = {"action_is_effective": effective, "action_is_valid": valid, "success": success}
        return StepResult(self.render(), float(success), success or self.steps >= self.config.max_steps, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.board)
        assert self.board is not None
        board = tuple(map(tuple, self.board))
        return render_board(board) if mode == "text" else f"{render_board(board)}\n{coordinate_sentence(board)}"

    def random_action(self, rng: random.Random) -> str:
        return ",".join(str(rng.randint(1, self.config.size)) for _ in range(3))

    def snapshot(self) -> Snapshot:
        check_started(self, self.board)
        boards = {"given": self.given, "solution": self.solution, "board": self.board}
        return {
            "world": self.name,
            "steps": self.steps,
            **{k: [list(line) for line in v or ()] for k, v in boards.items()},
        }

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name or len(snapshot["board"]) != self.config.size:
            raise WorldFault(f"sudoku: not a snapshot of a {self.config.size}x{self.config.size} board")
        self.given, self.solution = (tuple(tuple(line) for line in snapshot[k]) for k in ("given", "solution"))
        self.board, self.steps = [list(line) for line in snapshot["board"]], int(snapshot["steps"])
