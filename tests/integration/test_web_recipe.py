"""WebRL's tiny recipe: killed in every kind of stage and gone on with, it ends like a run in one go; and as shipped
its success rises.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.launch import recipe
from terrella.launch.report import embed
from terrella.tests.launch.tiny_run import results

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

PATIENCE_S = 1200.0  # of a busy machine
SMALL = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=48",
    "stages.1.prompts=8",
    "stages.2.epochs=4",
    "stages.2.checkpoint_every=2",
    "stages.3.prompts=8",
    "stages.4.heldout_every=3",
    "stages.4.training.checkpoint_every=1",
    "stages.4.training.epochs=8",
    "stages.5.phases=1",
    "stages.5.tasks=8",
    "stages.5.samples=1",
    "stages.5.actor.checkpoint_every=1",
    "stages.5.actor.epochs=12",
    "stages.5.critic.checkpoint_every=1",
    "stages.5.critic.epochs=12",
    "stages.5.evaluate=8",
    "stages.5.evaluate_samples=1",
    "stages.6.model=phase-1-actor",
]


def command(run: Path, *more: str) -> list[str]:
    sets = [part for override in (*SMALL, *more) for part in ("--set", override)]
    return [sys.executable, "-m", "terrella", "train", "webrl-tiny", "--run", str(run), *sets]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(run), timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


# stage that is killed -> the file that it is about to write for the n-th time: in its midst where it leaves something
# on its way, else when all its work is done and not yet recorded
KILLS = {
    "start": ("stages/start.json", 1),
    "demos": ("stages/demos.json", 1),
    "sft": ("checkpoints/sft/step-", 2),
    "first": ("stages/first/journal/", 2),
    "orm": ("checkpoints/orm/step-", 2),
    "phase-1-tasks": ("stages/phase-1-tasks.json", 1),
    "phase-1-replay": ("stages/phase-1-replay.json", 1),
    "phase-1-critic": ("checkpoints/phase-1-critic/step-", 2),
    "phase-1-actor": ("checkpoints/phase-1-actor/step-", 2),
    "phase-eval": ("stages/phase-eval.json", 1),
    "export": ("stages/export.json", 1),
}
# Python reads this at its start: the rank kills its launcher and itself, so that the moment does not depend on who is
# quicker
SITE = """
import os, signal, sys
place, times = os.environ["KILL_PLACE"], int(os.environ["KILL_TIMES"])
def watch(event, args):
    global times
    if event == "os.rename" or event == "open" and "a" in str(args[1]):
        times -= place in str(args[event == "os.rename"])
        if times == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""


def kill_in(run: Path, stage: str, site: Path) -> bool:
    """Start the run, which is killed in the stage; False where it ended otherwise."""
    place, times = KILLS[stage]
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    told = {"PYTHONPATH": path, "KILL_PLACE": str(run / place), "KILL_TIMES": str(times)}
    done = subprocess.run(command(run), env=os.environ | told, capture_output=True, timeout=PATIENCE_S)
    return done.returncode == -signal.SIGKILL and not (run / "stages" / f"{stage}.json").exists()


def test_killed_in_every_kind_of_stage_it_ends_the_same(whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    kinds = {stage.name: stage.kind for stage in recipe.load("webrl-tiny", tuple(SMALL)).stages}
    assert {kinds[name] for name in KILLS} == set(kinds.values())
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    assert [stage for stage in KILLS if not kill_in(killed, stage, tmp_path / "site")] == []
    subprocess.run(command(killed), check=True, timeout=PATIENCE_S, capture_output=True)
    expected, got = results(whole), results(killed)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == expected[name], name
    for path in sorted((whole / "stages").rglob("*.tar")):
        assert (killed / path.relative_to(whole)).read_bytes() == path.read_bytes(), path.name


def test_the_report_shows_success_by_site_and_phase_and_an_episode_page_by_page(whole: Path, tmp_path: Path) -> None:
    table = json.loads((whole / "results" / "phase-eval.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["random policy", "sft", "phase-1-actor", "oracle"]
    assert table["columns"][0] == "all" and "shopping" in table["columns"]
    assert all({"value", "low", "high", "n"} <= cell.keys() for row in table["rows"] for cell in row["cells"])
    assert [cell["value"] for cell in table["rows"][-1]["cells"]] == [1.0] * len(table["columns"])
    episode = json.loads((whole / "rollouts" / "phase-eval-phase-1-actor-000000.jsonl").read_text().splitlines()[0])
    assert len(episode["turns"]) == episode["steps"] >= 1 and "<html>" in episode["turns"][0]["prompt"]
    out = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-m", "terrella", "report", str(whole), "--out", str(out)],
        check=True,
        timeout=PATIENCE_S,
        capture_output=True,
    )
    shown = out.read_text()
    assert "Success on held-out tasks" in shown and "phase-eval-phase-1-actor" in shown
    assert embed(episode["turns"][0]["prompt"])[1:-1] in shown and "shopping" in shown


@pytest.mark.full
def test_success_rises_over_the_phases(tmp_path: Path) -> None:
    """The recipe as shipped: the last phase lies above imitation, beyond the intervals, which rest on n >= 300."""
    subprocess.run(
        [sys.executable, "-m", "terrella", "train", "webrl-tiny", "--run", str(tmp_path)], check=True, timeout=1800
    )
    table = json.loads((tmp_path / "results" / "phase-eval.json").read_text())
    rows = {row["name"]: row["cells"][0] for row in table["rows"]}
    gain = json.loads((tmp_path / "stages" / "phase-eval.json").read_text())["phase-3-actor minus sft/success"]
    assert gain["n"] >= 300 and gain["low"] > 0.0
    assert rows["phase-3-actor"]["low"] > rows["sft"]["high"] and rows["random policy"]["high"] < rows["sft"]["low"]
    assert rows["oracle"]["value"] == 1.0
