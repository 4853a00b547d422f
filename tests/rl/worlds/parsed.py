"""States of the worlds read back from their texts: the inverse that holds the renderings to what they say."""

import re

from terrella.rl.worlds import sudoku
from terrella.rl.worlds.frozen_lake import LEGEND
from terrella.rl.worlds.sokoban_text import SYMBOLS, coordinate_sentence

_CELL = re.compile(r"\((\d+),(\d+)\)")
_COUNTDOWN = re.compile(r"Target: (\d+), nums: \[([\d, ]+)\]")


def parse_lake_sentence(sentence: str, size: int) -> str:
    """The grid that a coordinate sentence describes; raises ValueError when it names no player or a cell outside."""
    grid = [["_"] * size for _ in range(size)]
    kinds = {"player in hole": "X", "player on goal": "√", "player": "P", "hole": "O", "holes": "O", "goal": "G"}
    players = 0
    for part in sentence.strip().rstrip(".").split(";"):
        name = part.split("(")[0].strip().lower().removesuffix(" at")
        if name not in kinds:
            raise ValueError(f"unknown part {part.strip()!r} in {sentence!r}")
        for r, c in _CELL.findall(part):
            if int(r) >= size or int(c) >= size:
                raise ValueError(f"cell ({r},{c}) lies outside {size}x{size}")
            grid[int(r)][int(c)] = kinds[name]
            players += name.startswith("player")
    if players != 1:
        raise ValueError(f"{players} players in {sentence!r}")
    return "\n".join("".join(row) for row in grid)


def parse_lake(text: str) -> str:
    """The grid of a text with or without coordinates; raises ValueError when malformed or when the sentence
    contradicts the grid.
    """
    grid = text.strip("\n").split("\n")
    sentence = grid.pop() if "(" in grid[-1] else None
    if not grid or any(len(row) != len(grid) or set(row) - set(LEGEND) for row in grid):
        raise ValueError(f"not a FrozenLake grid: {text!r}")
    picture = "\n".join(grid)
    if sentence is not None and parse_lake_sentence(sentence, len(grid)) != picture:
        raise ValueError(f"the sentence {sentence!r} does not describe the grid above it")
    return picture


def parse_sokoban(text: str, symbols: str = SYMBOLS) -> str:
    """The grid of a text with coordinates; raises ValueError when it is ragged, has other symbols, or contradicts
    its sentence.
    """
    rows = text.strip("\n").split("\n")
    grid = list(rows)
    sentence = grid.pop() if len(grid) > 1 and "(" in grid[-1] else None
    if not grid or any(len(row) != len(grid[0]) or set(row) - set(symbols) for row in grid):
        raise ValueError(f"not a Sokoban grid of {symbols!r}: {text!r}")
    picture = "\n".join(grid)
    if sentence is not None and coordinate_sentence(picture, symbols) != sentence:
        raise ValueError(f"the sentence {sentence!r} does not describe the grid above it")
    return picture


def parse_sudoku(text: str) -> sudoku.Board:
    """The board of a text with or without coordinates; raises ValueError when malformed or when the sentence
    contradicts the board.
    """
    picture, _, sentence = text.strip().partition("\n")
    rows = [row.split() for row in picture.split("|") if row.strip()]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"not a square board: {text!r}")
    digits = {".": 0, **{str(i): i for i in range(1, len(rows) + 1)}}
    if any(cell not in digits for row in rows for cell in row):
        raise ValueError(f"a cell is neither a dot nor 1..{len(rows)}: {text!r}")
    board = tuple(tuple(digits[cell] for cell in row) for row in rows)
    if sentence and sentence != sudoku.coordinate_sentence(board):
        raise ValueError(f"the sentence {sentence!r} does not describe the board before it")
    return board


def parse_countdown(text: str) -> tuple[list[int], int]:
    """(nums, target) of a state text; raises ValueError when it is not one."""
    found = _COUNTDOWN.match(text)
    if not found:
        raise ValueError(f"not a Countdown state: {text!r}")
    return [int(n) for n in found.group(2).split(",")], int(found.group(1))
