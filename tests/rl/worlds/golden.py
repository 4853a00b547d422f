"""Digests of the public generators' output; `python -m terrella.tests.rl.worlds.golden DATA_FOLDER` writes
digests.json from the data.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("digests.json")


def text_digest(text: str) -> str:
    """Sixteen hex digits of a state text: what the shipped parity tables hold."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def lake_text(rows: list[str], player: tuple[int, int] | None = None) -> str:
    """A map as the world draws it; the player stands on the start cell unless told."""
    letters = [list(row) for row in rows]
    row, col = player or next((r, line.index("S")) for r, line in enumerate(letters) if "S" in line)
    drawn = [["_OG"["HG".find(x) + 1] for x in line] for line in letters]
    drawn[row][col] = {"_": "P", "O": "X", "G": "√"}[drawn[row][col]]
    return "\n".join("".join(line) for line in drawn)


def trace_digest(steps: list[tuple[str, float, bool, bool]]) -> str:
    """One digest over (text, reward, done, effective) of all steps."""
    return text_digest(
        "\n".join(f"{text}|{reward:.3f}|{int(done)}|{int(effective)}" for text, reward, done, effective in steps)
    )


def from_data(root: Path) -> dict[str, Any]:
    """All digests, taken from the data files alone: name -> seed -> digest of the start, or of a whole episode."""

    def read(name: str) -> Any:
        return json.loads((root / "spa" / f"{name}.json").read_text())

    def rooms(rows: list[dict]) -> dict[str, str]:
        return {str([r["seed"], *r["fallback_chain"]][-1]): text_digest(r["text"]) for r in rows}

    out: dict[str, Any] = {
        "SimpleSokoban": rooms([row for part in read("sokoban_simple").values() for row in part]),
        "Sokoban2Boxes": rooms(read("Sokoban2Boxes")),
        "HarderSokoban": rooms(read("HarderSokoban")),
        "FrozenLake": {str(r["seed"]): text_digest(lake_text(r["map"])) for r in read("frozenlake_4x4_p08")},
        "Sudoku": {str(r["seed"]): text_digest(r["text"]) for r in read("sudoku_4x4_easy")},
    }
    out["SimpleSokoban/steps"] = [
        [
            e["seed"],
            [s["action"] for s in e["steps"]],
            trace_digest([(s["text"], s["reward"], s["done"], s["effective"]) for s in e["steps"]]),
        ]
        for e in read("sokoban_steps")
    ]
    out["FrozenLake/steps"] = [
        [
            e["seed"],
            [s["action"] for s in e["steps"]],
            trace_digest(
                [(lake_text(e["map"], tuple(s["pos"])), s["reward"], s["done"], s["effective"]) for s in e["steps"]]
            ),
        ]
        for e in read("frozenlake_steps_slippery_third")
    ]
    return out


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(from_data(Path(sys.argv[1])), separators=(",", ":")) + "\n")
