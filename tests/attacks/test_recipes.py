"""Recipes under attack: texts changed by a seeded draw load, or are refused with a message that names the place;
none crashes or hangs.
"""

from __future__ import annotations

import random
import re
import time
from functools import cache
from pathlib import Path

import pytest

from terrella.core import schema
from terrella.core.errors import ConfigError
from terrella.launch import recipe as recipes
from terrella.launch.recipe_files import find

SEED = 20260917
HOSTILE = [
    *(
        ".nan",
        "-.inf",
        "-1",
        "-1e300",
        "9" * 60,
        "9" * 5000,
        "[]",
        "{}",
        "null",
        "~",
        "true",
        '""',
        '"\\0"',
        "../../etc/passwd",
    ),
    *(
        "!!python/name:os.system",
        "!!binary x",
        "2024-13-45",
        "&a [*a]",
        "*missing",
        "<<",
        "|",
        ">",
        "'",
        '"',
        "{{",
        "]]",
        "%",
        "@",
        "`",
    ),
    *(
        "0x" + "f" * 99,
        "1e999",
        "kind",
        "\ufffe",
        "a: b: c",
        "- - -",
        "[[[[[[[[[[[[]]]]]]]]]]]]",
        "🙂",
        "0",
        "1_000_000_000_000",
        "-0.0",
    ),
]


def changed(text: str, draw: random.Random) -> str:
    """A recipe with one to three hostile changes: of a value, a key, a line, or bytes."""
    lines = text.split("\n")
    for _ in range(draw.randint(1, 3)):
        at, how = draw.randrange(len(lines)), draw.randrange(6)
        if how == 0:
            lines[at] = re.sub(r":.*", lambda _: f": {draw.choice(HOSTILE)}", lines[at], count=1)
        elif how == 1:
            lines[at] = re.sub(r"\w+:", lambda _: f"{draw.choice(HOSTILE)}:", lines[at], count=1)
        elif how == 2:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif how == 3:
            del lines[at]
            lines = lines or [""]
        elif how == 4:
            lines[at] = " " * draw.randrange(6) + lines[at]
        elif lines[at]:
            held, i = bytearray(lines[at].encode()), draw.randrange(len(lines[at].encode()))
            held[i] ^= 1 << draw.randrange(7)
            lines[at] = held.decode(errors="replace")
    return "\n".join(lines)


@cache
def texts() -> list[str]:
    """Recipes as they are written, and some that are made of several files, written out with every setting."""
    written = (
        "demo",
        "grpo",
        "ppo",
        "sft",
        "sokoban-tiny",
        "text-game-tiny",
        "video-tiny",
        "web-page-tiny",
        "webrl-tiny",
    )
    made = ("spa-sokoban-tiny", "webrl-sites", "text-game-rlvr-binary", "mpc-sites-tiny")
    return [find(name).path.read_text() for name in written] + [schema.dump(recipes.load(name)) for name in made]


def attack(count: int, folder: Path, seed: int) -> dict[str, int]:
    found = {"loaded": 0, "refused": 0}
    path = folder / "attacked.yaml"
    for text in texts():  # or a refusal would say nothing
        path.write_text(text, encoding="utf-8")
        recipes.load(str(path))
    for i in range(count):
        draw = random.Random(f"{seed}/{i}")
        path.write_text(changed(draw.choice(texts()), draw), encoding="utf-8", errors="replace")
        begun = time.process_time()
        try:
            recipes.load(str(path))
            found["loaded"] += 1
        except ConfigError as error:
            assert "attacked.yaml" in str(error) or "recipe" in str(error), str(error)
            found["refused"] += 1
        assert time.process_time() - begun < 10
    return found


def test_recipes(tmp_path: Path) -> None:
    assert attack(25, tmp_path, SEED)["refused"] >= 10


@pytest.mark.full
def test_all_recipes(tmp_path: Path) -> None:
    found = attack(400, tmp_path, SEED + 1)
    print(found)
    assert found["refused"] >= 200
