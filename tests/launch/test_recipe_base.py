"""Recipes laid over others: sections merge, stages are changed by name, and every error still names its own file and
line.
"""

import json
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.core.schema import merge, parse_yaml
from terrella.launch import recipe as recipes
from terrella.launch.recipe_files import run_folder

OVER = """base: spa-sokoban
name: mine
model: {layers: 2}
env: {tags: [FrozenLake], max_turns: 3}
stages:
  "*": {steps: 7, env: {window: 1}}
  estimation: null
  evaluate:
    arms: {state-estimation RL: null}
    n: 3
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_recipe_over_another(tmp_path: Path) -> None:
    below, above = recipes.load("spa-sokoban"), recipes.load(write(tmp_path, "mine.yaml", OVER), ("seed=5",))
    assert (above.name, above.seed, above.model.layers, above.model.hidden) == ("mine", 5, 2, below.model.hidden)
    stages = {stage.name: stage for stage in above.stages}
    assert list(stages) == [s.name for s in below.stages if s.name != "estimation"]
    assert stages["spa"].steps == stages["vanilla"].steps == 7 and stages["sft"].steps is None
    played = stages["selfplay"].env  # the recipe's environment, with what the stage and both recipes change
    assert (played.kind, played.tags, played.max_turns, played.window, played.coordinates) == (
        "worlds",
        ["FrozenLake"],
        3,
        1,
        True,
    )
    assert stages["vanilla"].env is None and above.env.max_turns == 3 and above.env.window == 0
    assert [arm.name for arm in stages["evaluate"].arms] == [
        "base model",
        "after self-play imitation",
        "vanilla RL",
        "SPA",
    ]


def test_bases_of_bases_and_several_at_once(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "base: spa-sokoban\nname: one\nseed: 1\n")
    write(tmp_path, "part.yaml", "seed: 2\nstages: {spa: {steps: 3}}\n")
    two = recipes.load(write(tmp_path, "two.yaml", f"base: [{one}, part.yaml]\nname: two\n"))
    assert two.seed == 2 and next(s for s in two.stages if s.name == "spa").steps == 3


@pytest.mark.parametrize(
    "text, said",
    [
        (
            OVER.replace("steps: 7", "stepz: 7").replace('"*"', "spa"),
            r"mine.yaml:6: unknown key 'stages\[4\].stepz'; did you mean 'steps'",
        ),
        (
            OVER.replace("estimation: null", "estimatiom: null"),
            r"mine.yaml:7: 'estimatiom' is none of those in the base \(.*estimation.*\); did you mean 'estimation'",
        ),
        (OVER.replace("layers: 2", "layers: two"), "mine.yaml:3: model.layers = 'two' must be int"),
        ("base: [1]\nname: x\n", "mine.yaml:1: base must be"),
        ("base: mine.yaml\nname: x\n", "is its own base"),
    ],
)
def test_errors_name_the_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipes.load(write(tmp_path, "mine.yaml", text))


def test_an_error_in_the_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path, "below.yaml", "name: below\nworld: language\nmodel: {layerz: 2}\nstages: []\n")
    with pytest.raises(ConfigError, match=r"below\.yaml:3: unknown key 'model\.layerz'"):
        recipes.load(write(tmp_path, "mine.yaml", "base: below.yaml\nname: mine\n"))


def test_another_kind_replaces_a_section_whole() -> None:
    below, above = parse_yaml("a: {kind: x, p: 1}", "below"), parse_yaml("a: {kind: y, q: 2}", "above")
    assert set(merge(below, above).value["a"].value) == {"kind", "q"}
    assert set(merge(below, parse_yaml("a: {q: 2}", "above")).value["a"].value) == {"kind", "p", "q"}


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "", "a\nb", "x" * 200, ".hidden", "-x"])
def test_names_of_runs_and_stages_are_file_names(tmp_path: Path, name: str) -> None:
    head, quoted = "base: spa-sokoban-tiny\n", json.dumps(name)
    for text in (f"name: {quoted}\n", f"name: a\nstages: {{spa: {{name: {quoted}}}}}\n"):
        with pytest.raises(ConfigError, match="must be a file name"):
            recipes.load(write(tmp_path, "mine.yaml", head + text))


def test_bases_without_end(tmp_path: Path) -> None:
    write(tmp_path, "part-0.yaml", "seed: 1\n")
    for i in range(1, 20):  # each reads the one below twice: a million files
        write(tmp_path, f"part-{i}.yaml", f"base: [part-{i - 1}.yaml, part-{i - 1}.yaml]\n")
    with pytest.raises(ConfigError, match="more than 50 files"):
        recipes.load(str(tmp_path / "part-19.yaml"))


@pytest.mark.parametrize(
    "setting",
    [
        "stages.rlvr.drift_gate=.nan",
        "stages.rlvr.optimizer.clip_grad=-5",
        "stages.rlvr.optimizer.lr=.inf",
        "stages.rlvr.optimizer.betas=[0.9, 1.5]",
        "stages.rlvr.temperature=-1",
        "model.kv_heads=0",
        "model.layers=-2",
        "seed=-1",
    ],
)
def test_settings_that_would_switch_a_guard_off_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0].rpartition(".")[2]):
        recipes.load("sokoban-tiny", (setting,))


@pytest.mark.parametrize(("old", "new"), recipes.RENAMED.items())
def test_a_kind_of_stage_that_was_renamed_is_refused_by_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(f"name: x\nmodel: {{vocab: 300}}\nstages:\n- {{kind: {old}, name: s}}\n")
    with pytest.raises(ConfigError, match=rf"old\.yaml:4: the kind of stage '{old}' is called '{new}' now"):
        recipes.load(str(path))


def test_an_export_that_its_family_cannot_hold_is_refused_before_the_run() -> None:
    """A folder of Qwen2 without biases lacks tensors, which every reader fills in its own way."""
    with pytest.raises(ConfigError, match=r"model\.qkv_bias: is False, but models of model\.family: qwen2"):
        recipes.load("demo", ("model.family=qwen2",))
    assert recipes.load("demo", ("model.family=qwen2", "model.qkv_bias=true")).model.family == "qwen2"


def test_a_runs_own_config_goes_on_with_that_run(tmp_path: Path) -> None:
    own = tmp_path / "longer" / "config.yaml"
    assert run_folder("grpo", "grpo") == run_folder(str(own), "grpo") == Path("runs/grpo")  # there is no run yet
    own.parent.mkdir()
    (own.parent / "lease.json").write_text("{}")
    assert run_folder(str(own), "grpo") == own.parent
