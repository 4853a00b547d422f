"""Mean rewards of an evaluation: what is said where results are invalid, and where nothing was trained."""

from pathlib import Path
from typing import Any

import pytest

from terrella.core.files import make_folder, write_json
from terrella.data.trajectory import Invalid
from terrella.launch.terminal import ending
from terrella.rl.evaluation import TEST, Evaluation, Judged, Results, reward_results

FAULT = Invalid("my.py:score raised KeyError: 'x'")
TASKS = ["a", "b", "c"]


def results(
    before: list[float | Invalid], after: list[float | Invalid], kind: str = "rl", trivial: float | Invalid = 0.0
) -> Results:
    """Two models on three tasks, one sample each, beside one baseline."""
    judged: dict[Any, Any] = {
        ("start", 0.0, TEST): [[one] for one in before],
        ("tuned", 0.0, TEST): [[one] for one in after],
    }
    trained_by = {"start": "start", "tuned": kind}
    evaluation = Evaluation(
        ["start", "tuned"], [0.0], 1, {TEST: TASKS}, judged, "start", "tuned", trained_by=trained_by
    )
    return reward_results(evaluation, lambda tasks: {"empty answer": [[trivial] for _ in tasks]})


def test_results_that_are_all_invalid_say_so_and_why(tmp_path: Path) -> None:
    found = results([FAULT] * 3, [FAULT, FAULT, Invalid("the judge is away.")], trivial=FAULT)
    why = "9 results were invalid and are left out; the commonest reason (8 of them): my.py:score raised KeyError: 'x'."
    assert found.summary is not None
    assert found.summary["headline"] == (
        "Nothing can be said of tuned: no held-out task has a valid result of both models."
    )
    assert found.summary["paragraphs"] == [
        "Greedy, no valid result before, no valid result after. Beside it: empty answer no valid result.",
        why,
    ]
    assert found.tables[""]["note"].endswith(f"95 % intervals. {why}") and "nan" not in str(found.summary)
    write_json(make_folder(tmp_path / "results") / "evaluate.json", found.tables[""])
    write_json(tmp_path / "summary.json", found.summary)
    screen = " ".join(ending(tmp_path).split())
    assert "Warnings:" in screen and f"no valid result of start, tuned; {why}" in screen


def test_what_is_valid_is_compared_and_the_rest_is_counted() -> None:
    found = results([0.0, FAULT, 0.0], [1.0, 1.0, 1.0])
    assert found.summary is not None
    assert found.summary["headline"].startswith(
        "tuned did not clearly change the mean reward on held-out tasks: 0.000 (0.000 to 0.658)"
    )  # two tasks solved where none was are too few to say more
    assert found.summary["paragraphs"][0].startswith("Greedy, 2 tasks: the change is 1.000 (-0.349 to 1.000).")
    assert (
        "1 result was invalid and is left out; the commonest reason (1 of them): my.py"
        in (found.summary["paragraphs"][1])
    )
    clean = results([0.0] * 3, [1.0] * 3)
    assert clean.summary is not None and len(clean.summary["paragraphs"]) == 1 and "invalid" not in clean.tables[""]
    assert clean.tables[""]["note"] == (
        "n = 3 tasks that are never trained on, 1 sample each above temperature 0; 95 % intervals. "
        "0 results were invalid and are left out."
    )


def test_a_gain_is_told_at_every_temperature() -> None:
    judged: Judged = {
        ("start", 0.0, TEST): [[1.0], [1.0], [0.0]],
        ("tuned", 0.0, TEST): [[1.0], [1.0], [1.0]],
        ("start", 1.0, TEST): [[0.0], [0.0], [0.0]],
        ("tuned", 1.0, TEST): [[1.0], [1.0], [0.0]],
    }
    evaluation = Evaluation(["start", "tuned"], [0.0, 1.0], 1, {TEST: TASKS}, judged, "start", "tuned")
    found = reward_results(evaluation, lambda tasks: {})
    assert found.outcome["tuned minus start/reward, greedy"]["value"] == pytest.approx(1 / 3)
    assert found.outcome["tuned minus start/reward, temperature 1"]["value"] == pytest.approx(2 / 3)
    assert found.summary is not None
    at_one, greedy = found.summary["paragraphs"]
    assert at_one.startswith("Temperature 1, 3 tasks: the change is 0.667") and greedy.startswith(
        "Greedy, the change is 0.333"
    )


def test_tasks_are_called_held_out_only_where_a_model_was_trained() -> None:
    trained, as_given = results([0.0] * 3, [1.0] * 3), results([0.0] * 3, [1.0] * 3, kind="start")
    assert trained.tables[""]["title"] == "Held-out tasks: mean reward"
    assert as_given.tables[""]["title"] == "Test tasks: mean reward" and as_given.summary is not None
    assert "never trained on" not in as_given.tables[""]["note"] and "is not known here" in as_given.tables[""]["note"]
    assert "on test tasks: " in as_given.summary["headline"]


def test_one_task_has_no_interval() -> None:
    found = results([0.0, FAULT, FAULT], [1.0, FAULT, FAULT], trivial=0.5)
    assert found.summary is not None
    assert found.summary["headline"] == (
        "tuned did not clearly change the mean reward on held-out tasks: 0.000 before, 1.000 after."
    )
    assert found.summary["paragraphs"][0].startswith("Greedy, 1 task, too few for an interval: the change is 1.000.")
