"""RLVR for a world model: an answer is paid where it says what followed, and a recipe trains an agent in the world that
was trained so, watching how much of its success is imagined.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrella.core.errors import ConfigError
from terrella.data.schema import TEXT
from terrella.data.shards import ShardWriter
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch import recipe
from terrella.launch.commands.check_recipe import look
from terrella.rl.agents.config import TransitionsEnvironment, WorldsEnvironment
from terrella.rl.agents.dynamics import LOST, ON, WON, answer, read
from terrella.rl.agents.prediction import PredictionEpisode, Transition, TransitionTasks, compared
from terrella.rl.agents.tasks import WorldTasks
from terrella.rl.language_tasks import Made
from terrella.rl.rollout.sampler import Sample
from terrella.tests.sampling import in_turn

TOKENIZER = ByteTokenizer()
WORLDS = WorldsEnvironment(kind="worlds", tags=["OpenSokoban"], teaches="transitions")


@pytest.mark.parametrize(
    ("said", "cells"),
    [
        (answer("#_P", -0.1, ON), [1, 1, 1, None, 0]),
        (answer("#P_", -0.1, ON), [0, 0, 1, None, 0]),
        (answer("#_P", 10.0, WON), [0, 1, 0, None, 1]),
        (answer("#_P", -0.1, LOST), [0, 1, 0, None, 0]),
        ("#_P", [0, 0, 0, None, 0]),
        ("", [0, 0, 0, None, 0]),
    ],
)
def test_only_what_followed_is_paid(said: str, cells: list[float | None]) -> None:
    task = Transition(tuple(TOKENIZER.encode("#P_\nRight\n")), "#P_", answer("#_P", -0.1, ON))
    assert compared(task, read(said)) == cells
    episode = PredictionEpisode(task, 0, 0, TOKENIZER)
    ids = (*TOKENIZER.encode(said), TOKENIZER.eos_id)
    assert episode.context() == task.asked
    episode.receive(Sample(ids, (0.0,) * len(ids), "stop", 0))
    assert episode.context() is None
    rewards, reward, info = episode.score()
    assert rewards == [reward] == [cells[0]] and info == {"state": cells[1], "outcome": cells[2]}


def test_a_success_that_comes_is_found_or_missed() -> None:
    task = Transition((), "#P_", answer("#_P", 10.9, WON))
    assert compared(task, read(answer("#_P", 10.9, WON))) == [1, 1, 1, 1, None]
    assert compared(task, read(answer("#_P", -0.1, ON))) == [0, 1, 0, 0, None]


# The world model sees successes alone, so it foretells success whatever the agent does.
RECIPE = """
name: foretelling
seed: 3
ranks: 2
parallel: {{tensor: 2}}
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 64, vocab: 224,
  max_positions: 64, tied: true, init_std: 0.1}}
env: {{kind: worlds, tags: [OpenSokoban], fmt: answer, prompt: bare, window: 1, max_turns: 1, actions_per_turn: 1,
  random_actions: 1}}
stages:
- {{kind: start, name: start}}
- {{kind: collect, name: play, env: {{{teaches}}}, prompts: 600, least_reward: 1.0}}
- {{kind: sft, name: world, data: play, init: start, steps: 60, sequences_per_step: 8,
  optimizer: {{lr: 1e-2, clip_grad: 1.0}}}}
- {{kind: rl, name: rlvr, init: world, env: {{kind: transitions, data: play}}, algorithm: {{kind: grpo}},
  prompts_per_step: 4, samples_per_prompt: 4, steps: 2, max_new_tokens: 32, optimizer: {{lr: 1e-4}},
  validation: {{every: 2, prompts: 4, samples: 1}}}}
- {{kind: sft, name: longer, data: play, init: world, match_tokens_of: rlvr, sequences_per_step: 8,
  optimizer: {{lr: 1e-4}}}}
- {{kind: collect, name: others, env: {{teaches: transitions, first_seed: 90000}}, prompts: 30, validation_share: 0}}
- {{kind: eval, name: models, env: {{kind: transitions, data: play, test: others}}, models: [world, rlvr, longer],
  before: world, after: rlvr, control: longer, n: 30, max_new_tokens: 32, temperatures: [1.0, 0.0]}}
