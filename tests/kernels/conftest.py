"""Kernels are interpreted and compiled in processes of their own, so that no other test sees how. All start with this
folder's first test and share the cores; the test that wants one waits for it."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terrella.tests.sampling import every_value

HERE = Path(__file__).parent
Outcome = subprocess.CompletedProcess[str]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SAMPLED = "TERRELLA_SAMPLED_ROWS"  # set for the runs under the interpreter, but in the full tier


def cases(name: str) -> list[str]:
    """The command that runs a file of cases."""
    return [
        sys.executable,
        "-m",
        "pytest",
        str(HERE / name),
        "-q",
        "-x",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]


# test file -> command and environment
RUNS = {
    "test_triton.py": (cases("triton_cases.py"), {"TRITON_INTERPRET": "1"}),
    "test_fp8.py": (cases("fp8_cases.py"), {"TRITON_INTERPRET": "1"}),
    "test_decode.py": (cases("decode_cases.py"), {"TRITON_INTERPRET": "1"}),
    "test_compiles.py": ([sys.executable, str(HERE / "compile_cases.py"), "90"], {}),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter is slow: CI runs every value of every parameter, not all that can be made of them."""
    if SAMPLED in os.environ:
        kept = every_value([item for item in items if isinstance(item, pytest.Function)])
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Outcome]]:
    """Waits for the run of a test file, and gives its exit code and output."""
    here = importlib.util.find_spec("triton") is not None
    wanted = {item.path.name for item in request.session.items if not item.get_closest_marker("gpu")} & RUNS.keys()
    folder = tmp_path_factory.mktemp("kernels")
    plain = (
        {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | NO_GPU
        | {"TRITON_CACHE_DIR": str(folder / "cache")}
    )
    started: dict[str, subprocess.Popen] = {}
    if "not full" in request.config.option.markexpr:
        plain |= {SAMPLED: "1"}
    for name in sorted(wanted) if here else ():
        command, environment = RUNS[name]
        with open(folder / f"{name}.out", "w") as out, open(folder / f"{name}.err", "w") as err:
            started[name] = subprocess.Popen(command, env=plain | environment, stdout=out, stderr=err)

    def wait(name: str) -> Outcome:
        pytest.importorskip("triton")
        code = started[name].wait(timeout=1000)
        return subprocess.CompletedProcess(
            name, code, *((folder / f"{name}.{end}").read_text() for end in ("out", "err"))
        )

    try:
        yield wait
    finally:
        for process in started.values():
            process.kill()
            process.wait(timeout=60)
