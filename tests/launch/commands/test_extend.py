"""`train --steps`: what is lengthened, what runs again, and that nothing is lost."""

import json
from pathlib import Path

import pytest

from terrella.core import run as runs
from terrella.core import schema
from terrella.core.errors import ConfigError, StorageError
from terrella.launch import recipe
from terrella.launch.extend import explain, extend, with_steps
from terrella.launch.rewind import back_to


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run directory of the demo as it looks when all stages are done."""
    config = recipe.load("demo")
    run, lease = runs.create(tmp_path / "run", config)
    for stage in config.stages:
        run.finish(stage.name, {"steps": 70} if stage.kind == "rl" else {})
        (run.path / "checkpoints" / stage.name / "step-000070").mkdir(parents=True)
    run.write_result("evaluate-OpenSokoban", {"rows": []})
    (run.path / "summary.json").write_text("{}")
    lease.release()
    return run.path


def test_steps_change_rl_stages_and_lift_their_budget() -> None:
    config = with_steps(recipe.load("demo"), ("90",))
    assert {s.name: (s.steps, s.actions) for s in config.stages if s.kind == "rl"} == {
        "rl": (90, None),
        "rl-true-world": (90, None),
    }
    one = with_steps(recipe.load("sokoban-tiny"), ("pretrain=200",))
    assert [getattr(s, "steps", None) for s in one.stages][1:3] == [200, 40]
    for text, message in (
        ("x", "give a number"),
        ("0", "give a number"),
        (
            "evaluate=3",
            "with steps are warmup, agent, world-model, rl, imitation, longer-warmup, rl-true-world",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            with_steps(recipe.load("demo"), (text,))


def test_a_finished_run_goes_on_and_keeps_what_it_had(finished: Path) -> None:
    config = with_steps(recipe.load("demo"), ("rl=90",))
    assert extend(finished, config) == ["rl"]
    assert f"their old results are in {finished / 'set-aside'}" in explain(finished, ["rl"])
    done = {path.stem for path in (finished / "stages").glob("*.json")}
    everything = {s.name for s in config.stages}
    assert everything - done == {"rl", "evaluate", "export"}  # what rests on rl runs again, the other arm does not
    assert (finished / "checkpoints" / "rl" / "step-000070").is_dir()  # it goes on from here
    kept = finished / "set-aside" / "001"
    assert (kept / "results" / "evaluate-OpenSokoban.json").is_file() and (kept / "summary.json").is_file()
    assert json.loads((kept / "stages" / "rl.json").read_text()) == {"steps": 70}
    assert schema.build(recipe.Recipe, schema.parse_yaml((finished / "config.yaml").read_text(), "x")) == config
    _, lease = runs.create(finished, config)  # the same command opens it
    lease.release()
    assert extend(finished, config) == []  # and changes nothing more


def test_stages_that_do_not_depend_on_an_extended_one_do_not_keep_it_from_going_on(finished: Path) -> None:
    """But an outcome that nothing set aside is lost."""
    config = with_steps(recipe.load("demo"), ("rl=90",))
    names, run = [s.name for s in config.stages], runs.Run(finished, "")
    assert extend(finished, config) == ["rl"] and run.verify(names) == []
    run, lease = runs.create(finished, config)
    run.finish("rl", {"steps": 90})
    lease.release()
    (finished / "stages" / "rl.json").unlink()
    with pytest.raises(StorageError, match=r"rl\.json: lost, although stage more-play started"):
        run.verify(names)


def test_a_run_that_was_stopped_in_its_first_stage_has_no_old_results(tmp_path: Path) -> None:
    run, lease = runs.create(tmp_path / "run", recipe.load("demo"))
    lease.release()
    assert extend(run.path, with_steps(recipe.load("demo"), ("rl=90",))) == ["rl"]
    assert explain(run.path, ["rl"]) == f"{run.path}: going on with rl to step 90"


def test_the_tables_of_what_runs_again_go_aside_and_those_of_other_stages_stay(finished: Path) -> None:
    for name in ("evaluate.json", "rl-lengths.json", "rl-true-world-lengths.json"):
        (finished / "results" / name).write_text("{}")
    for name in ("evaluate-agent-000000.jsonl", "rl-000010.jsonl", "rl-true-world-000010.jsonl"):
        (finished / "rollouts" / name).write_text("")
    extend(finished, with_steps(recipe.load("demo"), ("rl=90",)))
    aside = finished / "set-aside" / "001"
    kept = {path.name for folder in ("results", "rollouts") for path in (aside / folder).iterdir()}
    assert kept == {"evaluate.json", "evaluate-OpenSokoban.json", "evaluate-agent-000000.jsonl"}

    config = schema.load(recipe.Recipe, finished / "config.yaml")
    run, lease = runs.create(finished, config)
    (finished / "report.html").write_text("")
    assert back_to(run, [stage.name for stage in config.stages], "more-play") == finished / "set-aside" / "002"
    lease.release()
    left = {path.name for folder in ("results", "rollouts") for path in (finished / folder).iterdir()}
    assert left == {"rl-lengths.json", "rl-000010.jsonl"} and not (finished / "report.html").exists()


def test_fewer_steps_than_trained_are_refused_and_change_nothing(finished: Path) -> None:
    """Also where the stage was stopped and has checkpoints alone."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has 70 steps already, .* such as --steps rl=140, or another --run"):
            extend(finished, with_steps(recipe.load("demo"), ("60",)))
        assert not (finished / "set-aside").exists()
        (finished / "stages" / "rl.json").unlink(missing_ok=True)


def test_a_run_of_an_earlier_release_is_refused_by_the_new_word(finished: Path) -> None:
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("kind: rl", "kind: agent-rl"))
    with pytest.raises(ConfigError, match=r"config.yaml:\d+: the kind of stage 'agent-rl' is called 'rl' now"):
        extend(finished, with_steps(recipe.load("demo"), ("90",)))


def test_other_settings_are_not_taken_along(finished: Path) -> None:
    other = with_steps(recipe.load("demo", ("seed=5",)), ("90",))
    assert extend(finished, other) == [] and not (finished / "set-aside").exists()
    with pytest.raises(ConfigError, match="seed: 31 then, 5 now"):
        runs.create(finished, other)


def test_a_stage_that_exploitation_ended_is_not_lengthened(finished: Path) -> None:
    (finished / "stages" / "rl.json").write_text(json.dumps({"steps": 20, "exploited": 1}))
    with pytest.raises(ConfigError, match=r"'rl' of .* was ended at step 20 by validation\.on_gap = stop"):
        extend(finished, with_steps(recipe.load("demo"), ("rl=90",)))
    assert (finished / "stages" / "rl.json").is_file()
