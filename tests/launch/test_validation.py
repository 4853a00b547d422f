"""The cut a stage validates on: never trained on, and made only where it is asked for; replays find the journals of
a run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import recipe as recipes
from terrella.launch.commands.train import replaying
from terrella.launch.settings.base import OnPolicy
from terrella.launch.stages.common import split_cut
from terrella.rl.rollout.config import Rollouts, Validation, Vllm
from terrella.rl.text_games.splits import RatioSampler
from terrella.tests.sampling import in_turn


def test_the_cut_and_what_is_trained_on_share_nothing() -> None:
    items = list(range(100))
    assert split_cut(items, Validation(), "rlvr") == (items, [])
    trained, cut = split_cut(items, Validation(every=5, prompts=30), "rlvr")
    assert len(cut) == 30 and not set(cut) & set(trained) and sorted(trained + cut) == items
    with pytest.raises(ConfigError, match=r"rlvr.rollouts.validation.prompts = 100 leaves nothing"):
        split_cut(items, Validation(every=1, prompts=100), "rlvr")


def test_a_stream_never_gives_rows_of_the_cut() -> None:
    gold = [i % 3 == 0 for i in range(90)]
    cut = set(range(0, 90, 7))
    stream = RatioSampler(gold, ratio=1.0, seed=1, without=cut)
    seen = {stream[place] for place in range(20 * len(stream))}
    assert not seen & cut and seen == set(range(90)) - cut


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Validation(every=-1), "every"),
        (lambda: Vllm(colocated=True, tensor=2), "colocated"),
        (lambda: Vllm(sleep=1), "sleep"),
        (lambda: Vllm(urls=["http://node6:8000", "node7:8000"]), "urls: 'node7:8000' is no address"),
        (lambda: Vllm(urls=["https://node7:8000"]), "urls: "),  # connections are plain
        (lambda: Vllm(colocated=True, adapters_only=True, sleep=2), "sleep"),
        (lambda: Rollouts(sampler=Vllm(colocated=True), ahead=1), "takes turns"),
    ],
)
def test_settings_that_cannot_work_are_refused(made, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_replay_points_every_sampling_stage_to_its_journal(tmp_path) -> None:
    config = recipes.load("sokoban-tiny", ())
    (stage,) = [s for s in config.stages if isinstance(s, OnPolicy)]
    with pytest.raises(ConfigError, match="keep_samples"):
        replaying(config, tmp_path)
    journal = tmp_path / "stages" / stage.name / "journal"
    journal.mkdir(parents=True)
    (journal / "samples-00000000-0.jsonl").write_text("")
    (found,) = [s for s in replaying(config, tmp_path).stages if isinstance(s, OnPolicy)]
    assert found.rollouts.replay == str(journal) and found.steps == stage.steps


TASK = """
from terrella.rl.environment import Environment


class Task(Environment):
    def tasks(self, split):
        return [{"split": split, "number": n} for n in range(8)]

    def play(self, task):
        if task["split"] == "test" and task["number"] % 2:
            raise OSError("the world is not there")
        answer = yield str(task["number"])
        return float(answer[:1].isdigit())
"""
RECIPE = """
name: faults
model: {family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 64, vocab: 259,
  max_positions: 64, tied: true}
env: {kind: "task.py:Task"}
stages:
- {kind: start, name: start}
- {kind: rl, name: rl, init: start, algorithm: {kind: grpo}, prompts_per_step: 2, samples_per_prompt: 2, steps: 2,
  max_new_tokens: 4, optimizer: {lr: 1e-3}, validation: {every: 1, prompts: 8, samples: 1}}
"""


@in_turn("failed validation")
def test_validation_that_mostly_fails_stops_by_name(tmp_path: Path) -> None:
    """Half of the held-out tasks have a fault: a mean over the others would pass for one over all."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "faults.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "terrella", "train", "faults.yaml", "--run", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    words = "validation after 1 steps: 4 of 8 samples are Invalid, above rollouts.max_invalid_share = 0.25"
    assert words in done.stderr and "the world is not there" in done.stderr, done.stderr[-2000:]
