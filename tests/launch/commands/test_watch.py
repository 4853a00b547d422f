"""The terminal view: computed from the run directory alone, exact about what it knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import yaml
from click.testing import CliRunner

from terrella.core import schema
from terrella.core.errors import ConfigError
from terrella.launch import recipe
from terrella.launch.commands.watch import look, render, sparkline, status
from terrella.launch.report.command import report
from terrella.tests.launch.report.synthetic_run import make_run


@pytest.fixture
def running(tmp_path):
    """A run killed in the middle of its second training stage."""
    run = make_run(tmp_path / "tiny", pretrain=40, grpo=30, finished=False)
    stages = [
        {"name": "pretrain", "steps": 40},
        {"name": "grpo", "steps": 50},
        {"name": "control", "match_tokens_of": "grpo"},
        {"name": "evaluate"},
    ]
    (run / "config.yaml").write_text(yaml.safe_dump({"name": "tiny", "stages": stages}))
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["stage"] != "control"]
    records = [{**json.loads(line), "time/step_s": 3.0} for line in kept]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "stages").mkdir()
    (run / "stages" / "pretrain.json").write_text(json.dumps({"steps": 40}))
    return run


def test_view_knows_stage_step_and_time_left(running):
    os.utime(running / "metrics.jsonl", (1000, 1000))
    view = look(running, now=1090.0)
    assert [(s.name, s.state, s.step, s.total) for s in view.stages] == [
        ("pretrain", "done", 40, 40),
        ("grpo", "running", 30, 50),
        ("control", "waiting", 0, None),
        ("evaluate", "waiting", 0, None),
    ]
    assert view.stages[1].left_s == pytest.approx(3.0 * 20)
    last = json.loads((running / "metrics.jsonl").read_text().splitlines()[-1])
    assert view.values["reward/mean"] == last["reward/mean"]
    assert view.trend_name == "reward/mean" and len(view.trend) == 30
    assert status(view) == "last record 1m30s ago" and not view.finished


def test_finished_and_stopped_runs_say_so(running):
    (running / "lease.json").write_text(json.dumps({"released": True}))
    assert status(look(running)).startswith("stopped")
    for name in ("grpo", "control", "evaluate"):
        (running / "stages" / f"{name}.json").write_text("{}")
    view = look(running)
    assert view.finished and status(view) == "finished"


def test_once_prints_the_state(running):
    done = CliRunner().invoke(report, [str(running), "--live", "--once"])
    assert done.exit_code == 0, done.output
    for part in ("grpo", "30 / 50", "reward/mean", "tokens/s", "healthy", "1m00s"):
        assert part in done.output


def test_on_a_terminal_it_follows_until_the_run_finishes(running):
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "terrella", "report", str(running), "--live", "--every", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 300
    try:
        while b"reward/mean" not in seen and time.monotonic() < deadline:
            seen += os.read(ours, 65536)
        assert process.poll() is None
        for name in ("grpo", "control", "evaluate"):
            (running / "stages" / f"{name}.json").write_text("{}")
        while b"finished" not in seen and time.monotonic() < deadline:
            seen += os.read(ours, 65536)
        assert b"finished" in seen
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)


def test_utilisation_is_shown_of_known_gpus_for_a_recipes_model(running):
    stored = yaml.safe_load((running / "config.yaml").read_text())
    model = schema.to_plain(recipe.load("sokoban-tiny").model)  # with the folder that a recipe may name
    (running / "config.yaml").write_text(yaml.safe_dump({**stored, "model": model, "ranks": 2}))
    assert look(running).mfu is None
    (running / "environment.json").write_text(json.dumps({"hardware": {"gpus": ["NVIDIA H200"] * 2}}))
    share = look(running).mfu
    assert share is not None and 0 < share < 1


def test_alarms_are_shown(running):
    with (running / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "step": 31, "loss": "nan"}\n')
    assert (
        "loss is not a finite number at step 31"
        in CliRunner().invoke(report, [str(running), "--live", "--once"]).output
    )


def test_names_are_not_taken_for_markup(tmp_path):
    from rich.console import Console

    run = make_run(tmp_path / "[red]x", pretrain=3, grpo=2, finished=False)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    console.print(render(look(run)))
    assert "[red]x" in console.export_text()


def test_missing_run_is_a_config_error(tmp_path):
    result = CliRunner().invoke(report, [str(tmp_path / "absent"), "--live"])
    assert isinstance(result.exception, ConfigError) and "no such run directory" in str(result.exception)


def test_sparkline_spans_low_to_high():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    line = sparkline([float(i) for i in range(400)], width=8)
    assert line == "▁▂▃▄▅▆▇█"


def test_report_command_prints_where_it_wrote(running, tmp_path):
    done = CliRunner().invoke(report, [str(running), "--out", str(tmp_path / "out" / "r.html")])
    assert done.exit_code == 0 and (tmp_path / "out" / "r.html").is_file()
    assert done.output.strip() == str(tmp_path / "out" / "r.html")
