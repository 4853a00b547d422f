"""Seeded damage to the files of a run, and the judgement of what the next start made of it. Helper module, not a
test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terrella.tests.attacks.jobs import End
from terrella.tests.launch import tiny_run

# what a row of the table in docs/lab/attacks.md names -> the files of the killed run
TARGETS = {
    "checkpoint": "checkpoints/*/*/*.safetensors",
    "manifest": "checkpoints/*/*/*.json",
    "journal": "stages/rlvr/journal/*.jsonl",
    "metrics": "metrics.jsonl",
    "outcomes and sums": "stages/*.*",
    "rooms": "stages/selfplay/rooms.json",
    "lease and settings": "[lc]*.*[ln]",  # lease.json, config.yaml
}


ANY = "any file"  # but the pictures of a run, which a later start cannot know of
PICTURES = {"results", "rollouts", "logs", "videos", "summary.json", "report.html"}


def files_of(run: Path, target: str) -> list[Path]:
    """The files that a target means; an empty one, such as a lock, has nothing that could be damaged."""
    found = run.rglob("*") if target == ANY else run.glob(TARGETS[target])
    files = (path for path in found if path.is_file() and path.stat().st_size)
    return sorted(path for path in files if path.relative_to(run).parts[0] not in PICTURES)


def _flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _blank(data: bytearray, draw: random.Random) -> None:
    first = draw.randrange(len(data))
    data[first : first + 16] = bytes(len(data[first : first + 16]))


def _digit(data: bytearray, draw: random.Random) -> None:
    """Another digit where a digit was: the file stays well formed."""
    places = [i for i, letter in enumerate(data) if 48 <= letter < 58]
    place = draw.choice(places) if places else draw.randrange(len(data))
    data[place] = draw.choice([48 + n for n in range(10) if 48 + n != data[place]])


def _lose_line(data: bytearray, draw: random.Random) -> None:
    lines = data.split(b"\n")
    del lines[draw.randrange(len(lines))]
    data[:] = b"\n".join(lines)


KINDS: dict[str, Callable[[bytearray, random.Random], None] | None] = {
    "flip": _flip,
    "cut": _cut,
    "blank": _blank,
    "digit": _digit,
    "lose a line": _lose_line,
    "delete": None,
}


@dataclass(frozen=True)
class Attack:
    """One seeded attack on a copy of the killed run."""

    target: str
    kind: str
    file: Path

    def __str__(self) -> str:
        return f"{self.kind} {self.file}"


def attack(run: Path, target: str, seed: int) -> Attack:
    """Damage one file of the target, by the seed."""
    draw = random.Random(f"{target} {seed}")
    file = draw.choice(files_of(run, target))
    kind = draw.choice(list(KINDS))
    damage = KINDS[kind]
    if damage is None:
        file.unlink()
    else:
        before = file.read_bytes()
        data = bytearray(before)
        damage(data, draw)
        if bytes(data) == before:
            _flip(data, draw)
        file.write_bytes(bytes(data))
    return Attack(target, kind, file)


def judge(made: Attack, run: Path, end: End, expected: dict) -> str:
    """`harmless` (same results), `named` (same results, or a record known to be damaged, and the file was named),
    `refused` (by name).

    Anything else breaks a promise and is returned as a sentence.
    """
    named = str(made.file) in end.said or (
        str(made.file.parent) in end.said and made.file.parent.name.startswith("step-")
    )
    if end.unnamed:
        return f"UNNAMED: {made}: {end.unnamed[-600:]}"
    if end.code:
        return "refused" if named else f"UNNAMED: {made}: code {end.code}: {end.said}"
    results = tiny_run.results(run)
    changed = [name for name in expected if results.get(name) != expected[name]]
    if changed and not (named and changed == ["metrics"]):
        return f"SILENT: {made}: {', '.join(changed)} changed; it said: {end.said}"
    return "named" if named else "harmless"
