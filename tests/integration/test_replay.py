"""A run that kept its rollouts and validated on a cut; then `--replay` trains on the very same rollouts without
sampling.
"""

import pytest

from terrella.core.metrics import MetricsFile
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
