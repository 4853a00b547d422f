"""The verb collect on an environment of the user's own: demonstrations, then a model's best answers, become lessons of
sft stages; an rl stage after them ends at a budget of actions and scores held-out tasks."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from terrella.core.errors import ConfigError
from terrella.data.shards import ShardSet
from terrella.data.tokenizers import TOKENIZER, ByteTokenizer
from terrella.data.trajectory import Role, TokenSequence
from terrella.launch import recipe
from terrella.launch.commands.check_recipe import alone, look
from terrella.launch.recipe_warnings import find_warnings, met_by, require_clear
from terrella.launch.settings.verbs import Collect
from terrella.launch.stages import collect, sft
from terrella.launch.stages import eval as evaluation
from terrella.launch.stages.common import open_final
from terrella.tests.sampling import in_turn

PATIENCE_S = 900.0  # of a busy machine; a free one needs a quarter of a minute
CASES = Path(__file__).parents[1] / "golden" / "cases"
RECIPE = f"""name: collected
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 259, max_positions: 128}}
env: {{kind: "{CASES}/own_task.py:Echo", letters: abcdef}}
stages:
- {{kind: start, name: start}}
- {{kind: collect, name: shown, prompts: 12, validation_share: 0.3, max_new_tokens: 4}}
- {{kind: sft, name: sft, data: shown, init: start, sequences_per_step: 6, epochs: 20, optimizer: {{lr: 1e-2}}}}
- {{kind: collect, name: best, model: sft, prompts: 6, samples_per_prompt: 4, least_reward: 0.5, validation_share: 0, max_new_tokens: 3}}
- {{kind: sft, name: sft-best, data: best, init: sft, sequences_per_step: 4, steps: 2, optimizer: {{lr: 1e-3}}}}
- kind: rl
  name: rl
  init: sft-best
  algorithm: {{kind: grpo}}
  prompts_per_step: 2
  samples_per_prompt: 2
  steps: 9
  actions: 63
  counting: [best]
  max_new_tokens: 3
  optimizer: {{lr: 1e-4}}
  validation: {{every: 9, prompts: 3, samples: 2}}
- kind: eval
  name: eval
  arms: [{{name: fresh weights, model: start, control: true}}, {{name: all of it, model: rl, env: {{letters: abcdef}}}}]
  before: fresh weights
  after: all of it
  max_new_tokens: 3
  n: 4
