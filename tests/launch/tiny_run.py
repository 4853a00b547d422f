"""A recipe small enough for tests: the demo with every number turned down. Helper module, not a test."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from terrella.core.metrics import MetricsFile
from terrella.tests.golden.observe import comparable

PATIENCE_S = 900.0  # of a busy machine; a free one needs a minute
OVERRIDES = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=48",
    "env.heldout_rooms=12",
    "env.actions_per_room=6",
    "stages.0.prompts=60",
    "stages.0.samples_per_shard=64",
    "stages.1.steps=8",
    "stages.1.sequences_per_step=16",
    "stages.1.optimizer={lr: 1e-2}",
    "stages.1.checkpoint_every=3",
    "stages.1.log_every=2",
    "stages.2.steps=4",
    # a gradient even where no sample is exact yet
    "stages.2.algorithm={kind: grpo, entropy_coef: 0.01, kl_coef: 0.001}",
    "stages.2.prompts_per_step=4",
    "stages.2.samples_per_prompt=4",
    "stages.2.updates_per_rollout=2",  # a kill may fall between two updates of one rollout
    "stages.2.checkpoint_every=2",
    "stages.2.rollouts_every=2",
    "stages.3.sequences_per_step=16",
    "stages.3.checkpoint_every=20",
    "stages.4.n=16",
]


def command(run: Path, *more: str) -> list[str]:
    """The command line of the tiny run."""
    sets = [part for override in (*OVERRIDES, *more) for part in ("--set", override)]
    return [sys.executable, "-m", "terrella", "train", "sokoban-tiny", "--run", str(run), *sets]


def train(run: Path, *more: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess:
    """Run it to its end."""
    return subprocess.run(command(run, *more), capture_output=True, text=True, timeout=timeout)


def kill_once(words: list[str], after_s: float) -> bool:
    """Start a run and kill it after so many seconds; False when it had finished before."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=after_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=300)
        return True


def kill_often(words: Callable[[Path], list[str]], folder: Path, took_s: float, rng: random.Random, kills: int) -> Path:
    """Start and kill a run that takes so long at random moments, going on from what is there; returns its directory.

    A run that ends before its first kill shows nothing: its time was measured while the machine was busy, and a new one
    is killed earlier.
    """
    for attempt in range(8):
        run = folder / f"killed-{attempt}"
        if sum([kill_once(words(run), rng.uniform(0.05, 0.95) * took_s / 2**attempt) for _ in range(kills)]):
            return run
    raise AssertionError("every start finished before its kill; the test saw nothing")


def results(run: Path) -> dict:
    """All that must be equal between equal runs: metrics, stage outcomes, tables, rollouts and exported weights."""
    found: dict = {"metrics": comparable(MetricsFile(run / "metrics.jsonl").rows())}
    for folder in ("stages", "results"):
        for path in sorted((run / folder).glob("*.json")):
            told = json.loads(path.read_text())
            found[f"{folder}/{path.name}"] = {k: v for k, v in told.items() if not k.startswith("time/")}
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        found[path.name] = path.read_text()
    for path in sorted((run / "export").glob("*.safetensors")):
        found[path.name] = path.read_bytes()
    return found
