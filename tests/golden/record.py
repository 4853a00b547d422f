"""Writes the golden files anew: `python -m terrella.tests.golden.record [CASE...]`. The commit then says which lines
changed, and why.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .observe import FILES, differences, observe, this_platform
from .play import FAILED, LANES, OLD, PATIENCE_S, PLAYED, play_all


def read(case: str) -> dict:
    """The golden file of a case."""
    return json.loads((FILES / f"{case}.json").read_text(encoding="utf-8"))


def found(runs: Path, case: str) -> dict:
    """What a played case gave; its error where it failed."""
    failed = runs / case / FAILED
    if failed.exists():
        raise RuntimeError(f"golden case {case} failed:\n{failed.read_text()}")
    if not (runs / case / PLAYED).exists():
        raise RuntimeError(
            f"golden case {case} was not finished within {PATIENCE_S:.0f} s, or its process died; see "
            f"{runs.parent}/lane-*.log"
        )
    return observe(runs / case)


def main(wanted: list[str]) -> None:
    """Play the cases, with those whose runs they read, write the files of the wanted ones and say what changed."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=FILES.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    known = [case for lane in LANES for case in lane if case != OLD]
    for case in wanted:
        if case not in known:
            raise SystemExit(f"{case}: no golden case; they are {', '.join(known)}")
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        needed = tuple(
            lane[: max(i for i, case in enumerate(lane) if case in wanted) + 1]
            for lane in LANES
            if set(lane) & set(wanted)
        )
        play_all(Path(folder), needed or LANES)
        for case in wanted or known:
            told = {"commit": commit, "platform": this_platform(), **found(Path(folder, "runs"), case)}
            path = FILES / f"{case}.json"
            if path.exists():
                for line in differences(read(case), told, exact=True):
                    print(f"{case}: {line}")
            path.write_text(json.dumps(told, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