"""  # noqa: E501


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


@pytest.mark.timeout(2 * PATIENCE_S)
@in_turn("imitated play")
def test_what_an_environment_plays_is_imitated(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "terrella", "train", str(write(tmp_path, RECIPE)), "--run", str(tmp_path / "run")]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = {
        name: json.loads((tmp_path / "run" / "stages" / f"{name}.json").read_text())
        for name in ("shown", "sft", "best", "rl")
    }

    # every task twice, two answers each; whole episodes are held out
    assert told["shown"]["actions"] == 24 and told["shown"]["invalid"] == 0
    assert (
        told["shown"]["train_lessons"] + told["shown"]["held_out_lessons"] == 12
        and told["shown"]["held_out_lessons"] > 0
    )
    lesson = ShardSet(tmp_path / "run" / "stages" / "shown" / "train")[0]
    letter = lesson["messages.json"][1]["content"]
    assert [m["content"] for m in lesson["messages.json"]] == [f"Echo.\n\n{letter}", letter, f"again {letter}", letter]
    learnt = [i for i, role in zip(lesson["tokens.npy"], lesson["roles.npy"], strict=True) if role == Role.ACTION]
    assert len(learnt) == 4 and learnt[0] == learnt[2]  # a letter and the end of text, twice
    assert told["sft"]["turns"] == told["shown"]["train_lessons"] and told["sft"]["held_out_loss"] > 0

    # a model's episodes below least_reward teach nothing
    rewards = [s["meta.json"]["reward"] for s in ShardSet(tmp_path / "run" / "stages" / "best" / "train")]
    assert (
        told["best"]["trajectories"] == 24 and 0 < len(rewards) == told["best"]["train_lessons"] and min(rewards) >= 0.5
    )

    # 48 actions of `best` and 8 a step: the second step passes 63
    assert told["best"]["actions"] == 48 and (told["rl"]["steps"], told["rl"]["actions"]) == (2, 16)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = {row["step"]: row["validation/mean"] for row in rows if "validation/mean" in row}
    assert list(validated) == [2] and 0 <= validated[2] <= 1

    table = json.loads((tmp_path / "run" / "results" / "eval.json").read_text())
    kinds = {row["name"]: row["kind"] for row in table["rows"]}
    assert kinds["fresh weights"] == "control" and kinds["all of it"] == "model" and kinds["always a"] == "baseline"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("data: shown,", "data: shown, env: {letters: abc},", "env: the lessons are those of the stage `data`"),
        ("model: sft, prompts", "model: sft, again: shown, prompts", "again: the answers are those of another stage"),
        (
            "kind: collect, name: shown",
            "kind: agent-play, name: shown",
            r"recipe.yaml:6: .*'agent-play' is called 'collect' now",
        ),
        ("before: fresh weights", "models: [rl]\n  before: fresh weights", "give either models or arms"),
        ("after: all of it", "after: rl", "after: 'rl' is none of fresh weights, all of it"),
        (
            "{name: all of it, model: rl,",
            "{name: all of it, model: sft}, {name: all of it, model: rl,",
            "arms: two are called 'all of it'",
        ),
        ("every: 9, prompts: 3, samples: 2}", "every: 9}\n  rollouts: {validation: {every: 2}}", "leave one out"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RECIPE
    with pytest.raises(ConfigError, match=message):
        recipe.load(str(write(tmp_path, RECIPE.replace(old, new))))


def test_tokens_are_matched_to_those_of_a_stage_that_counts_some(tmp_path: Path) -> None:
    text = RECIPE.replace("init: sft, sequences_per_step: 4, steps: 2", "init: sft, sequences_per_step: 4, MATCHED")
    for named, said in (("best", "collect"), ("start", "start"), ("sft", None)):
        asked = recipe.load(str(write(tmp_path, text.replace("MATCHED", f"match_tokens_of: {named}"))))
        job = alone(asked, tmp_path / "run")
        stage = next(stage for stage in asked.stages if stage.name == "sft-best")
        if said is None:
            sft.check(stage, job)
            continue
        with pytest.raises(ConfigError, match=f"sft-best.match_tokens_of: '{named}' of kind {said} counts no gradient"):
            sft.check(stage, job)


def test_a_model_s_answers_are_read_with_the_tokenizer_that_a_data_stage_learnt(tmp_path: Path) -> None:
    """Where a recipe has no start."""
    shipped = recipe.load("text-game-tiny")
    data, first, *_ = shipped.stages
    best: Any = Collect(kind="collect", name="best", model="sft", prompts=4, least_reward=1.0)
    asked = replace(shipped, stages=[data, first, best, replace(first, name="again", init="sft", data="best")])
    job = alone(asked, tmp_path / "run")
    job.stage_folder("data").mkdir(parents=True)
    ByteTokenizer().save(job.stage_folder("data") / TOKENIZER)
    (tmp_path / "run" / "stages" / "data.json").write_text("{}")
    assert sft.Collected(job, "best", collect.TRAIN).pad_id == ByteTokenizer().pad_id


def test_a_stage_of_one_s_own_without_a_checkpoint_leaves_no_model(tmp_path: Path) -> None:
    job = alone(recipe.load(str(write(tmp_path, RECIPE))), tmp_path / "run")
    (tmp_path / "run" / "stages").mkdir(parents=True)
    (tmp_path / "run" / "stages" / "start.json").write_text('{"steps": 3}')
    with pytest.raises(ConfigError, match="'start' left no model: its outcome has no 'checkpoint'"):
        open_final(job, "start")


def test_a_held_out_lesson_may_be_longer_than_a_step_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lesson = TokenSequence(tuple(range(9)), (Role.PROMPT, *[Role.ACTION] * 8))
    monkeypatch.setattr(sft, "Collected", lambda *_: SimpleNamespace(read=[lesson, lesson]))
    engine = SimpleNamespace(score=lambda batches, _: [{"logprob": -2.0 * torch.ones(b.num_tokens)} for b in batches])
    stage: Any = SimpleNamespace(data="best", microbatch_tokens=4)
    assert sft.held_out_loss(stage, cast(Any, None), engine) == pytest.approx(2.0)


def test_a_stage_changes_some_settings_of_the_environment(tmp_path: Path) -> None:
    text = RECIPE.replace("prompts: 12,", "prompts: 12, env: {letters: xyz},").replace(
        "model: sft, prompts", "model: sft, env: {}, prompts"
    )
    stages = {stage.name: stage for stage in recipe.load(str(write(tmp_path, text))).stages}
    assert stages["shown"].env.args == {"letters": "xyz"} and stages["best"].env.args == {"letters": "abcdef"}
    assert stages["shown"].env.path == stages["best"].env.path and stages["rl"].env is None


ARMS = """name: arms
model: {family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 224, max_positions: 64}
env: {kind: worlds, tags: [OpenSokoban], fmt: answer, max_turns: 2}
stages:
- {kind: start, name: start}
- {kind: collect, name: play, prompts: 4, env: PLAY}
- {kind: sft, name: sft, data: play, init: start, sequences_per_step: 2, steps: 1, optimizer: {lr: 1e-3}}
- {kind: eval, name: eval, arms: [{name: before, model: start}, {name: after, model: sft}], n: 2, max_new_tokens: 4}
"""  # noqa: E501


def test_an_arm_that_is_judged_by_other_rules_is_told_of(tmp_path: Path) -> None:
    """How a model is asked may differ between arms; what its episodes are paid for is said, in check and in the run."""
    asked = recipe.load(str(write(tmp_path, ARMS.replace("PLAY", "{fmt: think, random_actions: 1}"))))
    assert [*find_warnings(asked)] == []
    assert met_by(asked.stages[-1].arms[1], asked.stages[-1], asked).fmt == "think"
    paid = recipe.load(str(write(tmp_path, ARMS.replace("PLAY", "{max_turns: 4, format_penalty: -1.0}"))))
    ((where, text),) = find_warnings(paid)
    assert where == "stages.eval.arms"
    assert text.startswith("'after' is judged as it was trained, with max_turns = 4 (not 2), format_penalty = -1.0")
    found = [(check.level, check.what) for check in look(paid, tmp_path / "run")]
    assert ("warn", "stages.eval.arms") in found and not [what for level, what in found if level == "fail"]
    chosen = ARMS.replace("PLAY", "{max_turns: 4}").replace("model: sft}", "model: sft, env: {max_turns: 4}}")
    assert [*find_warnings(recipe.load(str(write(tmp_path, chosen))))] == []  # the arm says so


def test_arms_of_one_model_keep_their_episodes_apart(tmp_path: Path) -> None:
    text = ARMS.replace("PLAY", "{}").replace(
        "model: sft}", "model: sft}, {name: three, model: sft, env: {max_turns: 1}}"
    )
    stage = recipe.load(str(write(tmp_path, text))).stages[-1]
    assert [evaluation.kept_as(arm, stage) for arm in stage.arms] == ["start", "sft.1", "sft.2"]


def test_an_arm_between_two_environments_is_refused(tmp_path: Path) -> None:
    own = ARMS.replace("kind: eval, name: eval,", "kind: eval, name: eval, env: {test_seed: 5},")
    between = recipe.load(str(write(tmp_path, own.replace("PLAY", "{fmt: think}"))))
    with pytest.raises(
        ConfigError, match=r"eval.arms: 'after' has no env, .* differs from this stage's in fmt, test_seed"
    ):
        require_clear(between.stages[-1], between)
    (failed,) = [check for check in look(between, tmp_path / "run") if check.level == "fail"]
    assert "give the arm the env to play in" in failed.text
    clear = own.replace("PLAY", "{fmt: think}").replace("model: sft}", "model: sft, env: {fmt: think, test_seed: 5}}")
    loaded = recipe.load(str(write(tmp_path, clear)))
    require_clear(loaded.stages[-1], loaded)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    other = ARMS.replace("PLAY", f"{{kind: data, train: {tmp_path}/rows.jsonl}}")
    mixed = recipe.load(str(write(tmp_path, other)))
    with pytest.raises(ConfigError, match=r"differs from this stage's in kind \(data, not worlds\)"):
        require_clear(mixed.stages[-1], mixed)


def test_a_reward_that_cannot_be_loaded_is_found_before_anything_is_sampled(tmp_path: Path) -> None:
    """Whether episodes are chosen by their reward or not."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    (tmp_path / "my.py").write_text("def right(prompt, answer, info):\n    return 1.0\n")
    text = RECIPE[: RECIPE.index("- {kind: collect, name: shown")]
    own = text[text.index("env:") : text.index("stages:")]
    text = text.replace(own, "env: {kind: data, train: rows.jsonl, reward: 'my.py:NAME'}\n")
    for least in ("", ", least_reward: 0.5"):
        asked = text + f"- {{kind: collect, name: play, model: start, prompts: 4, max_new_tokens: 2{least}}}\n"
        config = recipe.load(str(write(tmp_path, asked.replace("NAME", "wrong"))))
        with pytest.raises(ConfigError, match=r"env.reward: .*my.py.*wrong"):
            collect.check(config.stages[-1], alone(config, tmp_path / "run"))
        config = recipe.load(str(write(tmp_path, asked.replace("NAME", "right"))))
        collect.check(config.stages[-1], alone(config, tmp_path / "run"))


