"""Code of the user's that runs in the ranks themselves (a stage, an algorithm): whatever it does is named, and never
taken for an end.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError, ProgramError, WorkerError
from terrella.launch import supervise
from terrella.rl.algorithms.config import OwnAlgorithm
from terrella.rl.algorithms.own import advantages_of

STAGES = """
import os, sys

def quits(stage, job): os._exit(0)
def leaves(stage, job): sys.exit(0)
def odd(stage, job): return {"made": object()}
def listed(stage, job): return [1]
"""
RECIPE = """name: own
world: language
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 300, max_positions: 64}}
stages:
- {{kind: my.py:{0}, name: mine}}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("stage", "code", "words"),
    [
        ("quits", 10, "worker 0 ended before its stages were done, and without a word (code 0); its log is"),
        pytest.param("leaves", 2, "my.py, line 5: SystemExit: 0", marks=pytest.mark.full),
        pytest.param("odd", 2, "gave what JSON cannot hold: Object of type object", marks=pytest.mark.full),
        pytest.param("listed", 2, "gave list; a dict of what it made, or None, is needed", marks=pytest.mark.full),
    ],
)
def test_a_stage_that_ends_its_process_or_gives_nonsense(tmp_path: Path, stage: str, code: int, words: str) -> None:
    (tmp_path / "my.py").write_text(STAGES)
    (tmp_path / "own.yaml").write_text(RECIPE.format(stage))
    command = [sys.executable, "-m", "terrella", "train", "own.yaml", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, (
        done.stdout + done.stderr
    )
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_code_of_0_is_no_end_of_a_worker(tmp_path: Path) -> None:
    assert supervise._verdict(tmp_path, {0: supervise.FINISHED, 1: supervise.FINISHED}) == 0
    assert supervise._verdict(tmp_path, {0: supervise.FINISHED, 1: supervise.STOPPED}) == supervise.STOPPED
    with pytest.raises(ProgramError, match=r"worker 1 ended before its stages were done.*rank-1\.log"):
        supervise._verdict(tmp_path, {0: supervise.FINISHED, 1: 0})
    with pytest.raises(WorkerError, match=r"worker 0 was killed by SIGKILL"):
        supervise._verdict(tmp_path, {0: -9, 1: 0})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("return [float('nan')] * len(rewards)", "one finite number each is needed"),
        ("return rewards[1:]", "one finite number each is needed"),
        ("return None", "TypeError"),
        ("return ['a'] * len(rewards)", "ValueError"),
        ("return [10**400] * len(rewards)", "OverflowError"),
        ("return advantages(rewards, infos)", "RecursionError"),
        ("raise MemoryError('much')", "MemoryError: much"),
    ],
)
def test_an_algorithm_that_gives_nonsense_is_named(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(f"def advantages(rewards, infos):\n    {body}\n")
    config = OwnAlgorithm(path=f"{tmp_path / 'mine.py'}:advantages")
    with pytest.raises(ConfigError, match=rf"algorithm: .*mine\.py:advantages .*{words}"):
        advantages_of(config, [0.0, 1.0], [{}, {}])
