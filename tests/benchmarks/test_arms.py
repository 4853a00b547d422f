"""Finished runs in the file of record: every number of their tables with its interval, paired differences, speeds."""

import json
from pathlib import Path

import pytest

from terrella.benchmarks import arms, record
from terrella.core.metrics import MetricsFile

CONFIG = """
name: spa-small
seed: 2
stages:
- {kind: sft, name: sft}
- {kind: rl, name: spa}
- kind: eval
  name: evaluate
  arms: [{name: SPA, model: spa}, {name: vanilla RL, model: vanilla}]
"""


def cell(value: float, half: float = 0.1) -> dict:
    return {"value": value, "low": value - half, "high": value + half, "n": 64}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "finished"
    for name in ("results", "stages"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    made = {"versions": {"python": "3.12", "torch": "2.11"}, "git": {"commit": "abcdef0123", "dirty": True}}
    made["hardware"] = {"machine": "x86_64", "cpus": 16, "gpus": ["NVIDIA H200", "NVIDIA H200"]}
    (folder / "environment.json").write_text(json.dumps(made))
    rows = [
        {"name": "random policy", "kind": "baseline", "cells": [cell(0.2), cell(0.5)]},
        {"name": "SPA", "kind": "model", "cells": [cell(0.6), {"value": 0.9}]},
        {"name": "vanilla RL", "kind": "control", "cells": [0.25, "none"]},
    ]
    table = {"title": "Rooms: success", "columns": ["Pass@1", "Pass@8"], "rows": rows}
    (folder / "results" / "evaluate-Rooms.json").write_text(json.dumps(table))
    told = {"SPA/Rooms/pass@1": cell(0.6), "SPA minus vanilla RL/Rooms/pass@1": cell(0.35), "time/stage_s": 7.5}
    (folder / "stages" / "evaluate.json").write_text(json.dumps(told))
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step, speed in enumerate([1.0, 100.0, 200.0, 300.0, 400.0]):
        metrics.append("spa", step + 1, {"time/tokens_per_s": speed, "loss": 1.0})
    metrics.append("sft", 1, {"time/tokens_per_s": 50.0})
    return folder


def test_every_number_becomes_a_row(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    arms.main([str(run), "--bench", "spa", "--run-id", "20261115-other", "--out", str(out)])
    rows = record.read(out)
    found = {(r.case, r.impl, r.metric): (r.value, r.p20, r.p80, r.unit) for r in rows}
    scored, whole = "spa-small seed 2: Rooms: success", "spa-small seed 2"
    assert found == {
        (scored, "random policy", "Pass@1"): (0.2, 0.1, 0.3, "score, 95 % interval"),
        (scored, "random policy", "Pass@8"): (0.5, 0.4, 0.6, "score, 95 % interval"),
        (scored, "SPA", "Pass@1"): (0.6, 0.5, 0.7, "score, 95 % interval"),
        (scored, "SPA", "Pass@8"): (0.9, None, None, "score"),
        (scored, "vanilla RL", "Pass@1"): (0.25, None, None, "score"),
        (whole, "SPA", "tokens_per_s"): (250.0, 100.0, 400.0, "1/s"),  # of four steps: the first one warms up
        (whole, "sft", "tokens_per_s"): (50.0, None, None, "1/s"),
        (whole, "evaluate", "stage"): (7.5, None, None, "s"),
        (whole, "SPA minus vanilla RL", "Rooms/pass@1"): (0.35, 0.25, 0.45, "score, 95 % interval"),
    }
    assert {(r.run_id, r.bench, r.gpu, r.commit, r.versions) for r in rows} == {
        ("20261115-other", "spa", "NVIDIA H200", "abcdef0+", "python 3.12, torch 2.11")
    }
    assert {r.command for r in rows} == {"python -m terrella.benchmarks.arms finished --bench spa"}  # not where it lay


def test_columns_of_one_name_are_told_apart(run: Path) -> None:
    table = {
        "title": "T",
        "columns": ["plain", "alone", "shown", "alone"],
        "rows": [{"name": "SPA", "kind": "model", "cells": [1, 2, 3, 4]}],
    }
    (run / "results" / "evaluate-Rooms.json").write_text(json.dumps(table))
    metrics = {r.metric: r.value for r in arms.rows_of(run, "spa", "") if r.unit == "score"}
    assert metrics == {"plain": 1, "plain, alone": 2, "shown": 3, "shown, alone": 4}


def test_what_is_no_finished_run_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"config\.yaml"):
        arms.main([str(tmp_path / "nothing"), "--bench", "spa", "--out", str(tmp_path / "out.csv")])
    (run / "results" / "evaluate-Rooms.json").unlink()
    with pytest.raises(SystemExit, match="has not reached its evaluation"):
        arms.main([str(run), "--bench", "spa", "--out", str(tmp_path / "out.csv")])
    assert not (tmp_path / "out.csv").exists()


def test_tables_of_one_title_are_told_apart(run: Path) -> None:
    cooler = json.loads((run / "results" / "evaluate-Rooms.json").read_text())
    (run / "results" / "evaluate-Rooms-t0.5.json").write_text(json.dumps(cooler))
    assert {title for title, *_ in arms.scores(run)} == {
        "Rooms: success (evaluate-Rooms)",
        "Rooms: success (evaluate-Rooms-t0.5)",
    }
