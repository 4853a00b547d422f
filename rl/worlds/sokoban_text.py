"""Sokoban as text with coordinates (the state-estimation format)."""

from __future__ import annotations

SYMBOLS = "#_O√XPS"  # by visible code 0..6
MEANINGS = ("wall", "empty", "target", "box on target", "box", "player", "player on target")


def _cells(text: str, symbols: str) -> list[tuple[int, int]]:
    return [(r, c) for r, row in enumerate(text.split("\n")) for c, symbol in enumerate(row) if symbol in symbols]


def _list(cells: list[tuple[int, int]]) -> str:
    return ", ".join(f"({r},{c})" for r, c in cells)


def coordinate_sentence(text: str, symbols: str = SYMBOLS) -> str:
    """One sentence naming player, boxes and targets as zero-indexed (row,col), row-major; a kind with no cell is
    left out.
    """
    _, _, target, box_on, box, player, player_on = symbols
    parts = []
    for name, symbol in (
        ("Player", player),
        ("Player on target", player_on),
        ("box", box),
        ("box on target", box_on),
        ("target", target),
    ):
        cells = _cells(text, symbol)
        if cells:
            plural = len(cells) > 1
            noun = (
                name.replace("box", "boxes", 1) if plural and name.startswith("box") else name + "s" if plural else name
            )
            parts.append(f"{noun} ({symbol}) {'are' if plural else 'is'} at {_list(cells)}")
    return "; ".join(parts) + "."


def with_coordinates(text: str, symbols: str = SYMBOLS) -> str:
    """The grid followed by its coordinate sentence."""
    return f"{text}\n{coordinate_sentence(text, symbols)}"
