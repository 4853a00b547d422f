"""The runs that are attacked: one that was never touched, and one killed in the middle of a step, to be copied."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from terrella.tests.attacks.jobs import OWN, RECIPE, End
from terrella.tests.launch import tiny_run
from terrella.tests.parallel.pool import run_ranks


def start(folder: Path, **how: object) -> End:
    """Start the run in a rank of the pool; `deadline_s` bounds the wait."""
    return run_ranks("terrella.tests.attacks.jobs:start", 1, folder=str(folder), **how)[0]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Victim:
    """A killed run, and what it must end with: the results of one that nobody disturbed."""

    killed: Path
    expected: dict
    recipe: Path

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.killed, folder))

    def start(self, folder: Path, deadline_s: float) -> End:
        return start(folder, deadline_s=deadline_s, recipe=str(self.recipe))


def kill(folder: Path, recipe: Path) -> Victim:
    """Make the runs of a recipe whose RL stage is called rlvr."""
    how = {"recipe": str(recipe)}
    whole = start(folder / "whole", **how)
    assert whole.code == 0, whole
    assert start(folder / "killed", stop_after=("rlvr", 2), **how).code == 75
    further = Path(shutil.copytree(folder / "killed", folder / "further"))
    assert start(further, stop_after=("rlvr", 1), **how).code == 75
    # what a kill just before the save of step 3 leaves: all of the step, but its checkpoint
    shutil.copytree(further / "stages", folder / "killed" / "stages", dirs_exist_ok=True)
    shutil.copy(further / "metrics.jsonl", folder / "killed")
    return Victim(folder / "killed", tiny_run.results(folder / "whole"), recipe)


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return kill(tmp_path_factory.mktemp("victim"), RECIPE)


@pytest.fixture(scope="session")
def own_victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return kill(tmp_path_factory.mktemp("own"), OWN)