- {{kind: collect, name: format, prompts: 40}}
- {{kind: sft, name: agent, data: format, init: start, steps: 30, sequences_per_step: 8,
  optimizer: {{lr: 1e-2, clip_grad: 1.0}}}}
- {{kind: rl, name: rl, init: agent, env: {{imagined_by: rlvr}}, algorithm: {{kind: grpo}}, prompts_per_step: 2,
  samples_per_prompt: 4, steps: 4, max_new_tokens: 32, optimizer: {{lr: 1e-3}},
  validation: {{every: 2, prompts: 8, samples: 2, on_gap: stop}}}}
- {{kind: eval, name: evaluate, arms: [{{name: agent, model: rl}}], n: 4, max_new_tokens: 32}}
"""


def train(folder: Path, teaches: str, *options: str) -> subprocess.CompletedProcess:
    (folder / "recipe.yaml").write_text(RECIPE.format(teaches=teaches))
    command = [sys.executable, "-m", "terrella", "train", "recipe.yaml", "--run", "run", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith("time/")}


@in_turn("exploited")
def test_a_world_is_trained_by_rlvr_and_an_agent_that_exploits_it_is_stopped(tmp_path: Path) -> None:
    done = train(tmp_path, "teaches: transitions")
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = {path.stem: json.loads(path.read_text()) for path in (run / "stages").glob("*.json")}
    taught = [row for row in rows if row["stage"] == "rlvr"]
    assert len(taught) == 2 and "validation/mean" in taught[-1]
    assert all(1 >= row["score/state"] >= row["reward/mean"] > 0 for row in taught)
    assert max(row["grad_norm"] for row in taught) > 0
    # as many gradient tokens, whole steps of imitation
    assert kept["rlvr"]["tokens"] <= kept["longer"]["tokens"] < kept["rlvr"]["tokens"] + 8 * 32
    assert kept["models"]["rlvr/t0/false successes"]["value"] > 0.5
    assert {"rlvr minus world/all exact, greedy", "rlvr minus longer/all exact, temperature 1"} <= kept["models"].keys()
    table = json.loads((run / "results" / "models-test.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["nothing changes", "world", "rlvr", "longer"]
    assert table["lower"] == ["false successes"]
    # the agent succeeds in its imagination alone: two steps, and no more
    steps = [row for row in rows if row["stage"] == "rl"]
    last = steps[-1]
    assert len(steps) == 2 == kept["rl"]["steps"] and kept["rl"]["exploited"] == 1 == last["alarm/exploitation"]
    gap = last["validation/imagined/pass@1"] - last["validation/pass@1"]
    assert last["validation/gap"] == pytest.approx(gap) and gap > 0.3
    assert "exploits" in (run / "results" / "rl-gap.json").read_text()
    assert kept["evaluate"]["agent/actions"] == kept["play"]["actions"] + kept["format"]["actions"]
    why = "rl: ended after 2 of 4 steps: validation.on_gap is stop, and the gap was above max_gap = 0.3"
    assert why in done.stdout
    # killed after the checkpoint of the last step, before the stage's outcome: it does not train on
    for left in ("stages/rl.json", "stages/evaluate.json", "summary.json"):
        (run / left).unlink(missing_ok=True)
    shutil.rmtree(run / "stages" / "evaluate")
    again = train(tmp_path, "teaches: transitions")
    assert again.returncode == 0 and why in again.stdout, again.stderr[-2000:]
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [timeless(row) for row in found] == [timeless(row) for row in rows]
    stages = {path.stem: timeless(json.loads(path.read_text())) for path in (run / "stages").glob("*.json")}
    assert stages == {name: timeless(outcome) for name, outcome in kept.items()}
    # and is not lengthened either
    longer = train(tmp_path, "teaches: transitions", "--steps", "rl=6")
    assert longer.returncode == 2 and "'rl' of run was ended at step 2 by validation.on_gap = stop" in longer.stderr


@in_turn("teaching play")
def test_play_that_teaches_answers_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, "random_actions: 1")
    assert done.returncode == 2 and "stage 'play' needs env: {teaches: transitions}" in done.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "stages.rlvr.env.data=start",
            "env.data: stage 'start' needs env: {teaches: transitions}, and the kind collect",
        ),
        (
            "stages.play.validation_share=0",
            "env.test: stage 'play' has validation_share: 0; raise its validation_share",
        ),
        (
            "stages.rlvr.validation.on_gap=stop",
            "stages: rlvr.validation.on_gap: only RL in an imagined world has a gap",
        ),
    ],
)
def test_what_cannot_be_foretold_is_refused_before_the_start(tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(teaches="teaches: transitions"))
    config = recipe.load(str(tmp_path / "recipe.yaml"), (setting, "ranks=1", "parallel.tensor=1"))
    found = [check.text for check in look(config, tmp_path / "run") if check.level == "fail"]
    assert [text[: len(message)] for text in found] == [message]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages.rl.env.imagined_by=play", "'rl': env.imagined_by: 'play' of kind collect leaves no model"),
        ("stages.rl.init=models", "'rl': init: 'models' of kind eval leaves no model"),
        ("stages.rl.validation.max_gap=1", "max_gap: 1.0 must be below 1"),
        ("stages.rl.validation.max_gap=-0.1", "max_gap = -0.1 must not be negative"),
        ("stages.rl.validation.on_gap=halt", "on_gap = 'halt' must be one of 'warn', 'stop'"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(teaches="teaches: transitions"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        recipe.load(str(tmp_path / "recipe.yaml"), (setting,))


@pytest.mark.parametrize(
    ("tag", "still"), [("OpenSokoban", None), ("FeedFish", "{'modified': [], 'removed': [], 'score': {}}")]
)
def test_where_nothing_changes_the_world_says_so_in_its_own_way(tmp_path: Path, tag: str, still: str | None) -> None:
    """The baseline of the tables, in worlds that write whole states and in those that write what changes."""
    env = WorldsEnvironment(kind="worlds", tags=[tag], teaches="transitions", fmt="answer", random_actions=1)
    worlds = WorldTasks(env, None, TOKENIZER, None)
    seats = [worlds.episode(worlds.of("train")[i], i, 0) for i in range(4)]
    played = worlds.play(worlds.player(seats), seats, worlds.params(100, 1.0), 0)
    lessons = [lesson for pair in zip(seats, played, strict=True) for lesson in worlds.taught(*pair, 0.0)]
    with ShardWriter(tmp_path / "train", kind=TEXT) as writer:
        for lesson in lessons:
            ids, roles = np.asarray(lesson.sequence.ids, np.int32), np.asarray(lesson.sequence.roles, np.int8)
            writer.write({**lesson.fields, "tokens.npy": ids, "roles.npy": roles})
    made = Made("play", tmp_path, {"kind": "collect", "env": env, "validation_share": 0.2})
    settings = TransitionsEnvironment(kind="transitions", data="play")
    found = TransitionTasks(settings, made, TOKENIZER, None).of("train")
    before = [lesson.fields["states.json"][0] for lesson in lessons]
    assert [task.still for task in found] == ([still] * len(before) if still else before)
    assert [task.truth for task in found] == [lesson.fields["messages.json"][-1]["content"] for lesson in lessons]
    # before the stage has played there is an episode of the random policy to look at
    foreseen = TransitionTasks(settings, replace(made, finished=False), TOKENIZER, None).of("train")
    assert foreseen[0] == found[0]


def test_a_stage_that_taught_nothing_is_named(tmp_path: Path) -> None:
    made = Made("play", tmp_path, {"kind": "collect", "env": None, "validation_share": 0.2}, env=WORLDS)
    tasks = TransitionTasks(TransitionsEnvironment(kind="transitions", data="play"), made, TOKENIZER, None)
    for split, part in (("train", "train"), ("test", "held_out")):
        with pytest.raises(ConfigError, match=f"stage 'play' left no transitions in {tmp_path / part}"):
            tasks.of(split)
