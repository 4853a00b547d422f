"""terrella.evaluate asks a run as it evaluated itself, but for what is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import terrella
from terrella.core import run as runs
from terrella.core.errors import ConfigError
from terrella.launch import api, recipe
from terrella.launch.commands.check_recipe import alone
from terrella.launch.stages.eval import _trained_on
from terrella.launch.stages.verbs import environment, require_same_files
from terrella.rl.own.config import DataEnvironment, OwnEnvironment

SETTINGS = ("seed=7", "precision.params=fp32", "stages.evaluate.n=300", "stages.evaluate.max_new_tokens=4")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a finished run leaves it, without its weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def score(prompt, answer, info):\n    return 1.0\n")
    for name in ("rows.jsonl", "others.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"question": "{n}+{n}", "answer": {2 * n}}}\n' for n in range(20)))
    words = {"env.train": "rows.jsonl", "env.reward": "my.py:score", "env.template": "😀{{ question }}="}
    words = {key: value if key == "env.template" else str(tmp_path / value) for key, value in words.items()}
    given = tuple(f'{key}="{value}"' for key, value in words.items())
    config = recipe.load("grpo", (*given, *SETTINGS))
    made, lease = runs.create(tmp_path / "run", config)
    assert isinstance(config.env, DataEnvironment)
    require_same_files(config.env, made)
    lease.release()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "export" / "config.json").write_text("{}")
    return tmp_path / "run"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[recipe.Recipe]:
    """The recipes that evaluations would run, read as they are read."""
    found: list[recipe.Recipe] = []

    def note(name: str, settings: tuple[str, ...], *_: Any, **__: Any) -> Any:
        found.append(recipe.load(name, tuple(x for x in settings if not x.startswith("model.folder="))))
        return SimpleNamespace(results={"evaluate": {}})

    monkeypatch.setattr(api, "_run", note)
    return found


def test_a_run_is_asked_as_it_evaluated_itself(run: Path, asked: list[recipe.Recipe]) -> None:
    terrella.evaluate("run")
    terrella.evaluate(run, data="others.jsonl", overrides={"stages.evaluate.n": 5})
    terrella.evaluate(run, data="others.jsonl", reward="exact", template="{{ question }}?")
    stages = [config.stages[1] for config in asked]
    envs = [stage.env or config.env for stage, config in zip(stages, asked, strict=True)]
    assert [(s.n, s.max_new_tokens) for s in stages] == [(300, 4), (5, 4), (300, 4)]
    assert all((config.seed, config.precision.params) == (7, "fp32") for config in asked)
    assert [env.template for env in envs] == ["😀{{ question }}="] * 2 + ["{{ question }}?"]
    assert envs[0].reward == envs[1].reward and envs[2].reward == "exact"
    assert [str(config.env.train) for config in asked] == [str(run.parent / "rows.jsonl")] * 2 + ["None"]
    assert [env.test for env in envs] == [None, *[str(run.parent / "others.jsonl")] * 2]


def test_rows_that_a_run_held_out_are_not_among_those_it_was_trained_on(run: Path, asked: list[recipe.Recipe]) -> None:
    """Asked by itself or with its file given, and where other rows are tested on by a stage of their own."""
    plain = yaml.safe_load((run / "config.yaml").read_text())
    scored = next(stage for stage in plain["stages"] if stage["kind"] == "eval")
    for other in (None, plain["env"] | {"test": str(run.parent / "others.jsonl")}):
        scored["env"] = other
        (run / "config.yaml").write_text(yaml.safe_dump(plain))
        terrella.evaluate(run, data="rows.jsonl")
        stage, job = asked[-1].stages[1], alone(asked[-1], run.parent / "scored")
        with environment(stage, job) as tasks:
            rows = tasks.of("test")
            assert (len(rows), len(_trained_on(stage, job, tasks, rows))) == (20, 18)


def test_what_has_changed_since_is_refused_unless_other_is_given(run: Path, asked: list[recipe.Recipe]) -> None:
    (run.parent / "rows.jsonl").write_text('{"question": "1+1", "answer": 2}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl: has changed since .*; to score by others give data or reward"):
        terrella.evaluate(run)
    terrella.evaluate(run, data="others.jsonl")
    (run.parent / "my.py").write_text("def score(prompt, answer, info):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"my\.py:score: the file has changed since .*--reward"):
        terrella.evaluate(run, data="others.jsonl")
    terrella.evaluate(run, data="others.jsonl", reward="my.py:score")
    assert len(asked) == 2


def test_training_tasks_are_asked_for_only_where_something_is_trained() -> None:
    asked: list[str] = []
    tasks: Any = SimpleNamespace(of=lambda split: asked.append(split) or ["a", "b"])
    stage: Any = SimpleNamespace(env=OwnEnvironment("my.py:Echo"))
    start, tuned = (next(s for s in recipe.load("sft").stages if s.kind == kind) for kind in ("start", "sft"))
    for stages, found in (((start,), []), ((start, tuned), ["b"])):
        job: Any = SimpleNamespace(recipe=SimpleNamespace(env=stage.env, stages=stages))
        assert _trained_on(stage, job, tasks, ["b", "c"]) == found
    assert asked == ["train"]
