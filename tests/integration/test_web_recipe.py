"""WebRL's tiny recipe: killed in every kind of stage and gone on with, it ends like a run in one go; and as shipped its success rises."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from terrella.launch import recipe
from terrella.launch.report import embed
from terrella.tests.launch.tiny_run import results

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2000)]

SMALL = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=48",
    "stages.1.count=8",
    "stages.2.training.epochs=4",
    "stages.2.training.checkpoint_every=2",
    "stages.3.samples=1",
    "stages.4.heldout_every=3",
    "stages.4.training.checkpoint_every=1",
    "stages.4.training.epochs=8",  # long enough for a kill to find it at work, as the next two
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
    done = subprocess.run(command(run), timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def finished(stage: str) -> Callable[[Path], bool]:
    return lambda run: (run / "stages" / f"{stage}.json").exists()


def in_midst(stage: str) -> Callable[[Path], bool]:
    """A checkpoint of the stage is there, or the first continuations of its rollout."""
    return lambda run: any((run / "checkpoints" / stage).glob("step-*")) or any((run / "stages" / stage / "journal").glob("*"))


# stage that is killed -> when: in its midst where it leaves something on its way, else as soon as the stage before it has ended
KILLS = {
    "start": lambda run: (run / "stages" / "start").exists(),
    "demos": finished("start"),
    "sft": in_midst("sft"),
    "first": in_midst("first"),
    "orm": in_midst("orm"),
    "phase-1-tasks": finished("orm"),
    "phase-1-replay": finished("phase-1-rollout"),
    "phase-1-critic": in_midst("phase-1-critic"),
    "phase-1-actor": in_midst("phase-1-actor"),
    "phase-eval": finished("phase-1-actor"),
    "export": finished("phase-eval"),
}


def kill_in(run: Path, stage: str, due: Callable[[Path], bool]) -> bool:
    """Start the run and kill it in the stage; False where the stage had ended by then."""
    process = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not due(run) and process.poll() is None:
        assert time.monotonic() < deadline, f"stage {stage} did not begin"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    return not finished(stage)(run)


def test_killed_in_every_kind_of_stage_it_ends_the_same(whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    kinds = {stage.name: stage.kind for stage in recipe.load("webrl-tiny", tuple(SMALL)).stages}
    assert {kinds[name] for name in KILLS} == set(kinds.values())
    hit = [stage for stage, due in KILLS.items() if kill_in(killed, stage, due)]
    # a stage of milliseconds may end before the signal comes; those that train or play may not
    assert set(hit) >= {"sft", "first", "orm", "phase-1-critic", "phase-1-actor"} and len(hit) >= 9, hit
    subprocess.run(command(killed), check=True, timeout=400, capture_output=True)
    expected, got = results(whole), results(killed)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == expected[name], name
    for path in sorted((whole / "stages").rglob("steps/*.tar")):
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
        [sys.executable, "-m", "terrella", "report", str(whole), "--out", str(out)], check=True, timeout=120, capture_output=True
    )
    shown = out.read_text()
    assert "Success on held-out tasks" in shown and "phase-eval-phase-1-actor" in shown
    assert embed(episode["turns"][0]["prompt"])[1:-1] in shown and "shopping" in shown


@pytest.mark.full
def test_success_rises_over_the_phases(tmp_path: Path) -> None:
    """The recipe as shipped: the last phase lies above imitation, beyond the intervals, which rest on n >= 300."""
    subprocess.run([sys.executable, "-m", "terrella", "train", "webrl-tiny", "--run", str(tmp_path)], check=True, timeout=1800)
    table = json.loads((tmp_path / "results" / "phase-eval.json").read_text())
    rows = {row["name"]: row["cells"][0] for row in table["rows"]}
    gain = json.loads((tmp_path / "stages" / "phase-eval.json").read_text())["phase-3-actor minus sft/success"]
    assert gain["n"] >= 300 and gain["low"] > 0.0
    assert rows["phase-3-actor"]["low"] > rows["sft"]["high"] and rows["random policy"]["high"] < rows["sft"]["low"]
    assert rows["oracle"]["value"] == 1.0
