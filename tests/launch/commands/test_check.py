"""`terrella check`: broken promises of an environment by name, what would stop a recipe, and rehearsals that every
recipe has.
"""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core import run as runs
from terrella.core.config import ParallelConfig
from terrella.core.errors import ConfigError, TerrellaError
from terrella.core.files import read_json, write_json
from terrella.data.tokenizers import load_tokenizer
from terrella.launch import recipe, rehearse
from terrella.launch.commands.check import check
from terrella.launch.commands.check_env import check_environment, settings_of
from terrella.launch.commands.check_preview import Shown, preview
from terrella.launch.commands.check_recipe import alone, disk_foreseen, look, own_environments
from terrella.launch.extras import needed
from terrella.launch.recipe_files import shipped
from terrella.launch.settings.base import Retention
from terrella.launch.stages import eval as evaluation
from terrella.launch.task_options import GENERIC
from terrella.models.config import ModelConfig
from terrella.models.families import write_hf_config
from terrella.models.geometry import count
from terrella.models.stand_in import byte_vocab, write_byte_tokenizer, write_weights
from terrella.tests.golden.play import graph
from terrella.tests.sampling import sampled

CASES = Path(__file__).parent.parent.parent / "golden" / "cases"
OWN = """
import random, time
from dataclasses import dataclass
from terrella.rl.environment import Environment

class Good(Environment):
    def __init__(self, most=9):
        self.most = most
    def tasks(self, split):
        return [{"n": n} for n in (range(self.most) if split == "train" else range(100, 105))]
    def play(self, task):
        answer = yield f"Say {task['n']}."
        return float(answer == str(task["n"]))
    def demonstration(self, task):
        return str(task["n"])

class NoTest(Good):
    def tasks(self, split):
        return super().tasks("train") if split == "train" else []

class Leak(Good):
    def tasks(self, split):
        return super().tasks("train")

@dataclass
class Card:
    n: int

class LeakOfObjects(Good):
    def tasks(self, split):
        return [Card(n) for n in (range(9) if split == "train" else (7, 8, 100))]
    def play(self, task):
        answer = yield f"Say {task.n}."
        return 1.0

class Drawn(Good):
    def tasks(self, split):
        return [{"n": random.random()} for _ in range(3)]

class Clock(Good):
    def play(self, task):
        answer = yield f"It is {time.time_ns()}."
        return 1.0

class Chance(Good):
    def play(self, task):
        yield "Say something."
        return random.random()

class Endless(Good):
    def play(self, task):
        while True:
            yield "Go on."

class Nan(Good):
    def play(self, task):
        yield "Say something."
        return float("nan")

class Fragile(Good):
    def play(self, task):
        answer = yield "Say a number."
        return float(answer or 0)

class Backwards(Good):
    def play(self, task):
        answer = yield "Say it."
        return float(answer != str(task["n"]))

class Brief(Good):
    def play(self, task):
        yield "One."
        yield "Two."
        return 1.0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    return folder


def said(own: Path, name: str, *overrides: str) -> list[str]:
    return list(check_environment(settings_of(f"{own}/own.py:{name}", overrides)))


def test_an_environment_that_keeps_its_promises(own: Path) -> None:
    lines = said(own, "Good", "most=7")
    assert lines[0].startswith("tasks: 7 to train on, 5 to test on")
    assert "'Say 0.'" in lines[1] and "at most 1 of 100 turns" in lines[2]
    assert lines[3].endswith("the empty answer 0.000, an odd answer 0.000, its demonstration 1.000")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoTest", "tasks: 'test' is empty; what is evaluated on is never trained on, so give some"),
        ("Leak", "tasks: 9 of 'test' are in 'train' too, such as {'n': 0}; leave them out of one"),
        ("Drawn", "in another process; a resumed run must see the same ones, so draw from random.Random(seed)"),
        ("Clock", "in turn 1, and 'It is "),
        ("Chance", "a score must depend on the task and the answers alone"),
        (
            "Endless",
            (
                "play: task {'n': 0} with the empty answer was not over after max_turns = 5 answers; end it with "
                "`return "
                "score`"
            ),
        ),
        ("Nan", "play: task {'n': 0} with the empty answer has no score: "),
        ("Fragile", "with an odd answer has no score: "),
        ("Backwards", "demonstration: scores 0.000, the empty answer 1.000; one of play and demonstration is wrong"),
        ("Brief", "demonstration: of task {'n': 0} ends after 1 of its turns; give one answer a turn"),
    ],
)
def test_a_broken_promise_is_named_with_its_remedy(own: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        said(own, name, "max_turns=5")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Good", ""),
        ("NoTest", "tasks: 'test' is empty; what is evaluated on is never trained on, so give some"),
        ("Leak", "tasks: 9 of 'test' are in 'train' too, such as {'n': 0}; leave them out of one"),
        ("LeakOfObjects", "tasks: 2 of 'test' are in 'train' too, such as Sealed(Card(n=7))"),
        ("Drawn", "in another process; a resumed run must see the same ones, so draw from random.Random(seed)"),
        ("Clock", "prompts must depend on task and answers alone"),
        ("Chance", ""),  # RL does not ask for a score that is the same again, nor for demonstrations
    ],
)
def test_the_check_of_a_recipe_looks_at_the_tasks_too(own: Path, name: str, message: str) -> None:
    config = recipe.load(str(CASES / "own-data.yaml"), (f"env={{kind: '{own}/own.py:{name}'}}",))
    (finding,) = own_environments(config)
    assert (finding.level, finding.what) == ("fail" if message else "ok", "env")
    assert (message or "9 to train on, 5 to test on, all picklable, the same in another process") in finding.text


def test_only_the_splits_that_a_recipe_plays_are_looked_at(own: Path, tmp_path: Path) -> None:
    both = recipe.load(str(CASES / "own-data.yaml"), (f"env={{kind: '{own}/own.py:NoTest'}}",))
    trained = replace(both, stages=[stage for stage in both.stages if stage.kind != "eval"])
    assert [finding.text.split(",")[0] for finding in own_environments(trained)] == ["tasks: 9 to train on"]


def test_rows_that_are_both_trained_and_tested_on_are_found(tmp_path: Path) -> None:
    """Also where they stand in another file."""
    rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(12)]
    for name, some in (("train", rows), ("copy", rows[3:5]), ("other", ['{"prompt": "1+2=", "answer": "3"}'])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    for test, level in (("train", "fail"), ("copy", "fail"), ("other", "ok")):
        files = f"train: {tmp_path}/train.jsonl, test: {tmp_path}/{test}.jsonl"
        config = recipe.load(str(CASES / "own-data.yaml"), (f"env={{kind: data, reward: exact, {files}}}",))
        (finding,) = own_environments(config)
        assert finding.level == level
        assert level == "ok" or "of 'test' are in 'train' too, such as Row(prompt='" in finding.text


def test_an_environment_that_is_not_there_is_named(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"own\.py has no 'Goood'; did you mean 'Good'"):
        said(own, "Goood")
    with pytest.raises(ConfigError, match=r"env\.kind = 'dta' is unknown; did you mean 'data'"):
        settings_of("dta", ())


def failures(config: recipe.Recipe, folder: Path) -> list[str]:
    return [finding.line() for finding in look(config, folder) if finding.level == "fail"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stages.rl.prompts_per_step=6", "ranks=4"],
            "stages.rl.prompts_per_step: 6 does not divide over the 4 data ranks -> set it to 4 or 8",
        ),
        (["parallel.tensor=2"], "layout: parallel: tensor 2 x pipeline 1 x context 1 does not divide the 1 ranks"),
        (
            ["parallel.pipeline=2", "ranks=2"],
            "layout: parallel.pipeline: pipeline 2 x virtual_pipeline 1 does not divide the 1 layers",
        ),
        (
            ["stages.start.folder=no/such"],
            "stages.start: stages: start.folder: no/such: neither a folder nor a pinned hub id",
        ),
        (
            ["stages.rl.rollouts.sampler.kind=vllm"],
            "stages.rl: the package vllm is not installed; pip install 'terrella[vllm]'",
        ),
        (["env.train=no_rows.jsonl"], "no_rows.jsonl"),
        (["env.reward=null"], "env.reward: nothing judges the answers"),
        (["env.template='{{ qestion }}'"], "qestion"),
        (["model={layers: 4000, hidden: 8192, vocab: 259}"], "-> free space, or put the run elsewhere with --run"),
    ],
)
def test_what_a_dry_run_does_not_see_is_found(overrides: list[str], message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    config = recipe.load(str(CASES / "own-data.yaml"), tuple(overrides))
    lines = failures(config, tmp_path)
    assert any(message in line for line in lines), lines
    assert failures(recipe.load(str(CASES / "own-data.yaml")), tmp_path) == []


def test_packages_of_evaluations_and_of_their_environments_are_asked_for_too() -> None:
    config = recipe.load("sokoban-tiny", ("stages.evaluate.sampler={kind: vllm}",))
    assert needed(config) == {"vllm": "stages.evaluate"}
    sites = "{kind: web-site, tag: WebMiniwob, test_tag: WebMiniwobTest, max_prompt_tokens: 512}"
    config = recipe.load("sokoban-tiny", (f"stages.evaluate.env={sites}", "stages.evaluate.max_new_tokens=8"))
    assert needed(config) == dict.fromkeys(("miniwob", "playwright"), "stages.evaluate.env")


def test_a_sampler_without_the_models_layers_is_refused_before_the_start(tmp_path: Path) -> None:
    config = recipe.load(
        str(CASES / "own-data.yaml"), ("model.block=gemma", "model.family=gemma3_text", "model.qk_norm=true")
    )
    words = "sampler: the embedded sampler has no layers of model.block: gemma; use {kind: vllm}"
    assert any(f"stages: rl.rollouts.{words}" in line for line in failures(config, tmp_path))
    scored = next(stage for stage in config.stages if stage.kind == "eval")
    with pytest.raises(ConfigError, match=re.escape(f"stages: eval.{words}")):
        evaluation.check(scored, alone(config, tmp_path))


def test_the_first_episode_is_shown_as_the_model_reads_it(tmp_path: Path) -> None:
    config = recipe.load(str(CASES / "own-env.yaml"))
    shown = preview(config, alone(config, tmp_path))
    assert isinstance(shown, Shown)
    assert (shown.prompt, shown.prompt_tokens) == ("System:\nEcho.\nUser:\na\nAgent:\n", 29)
    assert shown.turns == 2 and isinstance(shown.reward, float) and shown.how == "at random, as fresh weights do"
    small = recipe.load(str(CASES / "own-env.yaml"), ("model.max_positions=16",))
    with pytest.raises(ConfigError, match=r"exceed model\.max_positions = 16"):
        preview(small, alone(small, tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab=13", "model.vocab = 13 is below the 14 tokens of the recipe's env"),
        ("model.max_positions=72", "model.max_positions = 72: state, action and next state of 'SimpleSokoban' take 73"),
        ("env.tag=FrozenLake", "env.tag: 'FrozenLake' has no grid dynamics"),
        (
            "stages.selfplay.least_reward=1",
            "stages: selfplay: the environment makes its own data here; leave model, again and least_reward",
        ),
    ],
)
def test_what_a_grid_cannot_do_is_found_before_its_rooms_are_made(override: str, message: str, tmp_path: Path) -> None:
    lines = failures(recipe.load("sokoban-tiny", (override,)), tmp_path)
    assert any(message in line for line in lines), lines


# what a prompt holds; None: no text is sampled for a reward
NEED_NOTHING = {
    "demo": "player",  # its RL is in a world that no model imagines yet
    "sokoban-tiny": "######",
    "sokoban-worlds-tiny": "player (p) is at",
    "spa-sokoban-tiny": "player",
    "spa-sokoban-gpu": "player",
    "spa-frozenlake-tiny": "_o",
    "spa-sudoku-tiny": "| 4 .",
    "spa-countdown-tiny": "target",
    "spa-qa-tiny": "how many",
    "spa-webshop-tiny": "instruction",
    "text-game-tiny": "torch",
    "text-game-sft-1gpu": "bake-loaf",
    "web-page-tiny": "page",
    "web-page-sft-1gpu": "page",
    "webrl-tiny": "task instruction",  # its pieces are gathered by playing, and no start has
    "webrl-arms-tiny": "task instruction",
    "webrl-sites": "task instruction",
    "webrl-sites-1gpu": "task instruction",
    "mpc-sites": "page",
    "mpc-sites-tiny": None,
    "video-tiny": None,
}
PARTS = 6  # of all recipes; one in CI
BROWSER = {"webrl-miniwob": "task instruction", "webrl-miniwob-tiny": "task instruction"}


def of_ones_own(name: str, folder: Path) -> tuple[str, ...]:
    """What the recipes for any task ask of their user."""
    if name not in GENERIC:
        return ()
    (folder / "own.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?", "answer": "3"}\n')
    (folder / "own.py").write_text("def score(prompt, answer, info):\n    return float(info['answer'] in answer)\n")
    return (f"env.train={folder}/own.jsonl", f"env.reward={folder}/own.py:score", "env.hold_out_every=2")


def installed(config: recipe.Recipe) -> bool:
    """Whether the packages are here that the recipe needs; without the extra video or web its check says so."""
    return all(importlib.util.find_spec(package) for package in needed(config))


def passes(config: recipe.Recipe, folder: Path) -> Shown | str:
    assert failures(config, folder) == []
    shown = preview(config, alone(config, folder))
    assert isinstance(shown, str) or isinstance(shown.reward, float)
    return shown


@pytest.mark.parametrize("name", sampled(list(NEED_NOTHING), 6))
def test_a_recipe_that_needs_nothing_from_outside_passes_its_check(name: str, tmp_path: Path) -> None:
    config, text = recipe.load(name), NEED_NOTHING[name]
    if not installed(config):
        pytest.skip("needs an extra of the recipe, such as terrella[video]")
    shown = passes(config, tmp_path)
    assert text in shown.prompt.lower() if text and isinstance(shown, Shown) else (isinstance(shown, str) and not text)


@pytest.mark.integration
@pytest.mark.parametrize("name", list(BROWSER))
def test_a_recipe_in_a_browser_passes_its_check(name: str, tmp_path: Path) -> None:
    shown = passes(recipe.load(name), tmp_path)
    assert isinstance(shown, Shown) and BROWSER[name] in shown.prompt.lower()


def test_a_prompt_of_pieces_that_no_start_has_gathered_is_shown_whole(tmp_path: Path) -> None:
    shown = passes(recipe.load("webrl-tiny"), tmp_path)
    assert isinstance(shown, Shown) and shown.prompt_tokens is None and "</html>" in shown.prompt


@pytest.mark.parametrize(
    ("folder", "message"), [("nowhere", "start.folder: nowhere"), ("file", "holds no config.json")]
)
def test_what_many_stages_miss_is_said_once(
    folder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()  # a folder that is none
    lines = failures(recipe.load("spa-sokoban-1gpu", (f"stages.start.folder={folder}",)), tmp_path / "run")
    assert len(lines) == 1 and message in lines[0]


def test_a_run_folder_of_other_settings_is_found_and_nothing_of_it_is_read(tmp_path: Path) -> None:
    old = recipe.load("spa-sokoban-tiny")
    runs.create(tmp_path / "run", old)[1].release()
    write_json(tmp_path / "run" / "stages" / "start.json", {})  # it has ended, and its tokenizer is gone
    assert any("tokenizer" in line for line in failures(old, tmp_path / "run"))
    (line,) = failures(recipe.load("spa-sokoban-tiny", ("seed=5",)), tmp_path / "run")
    assert "this run was started with other settings (seed: 0 then, 5 now)" in line


def test_arms_of_a_planner_have_no_environment_of_their_own() -> None:
    assert [*own_environments(recipe.load("mpc-sites-tiny"))] == []


def test_disk_is_what_checkpoints_take() -> None:
    config = recipe.load(str(CASES / "own-data.yaml"))
    weights = 4 * count(config.model).total
    # start; sft and rl, whose optimizers are dropped; control while its third checkpoint is written
    assert disk_foreseen(config) == weights + 2 * weights + 3 * 3 * weights
    kept = [replace(s, checkpoints=Retention(1, "loss", True, "whole")) if s.name == "rl" else s for s in config.stages]
    assert disk_foreseen(replace(config, stages=kept)) == weights + weights + 2 * 3 * weights + 3 * 3 * weights


def test_layouts_are_cut_to_what_a_laptop_runs() -> None:
    large = recipe.load("webrl-webarena-lite-70b")
    assert rehearse.small_layout(large, None) == (
        ParallelConfig(tensor=2, pipeline=2, context=2, sequence_parallel=True),
        8,
    )
    assert rehearse.small_layout(recipe.load("sokoban-tiny"), "tp=4,pp=2") == (ParallelConfig(tensor=2, pipeline=2), 4)
    assert rehearse.small_layout(recipe.load("sokoban-tiny"), "cp=2,dp=4")[1] == 4
    assert rehearse.small_layout(recipe.load("sokoban-tiny"), None) == (ParallelConfig(), 2)
    with pytest.raises(ConfigError, match="--layout tp=2,xp=2: write it as tp=2,pp=2"):
        rehearse.small_layout(large, "tp=2,xp=2")


@pytest.mark.parametrize("part", sampled(range(PARTS), 1))
def test_every_recipe_that_ships_has_a_rehearsal(part: int, tmp_path: Path) -> None:
    """Turned down it is still a recipe, of the same stages; nothing of the user's is named that is not there, and it
    passes its check.
    """
    for number, name in enumerate(list(shipped())[part::PARTS]):
        folder = tmp_path / name
        folder.mkdir()
        config = recipe.load(name, of_ones_own(name, folder))
        made = rehearse.turned_down(config, "tp=2,pp=2" if number % 2 else None, folder)
        small = recipe.load(str(rehearse.write(made, folder)))
        assert small.ranks <= rehearse.MOST_RANKS and small.model.family == config.model.family and not small.sinks
        assert [s.name for s in small.stages] == [
            s.name for s in config.stages if s.name in {t.name for t in small.stages}
        ]
        assert rehearse.describe_changes(config, made)
        if name not in BROWSER and installed(small):
            passes(small, folder / "run")


def test_a_rehearsal_samples_ahead_where_the_recipe_does(tmp_path: Path) -> None:
    for asked, kept in ((0, 0), (1, 1), (3, 1)):
        config = recipe.load("spa-sokoban-tiny", (f"stages.spa.rollouts.ahead={asked}",))
        made = rehearse.turned_down(config, None, tmp_path)
        (spa,) = (stage for stage in made.settings["stages"] if stage["name"] == "spa")
        assert spa["rollouts"]["ahead"] == kept


def test_a_rehearsal_keeps_clips_in_every_part_of_them(tmp_path: Path) -> None:
    config = recipe.load(
        "video-gpu", ("stages.rlvr.env={train_part: [0.97, 1.0]}", "stages.pretrain.env={train_part: [0.0, 0.97]}")
    )
    made = {stage["name"]: stage for stage in rehearse.turned_down(config, None, tmp_path).settings["stages"]}
    assert [made[name]["env"]["train_part"] for name in ("pretrain", "rlvr")] == [[0.0, 0.5], [0.5, 1.0]]


def test_a_users_arguments_are_not_turned_down(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = recipe.load(
        str(CASES / "own-env.yaml"), (f"env={{kind: '{tmp_path}/own.py:Good', most: 50}}", "env.args={steps: 500}")
    )
    made = rehearse.turned_down(config, None, tmp_path)
    assert made.settings["env"]["args"] == {"steps": 500, "most": 50}
    sft = next(s for s in made.settings["stages"] if s["name"] == "sft")
    assert (sft["steps"], sft["epochs"]) == (2, None)


def stand_in(folder: Path) -> Path:
    """A folder of the sizes of a 0.5B model, without weights."""
    write_byte_tokenizer(folder)
    sizes = ModelConfig(
        family="qwen2", layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=300, qkv_bias=True
    )
    write_json(folder / "config.json", write_hf_config(sizes, "bfloat16"))
    return folder


def test_a_model_of_ones_own_is_rehearsed_with_its_tokenizer(tmp_path: Path) -> None:
    folder = stand_in(tmp_path / "model")
    made = rehearse.turned_down(recipe.load("grpo", (f"model.folder={folder}",)), "tp=2", tmp_path / "rehearsal")
    model, start = made.settings["model"], made.settings["stages"][0]
    assert model["folder"] == start["folder"] == str(tmp_path / "rehearsal" / "start-start") and [*made.folders] == [
        start["folder"]
    ]
    assert (model["family"], model["layers"], model["heads"], model["kv_heads"], model["vocab"]) == (
        "qwen2",
        2,
        4,
        2,
        300,
    )
    assert (Path(start["folder"]) / "tokenizer.json").is_file() and "with the tokenizer of" in made.stand_ins[0]
    shared = rehearse.turned_down(recipe.load("grpo", (f"model.folder={folder}",)), "tp=4", tmp_path / "shared")
    assert shared.settings["model"]["kv_heads"] == 1  # two ranks of the rehearsal share a head, as the four would


@pytest.mark.parametrize("family", ["glm", "qwen2"])
def test_a_rehearsed_model_ends_its_answers_where_its_tokenizer_says(family: str, tmp_path: Path) -> None:
    """GLM's own stop tokens lie outside the small vocabulary; those of a user's folder are the user's."""
    small = ModelConfig(
        family=family,
        layers=1,
        hidden=16,
        heads=2,
        kv_heads=2,
        head_dim=8,
        ffn=16,
        vocab=byte_vocab(family),
        qkv_bias=True,
        rotary_interleaved=family == "glm",
    )
    write_byte_tokenizer(tmp_path, family)
    write_weights(small, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ends = ["<|im_end|>", *(["<|endoftext|>", "<|user|>", "<|observation|>"] if family == "glm" else [])]
    assert [tokenizer.decode([i], keep_special=True) for i in tokenizer.stop_ids] == ends
    assert read_json(tmp_path / "config.json")["eos_token_id"] == list(
        tokenizer.stop_ids[-3 if family == "glm" else 0 :]
    )
    own = {"eos_token_id": [3, 5], "temperature": 0.7}
    write_json(tmp_path / "generation_config.json", own)
    write_weights(small, tmp_path)
    assert read_json(tmp_path / "generation_config.json") == own


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "terrella", "check", *words], capture_output=True, text=True, timeout=1800, cwd=cwd
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sokoban-tiny", "--layout", "tp=2"], "--layout: is for --rehearse"),
        (["sokoban-tiny", "--keep", "kept"], "--keep: is for --rehearse"),
        (["grpo"], "grpo: trains on a task of your own; add --model FOLDER"),
        (["sokoban-tiny", "--data", "x"], "--data: sokoban-tiny trains on a task of its own"),
        (["a", "b"], "write `terrella check RECIPE` or `terrella check env NAME`"),
        (["env"], "check env: which environment? write `terrella check env file.py:Name`"),
        (["my.py:Task"], "is checked by `terrella check env my.py:Task`"),
    ],
)
def test_the_command_line_says_how_it_is_used(words: list[str], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2 and message in done.stderr


REHEARSALS = [
    [str(CASES / "own-data.yaml")],
    [str(CASES / "own-env.yaml"), "--layout", "tp=2,pp=2"],
    ["sokoban-tiny"],
    ["sokoban-worlds-tiny"],
    ["spa-sokoban"],
    ["text-game-rlvr-binary", "--layout", "tp=2,pp=2"],
    ["web-page-rlvr", "--layout", "cp=2"],
    ["webrl-webarena-lite"],
    ["webrl-webarena-lite-glm4"],
    ["video-rt1"],
    ["mpc-sites"],
]
MORE = [
    ["demo"],
    ["text-game-sft"],
    ["text-game-1gpu"],
    ["text-game-rlvr-task"],
    ["web-page-sft"],
    ["video-rt1-single"],
    ["spa-frozenlake"],
    ["spa-sudoku"],
    ["spa-countdown"],
    ["spa-qa"],
    ["spa-webshop"],
    ["webrl-webarena-lite-70b"],
    ["webrl-arms-tiny"],
    ["webrl-sites-1gpu"],
    ["spa-sokoban-tiny"],
    ["text-game-tiny"],
    ["text-game-sft-1gpu"],
    ["text-game-rlvr-binary-1gpu"],
    ["video-tiny"],
    ["video-gpu"],
    ["video-rt1-released"],
    ["mpc-sites-tiny"],
    ["grpo"],
    ["sft"],
    # the released reward model in place of one that is trained here
    ["webrl-webarena-lite", "--set", "stages.orm={kind: start, name: orm, folder: models/webrl-orm-llama-3.1-8b}"],
]


def test_a_rehearsal_is_not_kept_where_an_earlier_one_lies(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = CliRunner().invoke(check, ["sokoban-tiny", "--rehearse", "--keep", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and "holds an earlier rehearsal" in str(done.exception)


def test_every_graph_of_a_shipped_recipe_is_rehearsed() -> None:
    names = [words[0] for words in (*REHEARSALS, *MORE)]
    rehearsed = {graph(recipe.load(name)) for name in names}
    assert [name for name in shipped() if graph(recipe.load(name)) not in rehearsed] == []


@pytest.mark.integration
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words",
    [*sampled(REHEARSALS, 1), *(pytest.param(words, marks=pytest.mark.full) for words in MORE)],
    ids=lambda words: Path(words[0]).stem,
)
def test_a_rehearsal_goes_through(words: list[str], tmp_path: Path) -> None:
    own = [word for setting in of_ones_own(words[0], tmp_path) for word in ("--set", setting)]
    if own:
        own += ["--model", str(stand_in(tmp_path / "model"))]
    done = command(*words, *own, "--rehearse", cwd=tmp_path)
    assert done.returncode == 0 and "went through in" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def release_rows(count: int) -> list[dict]:
    """Rows of RLVR-World's text games, by the columns that its release has; every second one changes a thing."""

    def thing(level: int) -> dict:
        return {"name": "cup", "uuid": 1, "type": "Cup", "properties": {"level": level}, "contains": []}

    rows = []
    for i in range(count):
        state, target = (
            json.dumps({"game_state": [thing(level), {"score": 0, "gameOver": False, "gameWon": False}]})
            for level in (i, i + i % 2)
        )
        rows.append(
            {
                "data_source": "llm_simulator",
                "prompt": [{"role": "user", "content": f"The game is {state}. The action is: pour. What is next?"}],
                "reward_model": {"style": "rule", "ground_truth": target},
                "extra_info": {"split": "train", "index": i, "data_state": state, "data_action": "pour"},
            }
        )
    return rows


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_rehearsal_reads_files_as_the_release_wrote_them(tmp_path: Path) -> None:
    """Parquet to shards, imitation, and RLVR from the export of that rehearsal, all in one folder of a user's."""
    import pyarrow as arrow
    from pyarrow import parquet

    for number, name in enumerate(("train", "cot", "test")):
        source = tmp_path / f"{name}.parquet"
        parquet.write_table(arrow.Table.from_pylist(release_rows(24 + number)), source)
        make = [sys.executable, "-m", "terrella", "shards", "make", "rlvr-parquet", str(source)]
        subprocess.run([*make, str(tmp_path / "shards" / "text-game" / name)], check=True, timeout=300)
    first = command("text-game-sft", "--rehearse", "--keep", "sft", cwd=tmp_path)
    assert first.returncode == 0 and "shards/text-game" not in first.stdout, first.stdout + first.stderr[-2000:]
    start = "stages.start.folder=sft/run/export"
    second = command("text-game-rlvr-binary", "--rehearse", "--keep", "rlvr", "--set", start, cwd=tmp_path)
    assert second.returncode == 0 and "shards/text-game" not in second.stdout, second.stdout + second.stderr[-2000:]
    assert "fresh weights with the tokenizer of sft/run/export" in second.stdout
    proof = read_json(tmp_path / "rlvr" / "run" / "export" / "export_proof.json")
    assert proof and "went through in" in second.stdout


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_rehearsal_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = command(
        str(CASES / "own-env.yaml"), "--rehearse", "--set", f"env={{kind: '{tmp_path}/own.py:Nan'}}", cwd=tmp_path
    )
    assert done.returncode != 0 and "the rehearsal of own-env failed" in done.stderr and "own.py:Nan" in done.stderr


FAULTY = """
import os, time
from itertools import count
from terrella.rl.environment import Environment

class Base(Environment):
    def tasks(self, split):
        return ["a"] if split == "train" else ["b"]
    def play(self, task):
        yield "Say it."
        return 1.0

class Endless(Base):
    def tasks(self, split):
        return count()

class Waits(Base):
    def tasks(self, split):
        time.sleep(100)

class Raises(Base):
    def play(self, task):
        raise OSError("the simulator is away")
        yield

class Exits(Base):
    def play(self, task):
        os._exit(0)
        yield
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Endless", "Endless.tasks gave more than 1,000 tasks for 'train'"),
        ("Waits", "Waits.tasks did not finish within 8 s (a start waits 300 s); its process was killed"),
        (
            "Raises",
            "the first episode has no reward: {}:Raises.play raised OSError: the simulator is away at faulty.py:23",
        ),
        ("Exits", "the first episode has no reward: {}:Exits.play ended its process with exit code 0"),
    ],
)
def test_an_environment_at_fault_fails_the_check_once(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it fails before the model is asked anything; and no second stage waits for it again."""
    own = tmp_path / "faulty.py"
    own.write_text(
        FAULTY.replace(
            "return count()", "import terrella.rl.hosted.child as child; child.MOST_TASKS = 1000; return count()"
        )
    )
    patience = 8.0 if name == "Waits" else 30.0  # a busy machine imports for seconds
    monkeypatch.setattr("terrella.launch.stages.verbs.CHECKING_S", patience)
    config = recipe.load(str(CASES / "own-data.yaml"), (f"env={{kind: '{own}:{name}'}}",))
    if name in ("Raises", "Exits"):  # nothing plays before the first episode is shown
        with pytest.raises(TerrellaError, match=re.escape(message.format(own))):
            preview(config, alone(config, tmp_path / "run"))
    else:
        lines = failures(config, tmp_path / "run")
        assert [message in line for line in lines] == [True], lines


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(0)", "importing it ended the process (code 0)"),
        ("import time; time.sleep(100)", "importing it did not finish within 3 s"),
        ("raise OSError('no')", "cannot be imported: line 1: OSError: no"),
        ("print('x' * 10_000_000)\ndef made(*_): return []", ""),
    ],
)
def test_code_of_ones_own_that_runs_in_the_ranks_is_imported_apart(
    code: str, words: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    (tmp_path / "my.py").write_text(code)
    monkeypatch.setattr("terrella.launch.commands.check_recipe.CHECKING_S", 3.0 if "sleep" in code else 30.0)
    config = recipe.load(str(CASES / "own-data.yaml"), (f"stages.rl.algorithm={{kind: '{tmp_path}/my.py:made'}}",))
    lines = failures(config, tmp_path / "run")
    assert [words in line and "stages.rl.algorithm" in line for line in lines] == ([True] if words else []), lines
    assert len(capfd.readouterr().out) < 1000


def test_a_folder_with_other_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert any("thesis.tex" in line for line in failures(recipe.load(str(CASES / "own-data.yaml")), tmp_path))


CHECKED = """
import sys
from terrella.data import tokenizers
from terrella.launch import cli

read = []
load = tokenizers.HFTokenizer.__init__

def counted(self, folder, **options):
    read.append(folder)
    load(self, folder, **options)

tokenizers.HFTokenizer.__init__ = counted
try:
    cli.main(sys.argv[1:])
except SystemExit as end:
    print("LEFT", end.code, len(read), "megatron" in sys.modules)
"""


def test_a_check_imports_no_megatron_and_reads_a_tokenizer_once(tmp_path: Path) -> None:
    """What it would spend half of its time with."""
    write_byte_tokenizer(tmp_path / "tiny")
    write_weights(
        ModelConfig(layers=1, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=byte_vocab(), max_positions=256),
        tmp_path / "tiny",
    )
    answers = ("stages.rl.max_new_tokens=4", "stages.evaluate.max_new_tokens=4")
    words = [word for setting in (*of_ones_own("grpo", tmp_path), *answers) for word in ("--set", setting)]
    words += ["--model", str(tmp_path / "tiny"), "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", CHECKED, "check", "grpo", *words], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "LEFT 0 1 False", done.stdout + done.stderr
