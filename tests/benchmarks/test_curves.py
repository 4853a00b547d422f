"""Learning curves: metrics to a few rows, rows to a picture."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from terrella.benchmarks import curves, record
from terrella.core.metrics import MetricsFile


def test_a_stage_becomes_means_of_equal_stretches(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 32):
        metrics.append("rl", step, {"reward/mean": 100.0, "agent/success": step / 100})
    metrics.append("rlvr", 1, {"reward/mean": 0.5})
    metrics.append("sft", 1, {"loss": 1.0})
    found = list(curves.curves(tmp_path))
    assert [step for metric, stage, step, _ in found if stage == "rl"] == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31]
    assert found[0] == ("agent/success", "rl", 3, pytest.approx(0.02)) and found[10][3] == pytest.approx(0.31)
    assert found[11:] == [("reward/mean", "rlvr", 1, 0.5)]  # imitation has no such curve


def test_the_newest_run_is_drawn_with_a_colour_for_each_arm() -> None:
    recorder = record.Recorder("spa", "c", "GPU", "v", commit="abc", run_id="new")
    for arm in ("SPA", "vanilla"):
        for seed in (0, 1):
            for step in (20, 10):
                recorder.add(f"r seed {seed}{curves.MARK}agent/success", arm, str(step), step / 40, "score")
    old = [replace(row, run_id="old", date="2020-01-01T00:00:00Z", impl="gone") for row in recorder.rows]
    lines = curves.lines_of(old + recorder.rows, "spa", "agent/success")
    assert lines["SPA", "r seed 1"] == [(10, 0.25), (20, 0.5)] and len(lines) == 4
    picture = curves.chart(old + recorder.rows, "spa", "agent/success", "a < b")
    paths = [e for e in ElementTree.fromstring(picture).iter() if e.get("stroke")]
    assert len(paths) == 6 and len({e.get("stroke") for e in paths}) == 2  # four lines, two keys
    assert (
        "gone" not in picture and "a &lt; b" in picture and f"L{curves.LEFT + curves.WIDTH}.0 {curves.TOP}.0" in picture
    )
    with pytest.raises(ValueError, match="no curves"):
        curves.chart(recorder.rows, "language", "agent/success", "t")
