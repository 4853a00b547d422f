"""The locks hold whole, hashed sets that agree with the constraints; `make locks` resolves them for both platforms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
LOCKS = {"cpu": "constraints.txt", "hopper": "constraints-h100.txt"}


def names(file: str) -> set[str]:
    """The packages of a requirements file, as an index spells them."""
    lines = (REQUIREMENTS / file).read_text(encoding="utf-8").splitlines()
    return {re.split(r"[\[=<>;! ]", line)[0].lower().replace("_", "-") for line in lines if line[:1].isalnum()}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_is_whole(lock: str) -> None:
    text = (REQUIREMENTS / f"lock-{lock}.txt").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ;[^\n]*?)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M
    )
    assert sum(line.count("==") > 0 and line[0] != " " for line in text.splitlines()) == len(entries)
    assert not re.search(r"https?:|^-", text, re.M), "a lock names no index"
    pinned = {name: version for name, version, _ in entries}
    extras = ["base.txt", "data.txt", "ray.txt", "video.txt", "web.txt"] + ["vllm.txt", "te.txt"] * (lock == "hopper")
    # its CPU build is not in the common index
    wanted = set().union(*map(names, extras)) - ({"torch"} if lock == "cpu" else set())
    assert wanted <= set(pinned), "make locks"
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", (REQUIREMENTS / LOCKS[lock]).read_text(encoding="utf-8"), re.M))
    assert {name: pinned[name] for name in tested if name in pinned} == {
        n: v for n, v in tested.items() if n in pinned
    }, "make locks"
