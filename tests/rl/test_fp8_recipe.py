"""GRPO through a recipe with the trainer in fp8: the sampler computes in bf16, so the format's rounding is part of the
drift that every step reports, and the gate acts on it.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from terrella.core.metrics import MetricsFile
from terrella.tests.sampling import in_turn

# large initial weights, so that the log-probs of different tokens differ
RECIPE = """\
name: fp8
world: language
seed: 0
ranks: 1
precision: {precision}
model: {{family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 4, head_dim: 16, ffn: 128, vocab: 224,
        max_positions: 64, tied: true, init_std: 0.1}}
env: {{kind: worlds, tags: [OpenSokoban], fmt: state, prompt: bare, window: 1, max_turns: 2, format_penalty: -1.0}}
stages:
- {{kind: start, name: start}}
- {{kind: rl, name: grpo, init: start, drift_gate: {gate}, prompts_per_step: 4, samples_per_prompt: 4, steps: 2,
   max_new_tokens: 8, optimizer: {{lr: 1e-3}}, algorithm: {{kind: grpo, entropy_coef: 0.01}}}}
"""
BF16 = "{params: bf16}"
FP8 = "{params: bf16, fp8: true}"
HEAD = "{params: bf16, fp8: true, fp8_products: all, fp8_head: true}"


def train(folder: Path, precision: str, gate: float, environment: dict[str, str]) -> tuple[int, str, list[float]]:
    """(exit code, what was said on stderr, the drift of every step)"""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(precision=precision, gate=gate))
    command = [sys.executable, "-m", "terrella", "train", str(folder / "recipe.yaml"), "--run", str(folder / "run")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=900)
    path = folder / "run" / "metrics.jsonl"
    rows = [row for row in MetricsFile(path).rows() if row.get("stage") == "grpo"] if path.exists() else []
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    return done.returncode, done.stderr, [row["logprob_drift/mean"] for row in rows]


def compare(folder: Path, environment: dict[str, str]) -> None:
    """An element is rounded by 2^-9 of itself in bf16 and by 2^-4 in fp8: the drift grows by an order of magnitude."""
    code, said, plain = train(folder / "bf16", BF16, 0.02, environment)
    assert code == 0 and len(plain) == 2, said
    code, said, head = train(folder / "head", HEAD, 0.2, environment)
    assert code == 0 and len(head) == 2, said
    print(f"drift of GRPO's steps: bf16 {plain}, all products and the head in fp8 {head}")
    assert min(head) > 3 * max(plain) > 0
    code, said, kept = train(folder / "fp8", FP8, 3 * max(plain), environment)
    seen = re.search(r"differ by (\S+) on average, above drift_gate", said)
    assert code != 0 and not kept and seen is not None, said
    assert 3 * max(plain) < float(seen[1]) < 0.2 and not math.isclose(float(seen[1]), head[0], abs_tol=1e-4)


@in_turn("fp8")
@pytest.mark.timeout(1800)
def test_the_drift_gate_sees_fp8(tmp_path: Path) -> None:
    compare(tmp_path, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_drift_gate_sees_fp8_on_a_gpu(tmp_path: Path) -> None:
    compare(tmp_path, {})
