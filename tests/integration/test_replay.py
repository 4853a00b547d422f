"""A run that kept its rollouts and validated on a cut; then `--replay` trains on the very same rollouts without
sampling.
"""

import json
import random
from collections import Counter

import pytest

from terrella.core.metrics import MetricsFile
from terrella.rl.journal import Journal
from terrella.tests.golden.observe import comparable
from terrella.tests.launch import tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


def test_replay_trains_the_same_and_validation_comes_before_and_during_training(tmp_path) -> None:
    sets = ["stages.2.rollouts={keep_samples: true, validation: {every: 2, prompts: 10, samples: 2}}"]
    first = tiny_run.train(tmp_path / "first", *sets)
    assert first.returncode == 0, first.stderr
    rows = [r for r in comparable(MetricsFile(tmp_path / "first" / "metrics.jsonl").rows()) if "reward/mean" in r]
    validated = {r["step"]: r for r in rows if "validation/mean" in r}
    assert sorted(validated) == [1, 3] and [validated[s]["validation/steps"] for s in (1, 3)] == [0, 2]
    assert all(0 <= r["validation/mean"] <= 1 and r["validation/invalid"] == 0 for r in validated.values())

    command = [
        *tiny_run.command(tmp_path / "second", *sets),
        "--replay",
        str(tmp_path / "first"),
        "--until",
        rows[0]["stage"],
    ]
    second = tiny_run.subprocess.run(command, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert second.returncode == 0, second.stderr
    again = [r for r in comparable(MetricsFile(tmp_path / "second" / "metrics.jsonl").rows()) if "reward/mean" in r]
    assert again == [{k: v for k, v in r.items() if not k.startswith("validation/")} for r in rows]


def trained(run) -> list[dict]:
    return [r for r in comparable(MetricsFile(run / "metrics.jsonl").rows()) if "reward/mean" in r]


@pytest.mark.parametrize("kills", [0, pytest.param(3, marks=pytest.mark.full)])
def test_an_asynchronous_run_is_replayed_to_the_bit_and_trains_every_prompt_once(tmp_path, kills: int) -> None:
    """Rollouts two steps ahead, by weights that change on the way. What the journal holds is what was trained on, also
    after kills."""
    sets = ["stages.2.rollouts={ahead: 2, keep_samples: true}", "stages.2.steps=6"]
    run = tmp_path / "run"
    until = ["--until", "rlvr"]
    if kills:
        run = tiny_run.kill_often(
            lambda folder: [*tiny_run.command(folder, *sets), *until], tmp_path, 60.0, random.Random(5), kills
        )
    words = {"capture_output": True, "text": True, "timeout": tiny_run.PATIENCE_S}
    done = tiny_run.subprocess.run([*tiny_run.command(run, *sets), *until], **words)
    assert done.returncode == 0, done.stderr
    rows = trained(run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["staleness/max"] <= 4 for row in rows) and any(row["staleness/max"] > 0 for row in rows)
    journal = Journal(run / "stages" / "rlvr" / "journal")
    assert journal.trained() == Counter(range(6 * 4))
    table = json.loads((run / "results" / "rlvr-lengths.json").read_text())
    assert table["rows"][0]["cells"] == table["rows"][1]["cells"]
    for name in ("once", "twice"):
        command = [*tiny_run.command(tmp_path / name, *sets), "--replay", str(run), *until]
        again = tiny_run.subprocess.run(command, **words)
        assert again.returncode == 0, again.stderr
        assert trained(tmp_path / name) == rows
