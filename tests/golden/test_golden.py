"""Every kind of stage gives what it gave when the golden files were recorded: bit for bit on their platform, within
tolerances elsewhere.

A change that is meant to change figures records them anew (`python -m terrella.tests.golden.record [CASE...]`), and its
commit says which lines changed and why. The cases are recipes that ship, cut to a few steps (tests/golden/cases).
"""

import json
import os
import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest

from terrella.core.errors import ConfigError
from terrella.core.run import create
from terrella.launch import recipe
from terrella.launch.recipe_files import shipped
from terrella.launch.worker import STAGES
from terrella.tests.golden.inputs import RENAMED, make_inputs, unpack_old_run
from terrella.tests.golden.observe import differences, observe, this_platform, unsteady_keys
from terrella.tests.golden.play import CASES, LANES, OLD, PATIENCE_S, graph, load, play_all
from terrella.tests.golden.record import found, read
from terrella.tests.sampling import few

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)
PLAYED = [case for lane in LANES for case in lane]
# The stages of other cases at other sizes and settings, up to a minute each: one a commit, all in the full tier.
IN_TURN = ("video-gpu", "video-rt1", "video-rt1-single", "video-rt1-released", "sokoban-worlds")
IN_TURN += ("webrl-arms", "webrl-sites-1gpu", "web-page-rlvr-1gpu", "web-page-sft-1gpu", "spa-sokoban")
SHOWN = 20


def require_equal(case: str, now: dict) -> None:
    """Fail with the first keys that differ, and both their values."""
    golden = read(case.partition("@")[0])
    exact = golden["platform"] == this_platform()
    lines = differences(golden, now, exact, unsteady_keys(load(case)))
    where = "on the platform it was recorded on" if exact else f"within tolerances, recorded on {golden['platform']}"
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    assert not lines, "\n".join([f"{case} differs from its golden file, {where}:", *lines[:SHOWN], *more])


def test_every_kind_of_stage_and_every_graph_of_a_shipped_recipe_is_played() -> None:
    """All of them are; only the phases of WebRL are played fewer times than a recipe has them."""
    cases = {case: load(case) for case in PLAYED}
    assert {stage.kind for config in cases.values() for stage in config.stages} == set(STAGES)
    graphs = {graph(config) for config in cases.values()}
    assert [name for name in shipped() if graph(recipe.load(name)) not in graphs] == []


def test_every_case_is_played() -> None:
    parts = {"small", "video-small"}  # what several cases lay over their recipe
    assert {path.stem for path in CASES.glob("*.yaml")} - parts == {case.partition("@")[0] for case in PLAYED}


def test_a_difference_is_named_with_both_values() -> None:
    golden = {
        "values": {"metrics/sft/1/loss": 2.0, "stages/sft/steps": 4, "results/none": nan},
        "digests": {"metrics": "a", "rollouts/sft": "b"},
    }
    now = {
        "values": {"metrics/sft/1/loss": 2.0001, "results/none": nan, "results/new": 1},
        "digests": {"metrics": "c", "rollouts/sft": "b"},
    }
    absent = "values: stages/sft/steps: 4 in the golden file, 'absent' now"
    new = "values: results/new: 'absent' in the golden file, 1 now"
    loss = "values: metrics/sft/1/loss: 2.0 in the golden file, 2.0001 now"
    assert differences(golden, now, exact=True) == [
        loss,
        absent,
        new,
        "digests: metrics: 'a' in the golden file, 'c' now",
    ]
    assert differences(golden, now, exact=False) == [absent, new]
    now["values"]["metrics/sft/1/loss"] = 4.0  # a gradient or a loss that is half or double is seen everywhere
    assert len(differences(golden, now, exact=False)) == 3
    assert differences(golden, now, exact=False, unsteady=("metrics/sft",)) == [absent, new]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    left_out = set(IN_TURN) - {item.callspec.params["case"] for item in items}
    play_all(folder, tuple(tuple(case for case in lane if case not in left_out) for lane in LANES))
    return folder / "runs"


def cases() -> list[Any]:
    """Every case; those of which one is played in CI are otherwise in the full tier."""
    left_out = set(IN_TURN) - set(few(IN_TURN, 1))
    return [pytest.param(case, marks=[pytest.mark.full] * (case in left_out)) for case in PLAYED]


@pytest.mark.parametrize("case", cases())
def test_a_run_is_what_it_was(case: str, runs: Path) -> None:
    require_equal(case, found(runs, case))


def test_a_run_that_earlier_code_began_is_gone_on_with(runs: Path, tmp_path: Path) -> None:
    """Steps before the kill are not trained again, nor is what was sampled sampled again; the test above compares the
    end.

    Code that cannot go on from it must say so, naming the checkpoint or the setting; this test then expects that
    message.
    """
    unpack_old_run(tmp_path / "old")
    found(runs, OLD)  # or the error that it failed with
    before, after = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (tmp_path / "old", runs / OLD))
    last = json.loads(before[-1])
    assert (last["stage"], last["step"]) == ("rlvr", 2) and after[: len(before)] == before  # with the old clock values
    journal = "stages/rlvr/journal/samples-00000002-0.jsonl"
    assert (runs / OLD / journal).read_text() == (tmp_path / "old" / journal).read_text()


def test_a_run_whose_kinds_of_stages_were_renamed_is_refused_by_the_new_ones(tmp_path: Path) -> None:
    """It was begun when self-play was a kind of stage, and stays as it is."""
    unpack_old_run(tmp_path / "old", RENAMED)
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match=r"config\.yaml: this run was started with other settings .*'self-play' then, 'collect' now"
    ):
        create(tmp_path / "old", load(OLD))
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.full
@pytest.mark.parametrize("case", ["sokoban", "spa-sokoban-tiny", "webrl", "video"])
def test_the_command_line_gives_the_same(case: str, tmp_path: Path) -> None:
    """A process of its own, started by `terrella train`: nothing is left over from one case that the next one sees."""
    make_inputs(tmp_path / "inputs")
    words = [sys.executable, "-m", "terrella", "train", str(CASES / f"{case}.yaml"), "--run", f"runs/{case}"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    require_equal(case, observe(tmp_path / "runs" / case))
