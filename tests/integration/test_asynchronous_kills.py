"""SIGKILL of the command line's own asynchronous run, of its launcher, its worker or both, at any moment: every step is
trained once, and what the journal holds is what was trained on. The full test has 108 kills in nine cases, so that they
can be shared among cores.
"""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from terrella.core.metrics import MetricsFile
from terrella.rl.journal import Journal
from terrella.tests.golden.observe import comparable
from terrella.tests.reap import is_running
from terrella.tests.rl.test_conversations import ENVIRONMENT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(4 * 3600)]
PATIENCE_S = 1200.0  # of a busy machine
STEPS, PROMPTS, AHEAD = 10, 4, 2
RECIPE = f"""
name: killed
world: language
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 259, max_positions: 128, tied: true}}
env: {{kind: "guess.py:Guess"}}
stages:
- {{kind: start, name: start}}
- {{kind: rl, name: rl, init: start, algorithm: {{kind: grpo, tis_cap: 2.0}}, prompts_per_step: {PROMPTS}, samples_per_prompt: 4, steps: {STEPS}, max_new_tokens: 4,
   optimizer: {{lr: 1e-2}}, checkpoint_every: 2, rollouts: {{ahead: {AHEAD}, keep_samples: true}}}}
"""  # noqa: E501


def command(folder: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "terrella", "train", str(folder / "recipe.yaml"), "--run", str(run), *more]


def written(run: Path) -> int:
    """Bytes that the RL stage's journal holds."""
    return sum(path.stat().st_size for path in (run / "stages" / "rl" / "journal").glob("*.jsonl"))


def kill(words: list[str], run: Path, dice: random.Random, last_s: float) -> bool:
    """Start the run and kill it some time after it began to sample; False where it ended before."""
    before, end = written(run), time.monotonic() + PATIENCE_S
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while written(run) == before and process.poll() is None:
            assert time.monotonic() < end, f"the run sampled nothing within {PATIENCE_S:.0f} s"
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, last_s))
        workers = psutil.Process(process.pid).children() if process.poll() is None else []
        chosen = dice.choice(["launcher", "worker", "both"])
        for worker in workers if chosen != "launcher" else []:
            worker.send_signal(signal.SIGKILL)
        if chosen != "worker" and process.poll() is None:
            process.send_signal(signal.SIGKILL)
        code, end = process.wait(PATIENCE_S), time.monotonic() + PATIENCE_S
        while any(is_running(worker.pid) for worker in workers):
            assert time.monotonic() < end, "a worker outlived its launcher"
            time.sleep(0.05)
        return code != 0
    finally:
        process.kill()


def rows(run: Path) -> list[dict]:
    return [row for row in comparable(MetricsFile(run / "metrics.jsonl").rows()) if "reward/mean" in row]


FULL = [pytest.param(12, seed, marks=pytest.mark.full) for seed in range(10, 19)]


@pytest.mark.parametrize(("kills", "seed"), [(3, 3), *FULL])
def test_every_step_is_trained_once_and_can_be_replayed(tmp_path: Path, kills: int, seed: int) -> None:
    (tmp_path / "guess.py").write_text(ENVIRONMENT)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    dice, total, last_s = random.Random(seed), 0, 2.0
    for number in range(kills):
        run, mine = tmp_path / f"run-{number}", 0
        while mine < 12 and total < kills and kill(command(tmp_path, run), run, dice, last_s):
            mine, total = mine + 1, total + 1
        if not mine:
            last_s /= 2
        done = subprocess.run(command(tmp_path, run), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
        assert all(row["staleness/max"] <= AHEAD for row in rows(run))
        journal = Journal(run / "stages" / "rl" / "journal")
        assert journal.trained() == Counter(range(STEPS * PROMPTS))
        issued = [event["step"] for event in journal.events() if event["event"] == "issued"]
        assert sorted(issued) == list(range(STEPS))
        table = json.loads((run / "results" / "rl-lengths.json").read_text())
        assert table["rows"][0]["cells"] == table["rows"][1]["cells"]
        again = tmp_path / f"again-{number}"
        words = command(tmp_path, again, "--replay", str(run))
        replayed = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert rows(again) == rows(run)
        if total >= kills:
            break
    assert total >= kills
