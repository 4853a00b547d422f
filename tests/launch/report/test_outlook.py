"""What a run says on the terminal: stage lines with the time that is left, and the end screen inside 80 columns."""

from dataclasses import replace
from pathlib import Path

import pytest

from terrella.launch import recipe
from terrella.launch.commands.recipes import catalogue
from terrella.launch.terminal import ending, expected_seconds, in_words, program_name, seconds_left, stage_line
from terrella.tests.launch.report.synthetic_run import make_run


def test_time_left_goes_by_the_pace_of_this_machine() -> None:
    expected = {"a": 10.0, "b": 30.0, "c": 60.0}
    assert seconds_left(expected, {}, ["a", "b", "c"]) == 100
    assert seconds_left(expected, {"a": 20.0}, ["b", "c"]) == 180  # twice as slow so far
    assert seconds_left(expected, {"a": 20.0}, ["b", "new"]) is None and seconds_left({}, {}, ["a"]) is None
    assert [in_words(s) for s in (3, 42, 70, 250)] == [
        "about 10 seconds",
        "about 40 seconds",
        "about 1 minute",
        "about 4 minutes",
    ]


def test_the_demo_says_how_long_it_takes_and_a_changed_one_does_not_guess() -> None:
    demo = recipe.load("demo", ("seed=9",))
    names = [stage.name for stage in demo.stages]
    assert list(catalogue()["demo"]["seconds"]) == names  # every stage was measured
    assert sum(expected_seconds(demo).values()) <= 8 * 60
    none = dict.fromkeys(names)
    assert stage_line(demo, "start", none).startswith(
        f"stage 1 of {len(names)}: start, about "
    ) and "minutes left" in stage_line(demo, "start", none)
    longer = replace(demo, ranks=1)
    assert stage_line(longer, "rl", none) == f"stage {names.index('rl') + 1} of {len(names)}: rl"
    assert expected_seconds(replace(demo, name="mine")) == {}


def test_the_end_screen_fits_80_columns_and_ends_in_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", pretrain=10, grpo=30)
    text = ending(Path("run"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert "Report:  run/report.html" in text and "warnings" in text.lower()
    assert len(lines[lines.index("Next:") + 1 :]) in (2, 3) and "report.html" in lines[lines.index("Next:") + 1]


def test_a_run_that_learnt_nothing_says_so_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        "name: x\nstages:\n- {kind: rl, name: rl, steps: 9, algorithm: {kind: grpo}}\n"
    )
    row = '{"stage": "rl", "step": %d, "reward/mean": 0.0, "reward/std": 0.0, "grad_norm": 0.0}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(row % step for step in range(1, 10)))
    text = " ".join(ending(Path("run")).split())
    assert (
        "nothing was learnt: the gradient was 0 in all 9 recorded steps" in text
        and "choose tasks of mixed difficulty" in text
    )


def test_the_program_is_named_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert program_name(str(tmp_path / ".venv" / "bin" / "terrella")) == ".venv/bin/terrella"
    assert program_name("/x/terrella/__main__.py") == "python -m terrella"


def test_an_evaluation_alone_says_its_scores_and_points_to_nothing_that_goes_with_it(tmp_path: Path) -> None:
    for folder in ("results", "stages"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config.yaml").write_text("name: evaluate\nstages:\n- {kind: eval, name: evaluate}\n")
    (tmp_path / "stages" / "evaluate.json").write_text("{}")
    cells = [
        '{"value": 0.25, "low": 0.0, "high": 0.5, "n": 4}',
        '{"value": 1.0, "low": -Infinity, "high": Infinity, "n": 1}',
    ]
    cells.append('{"value": NaN, "low": NaN, "high": NaN, "n": 0}')
    names = ("empty answer", "start", "demonstrations")
    rows = ", ".join(
        f'{{"name": "{name}", "kind": "baseline", "cells": [{cell}]}}' for name, cell in zip(names, cells, strict=True)
    )
    (tmp_path / "results" / "evaluate.json").write_text(
        f'{{"title": "Test tasks", "columns": ["greedy"], "rows": [{rows}]}}'
    )
    screen = " ".join(ending(tmp_path).split())
    assert screen.startswith(
        "Nothing was trained; the evaluations say: Test tasks, greedy: empty answer 0.25 (0 to 0.5); start 1; "
        "demonstrations no valid result."
    )
    assert "Report:" in screen and "Next:" in screen
    screen = ending(tmp_path, kept=False)
    assert "Test tasks, greedy" in screen and "warnings" in screen.lower()
    assert "Report:" not in screen and "Next:" not in screen and str(tmp_path) not in screen