GATED = """
name: gated
seed: 3
ranks: 2
parallel: {tensor: 2}
model: {family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 64, vocab: 224,
  max_positions: 64, tied: true, init_std: 0.1}
env: {kind: worlds, tags: [OpenSokoban], fmt: answer, prompt: bare, window: 1, max_turns: 2, actions_per_turn: 1}
stages:
- {kind: start, name: start}
- {kind: collect, name: selfplay, model: start, prompts: 8, max_new_tokens: 8, drift_gate: 1.0e-12}
"""


@in_turn("foreign sampler")
def test_a_sampler_that_is_not_the_model_stops_a_collect_stage(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GATED)  # a gate so narrow that rounding is over it
    command = [sys.executable, "-m", "terrella", "train", "recipe.yaml", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 6 and "stage selfplay: sampler and trainer log-probs differ" in done.stderr


SLOW = """
import time
import terrella


class Slow(terrella.Environment):
    def tasks(self, split):
        return list(range(20))

    def play(self, task):
        answer = yield f"say {task}"
        time.sleep(0.3)
        return float(answer == "zz")
"""


def stopped_in(run: Path, stage: str, recipe: Path, folder: str) -> tuple[list[str], list[Path]]:
    """The command of a run on two ranks whose second alone was asked to stop, once both had sampled in a stage; and
    what they sampled, by rank.
    """
    (run.parent / "world.py").write_text(SLOW)
    command = [sys.executable, "-m", "terrella", "train", str(recipe), "--run", str(run)]
    sampled = [run / "stages" / stage / "journal" / folder.format(rank) for rank in (0, 1)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not all(path.exists() and path.stat().st_size for path in sampled):
            time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        second = next(int(pid) for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(second, signal.SIGUSR1)
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 75 and not (run / "stages" / f"{stage}.json").exists(), error
    return command, sampled


def test_a_stop_is_heard_between_parts_of_a_collect_stage_and_rounds_of_an_evaluation(tmp_path: Path) -> None:
    """By one of two ranks alone: both stop, and nothing that was sampled is sampled again."""
    own = f'{{kind: "{CASES}/own_task.py:Echo", letters: abcdef}}'
    text = RECIPE[: RECIPE.index("- {kind: collect, name: shown")].replace(own, "{kind: 'world.py:Slow'}\nranks: 2")
    text += "- {kind: collect, name: play, model: start, prompts: 20, prompts_at_once: 1, max_new_tokens: 2}\n"
    text += "- {kind: eval, name: eval, models: [start], temperatures: [0, 1], samples: 1, n: 10, max_new_tokens: 2}\n"
    path, run = write(tmp_path, text), tmp_path / "run"
    _, sampled = stopped_in(run, "play", path, "samples-00000000-{}.jsonl")
    before = [path.read_text().splitlines() for path in sampled]
    assert [len(lines) for lines in before] == [10, len(before[1])] and 0 < len(before[1]) < 10

    command, answered = stopped_in(run, "eval", path, "start-t0-test/samples-00000001-{}.jsonl")
    after = [path.read_text().splitlines() for path in sampled]
    assert [len(lines) for lines in after] == [10, 10] and after[1][: len(before[1])] == before[1]
    assert json.loads((run / "stages" / "play.json").read_text())["trajectories"] == 20

    journal = run / "stages" / "eval" / "journal"
    assert [place.name for place in journal.iterdir()] == ["start-t0-test"]
    for path in answered:  # the next start believes other answers, as it reads them here
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            del row["sum"]
            row |= {"ids": ByteTokenizer().encode("zz"), "logprobs": [-1.0, -1.0], "finish": "length"}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not journal.exists(), done.stderr
    table = json.loads((run / "results" / "eval.json").read_text())
    cells = next(row["cells"] for row in table["rows"] if row["name"] == "start")
    assert [(cell["value"], cell["n"]) for cell in cells] == [(1.0, 10), (0.0, 10)]


FAULTY = """
import terrella


class Broken(terrella.Environment):
    def tasks(self, split):
        return list(range(4))

    def play(self, task):
        yield "say something"
        if task:
            raise OSError("the world is gone")
        return 1.0
"""


def test_a_collect_stage_stops_where_too_few_episodes_are_valid(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(FAULTY)
    text = RECIPE[: RECIPE.index("- {kind: collect, name: shown")].replace(
        f"{CASES}/own_task.py:Echo", "world.py:Broken"
    )
    text = text.replace(", letters: abcdef", "")
    (tmp_path / "recipe.yaml").write_text(
        text + "- {kind: collect, name: play, model: start, prompts: 4, max_new_tokens: 2}\n"
    )
    command = [sys.executable, "-m", "terrella", "train", "recipe.yaml", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 9, done.stderr
    assert "stage play: 3 of 4 episodes are Invalid, above rollouts.max_invalid_share = 0.25" in done.stderr
    assert "the world is gone" in done.stderr
    command[-1:] = ["parts", "--set", "stages.play.prompts_at_once=2", "--set", "stages.play.prompts=40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 9 and "stage play: 12 of 16 episodes are Invalid" in done.stderr, done.stderr
