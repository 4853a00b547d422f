"""`terrella bench e2e`: a whole RL recipe end to end: trained tokens/s, and the shares of sampling and training in a step."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..core.metrics import MetricsFile
from . import record


def shares(rows: list[dict], skip: int) -> dict[str, list[float]]:
    """Of each reinforcement step after the first `skip`: seconds, trained tokens a second, share of sampling in percent."""
    steps = [row for row in rows if "time/rollout_s" in row][skip:]
    before = {id(row): previous for previous, row in itertools.pairwise(steps)}
    found: dict[str, list[float]] = {"step": [], "trained": [], "sampling": []}
    for row in steps:
        found["step"].append(row["time/step_s"])
        found["sampling"].append(100.0 * row["time/rollout_s"] / row["time/step_s"])
        if id(row) in before:
            found["trained"].append((row["tokens"] - before[id(row)]["tokens"]) / row["time/step_s"])
    return found


def main() -> None:
    """Run the recipe in a folder of its own and record its figures."""
    parser = argparse.ArgumentParser(prog="terrella bench e2e", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="sokoban-tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the recipe")
    parser.add_argument("--until", help="last stage to run")
    parser.add_argument("--skip", type=int, default=1, help="first steps to leave out: they compile and warm up")
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terrella-e2e-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "terrella", "train", given.recipe, "--run", str(run)]
        command += [word for setting in given.set for word in ("--set", setting)] + (["--until", given.until] if given.until else [])
        begun = time.monotonic()
        done = subprocess.run(command, timeout=given.timeout)
        took = time.monotonic() - begun
        if done.returncode:
            sys.exit(f"the recipe ended with code {done.returncode}")
        rows = list(MetricsFile(run / "metrics.jsonl").rows())
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core"))
    recorder = record.Recorder("e2e", "terrella bench e2e " + " ".join(sys.argv[1:]), gpu, versions)
    recorder.add(given.recipe, "terrella", "whole run", took, "s")
    for metric, unit in (("step", "s"), ("trained", "tokens/s"), ("sampling", "%")):
        values = sorted(shares(rows, given.skip)[metric])
        if values:
            low, high = values[len(values) // 5], values[len(values) * 4 // 5]
            recorder.add(given.recipe, "terrella", metric, statistics.median(values), unit, low, high)
    for row in recorder.rows:
        print(f"{row.case:24} {row.impl:12} {row.metric:10} {row.value:12.4g} {row.unit}", flush=True)
    record.append(recorder.rows, given.out)


if __name__ == "__main__":
    main()
