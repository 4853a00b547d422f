"""WebRL's arms in one run: every arm is there, all go on from the same start, and the reward model's labels are
measured in every phase.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.tests.launch.tiny_run import results

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

PATIENCE_S = 1200.0  # of a busy machine
ARMS = ["webrl", "no-replay", "no-kl", "no-filter", "same-tasks"]
SMALL = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=48",
    "stages.demos.prompts=8",
    "stages.sft.epochs=4",
    "stages.first.prompts=8",
    "stages.judged-tasks.count=8",
    "stages.judged.prompts=8",
    "stages.orm.heldout_every=3",
    *(
        f"stages.{arm}.{setting}"
        for arm in ARMS
        for setting in ("phases=2", "tasks=10", "evaluate=8", "high=1.0", "low=0.0")
    ),
    "stages.more-sft.epochs=1",
    "stages.more-sft-eval.n=8",
]


def train(folder: Path, overrides: list[str]) -> Path:
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "terrella", "train", "webrl-arms-tiny", "--run", str(folder), *sets]
    done = subprocess.run(command, timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("arms") / "run", SMALL)


def test_every_arm_is_evaluated_beside_the_same_start(run: Path) -> None:
    tables = {arm: json.loads((run / "results" / f"{arm}-eval.json").read_text()) for arm in (*ARMS, "more-sft")}
    names = {arm: [row["name"] for row in table["rows"]] for arm, table in tables.items()}
    for arm in ARMS:
        assert names[arm] == ["random policy", "sft", f"{arm}-1-actor", f"{arm}-2-actor", "oracle"]
    assert names["more-sft"] == ["random policy", "sft", "more-sft", "oracle"]
    starts = {json.dumps(row) for table in tables.values() for row in table["rows"] if row["name"] == "sft"}
    assert len(starts) == 1 and '"n": 8' in starts.pop()


def test_the_labels_of_every_phase_are_measured(run: Path) -> None:
    for arm in ARMS:
        for phase in (1, 2):
            told = json.loads((run / "stages" / f"{arm}-{phase}-rollout.json").read_text())
            assert told["trajectories"] == 10 and {"orm/precision", "orm/recall", "orm/base"} <= set(told)
            table = json.loads((run / "results" / f"{arm}-{phase}-rollout.json").read_text())
            assert table["columns"][:3] == ["precision", "recall", "precision of always YES"]


def test_only_the_curriculum_brings_tasks_that_nobody_has_played(run: Path) -> None:
    played = {task["record"]["intent"] for task in json.loads((run / "stages" / "first" / "tasks.json").read_text())}
    for arm in ARMS:
        tasks = json.loads((run / "stages" / f"{arm}-2-tasks" / "tasks.json").read_text())
        intents = [task["record"]["intent"] for task in tasks]
        assert len(intents) == 10
        if arm == "same-tasks":
            assert set(intents) == played
        else:
            assert len(set(intents)) == 10 and not set(intents) & played
    replayed = {arm: json.loads((run / "stages" / f"{arm}-2-replay.json").read_text())["replayed"] for arm in ARMS}
    assert replayed["no-replay"] == 0


@pytest.mark.full
def test_an_arm_alone_is_the_same_to_the_last_digit(run: Path, tmp_path: Path) -> None:
    others = [*ARMS[:-1], "more-sft", "more-sft-eval"]
    kept = [setting for setting in SMALL if setting.split(".")[1] not in others]
    alone = train(tmp_path / "alone", [*kept, *(f"stages.{name}=null" for name in others)])
    own, whole = results(alone), results(run)
    played = {row["stage"] for row in own["metrics"]}
    whole["metrics"] = [row for row in whole["metrics"] if row["stage"] in played]
    assert {"metrics", "stages/sft.json", "stages/same-tasks-eval.json"} <= own.keys() <= whole.keys()
    for name in own:
        assert own[name] == whole[name], name
