"""The sdist builds, and the wheel from it holds everything the command needs and is the same command as `python -m
terrella`.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.tests.launch.test_tutorial import FILES, SHELL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tracked = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    for name in filter(None, tracked):  # a clean copy: the build writes beside the sources
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    # what `python -m build` calls
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", sdist], cwd=folder / "source", check=True, capture_output=True, timeout=600)
    archive = next(folder.glob("terrella-*.tar.gz"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(archive)], check=True, timeout=600
    )
    wheel = next(folder.glob("terrella-*.whl"))
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=600
    )
    return folder / "site"


def call(site: Path, *command: str, place: Path | None = None) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=place or site, timeout=300)


def test_the_wheel_answers_and_ships_its_data(site: Path) -> None:
    where = call(site, sys.executable, "-c", "import terrella; print(terrella.__file__)")
    assert where.stdout.strip() == str(site / "terrella" / "__init__.py")
    module = call(site, sys.executable, "-m", "terrella", "--help")
    script = call(site, sys.executable, str(site / "bin" / "terrella"), "--help")
    assert module.returncode == script.returncode == 0 and module.stdout == script.stdout
    dry = call(site, sys.executable, "-m", "terrella", "train", "sokoban-tiny", "--dry-run")
    assert dry.returncode == 0 and "sokoban-tiny" in dry.stdout, dry.stderr
    tags = call(site, sys.executable, "-c", "from terrella.rl.worlds.tasks import load_tasks; print(len(load_tasks()))")
    assert int(tags.stdout) > 5, tags.stderr


def test_the_wheel_trains_on_rows_of_ones_own(site: Path, tmp_path: Path) -> None:
    """From an empty folder, as docs/own_task.md has it, by what was installed alone."""
    for name in ("rows.jsonl", "my.py", "tiny.py"):
        (tmp_path / name).write_text(FILES[name])
    with (tmp_path / "my.py").open("a") as mine:  # which package the processes of the run have
        mine.write("\nimport terrella\nopen('where', 'w').write(terrella.__file__)\n")
    made = call(site, sys.executable, "tiny.py", place=tmp_path)
    assert made.returncode == 0, made.stderr
    words = shlex.split(SHELL[-1])
    done = call(site, sys.executable, str(site / "bin" / words[0]), *words[1:], place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / words[words.index("--run") + 1]
    assert (run / "export" / "model.safetensors").is_file() and (run / "report.html").is_file()
    assert (tmp_path / "where").read_text() == str(site / "terrella" / "__init__.py")


def test_the_wheel_holds_no_tests(site: Path) -> None:
    assert not (site / "terrella" / "tests").exists()
    names = [
        "launch/report/report.html",
        "launch/recipes/sokoban/tiny.yaml",
        "rl/worlds/tags.yaml",
        "launch/templates/job.sh",
    ]
    for name in (*names, "launch/sbatch/text-game-sft.sbatch"):
        assert (ROOT / name).is_file() and (site / "terrella" / name).is_file(), name
