"""Stages that sample and do not train: a sampler that lost its weights beside a model-parallel trainer is sent them
again, and nothing else changes."""

import json
from pathlib import Path
from typing import Any

from terrella.data.shards import ShardSet
from terrella.launch import recipe
from terrella.rl.journal import Journal
from terrella.tests.parallel.loss_jobs import run_with_losses
from terrella.tests.sampling import in_turn

PLAYED = """
name: played
ranks: 2
parallel: {tensor: 2}
model: {family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 64, vocab: 224,
  max_positions: 64, init_std: 0.1}
env: {kind: worlds, tags: [OpenSokoban], fmt: answer, prompt: bare, window: 1, max_turns: 2, actions_per_turn: 1}
stages:
- {kind: start, name: start}
- {kind: collect, name: selfplay, model: start, prompts: 8, prompts_at_once: 4, max_new_tokens: 8}
- {kind: eval, name: eval, models: [start], temperatures: [1.0], n: 4, max_new_tokens: 8}
"""
PLANNED = """
name: planned
ranks: 2
parallel: {tensor: 2}
model: {family: llama, layers: 1, hidden: 64, heads: 2, kv_heads: 2, head_dim: 32, ffn: 128, vocab: 420,
  max_positions: 1024, init_std: 0.08}
env: {kind: web-site, tag: WebClicks, test_tag: WebClicksTest, templates: [407], max_prompt_tokens: 96,
  max_verdict_tokens: 96, pad_prompts_to: 96}
stages:
- {kind: start, name: start}
- {kind: collect, name: demos, prompts: 6, validation_share: 0}
- {kind: sft, name: sft, data: demos, init: start, sequences_per_step: 18, steps: 12, optimizer: {lr: 1e-2}}
- kind: collect
  name: pages
  env: {kind: web-page, data: pages, sites: true, pad_prompts_to: 1, own_tokenizer: true, non_gold_ratio: null}
  prompts: 2
- {kind: sft, name: world, env: {data: pages}, steps: 1, sequences_per_step: 2, optimizer: {lr: 1e-3}}
- kind: web-plan
  name: plan
  actor: sft
  n: 2
  max_new_tokens: 8
  arms: [{name: planner, samples: 4, world: model, model: world, stop: valued, max_new_tokens: 8}]
"""


def load(folder: Path, text: str) -> recipe.Recipe:
    (folder / "recipe.yaml").write_text(text)
    return recipe.load(str(folder / "recipe.yaml"))


def left_by(run: Path, *stages: str) -> list[Any]:
    outcomes = [json.loads((run / "stages" / f"{name}.json").read_text()) for name in stages]
    return [{key: value for key, value in outcome.items() if not key.startswith("time/")} for outcome in outcomes]


def tables(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run / "results").iterdir()}


def test_collect_and_eval_send_lost_weights_again(tmp_path: Path) -> None:
    """In the second turn of the second part that is collected, and in the second turn of the evaluation."""
    config = load(tmp_path, PLAYED)
    calm, lost = tmp_path / "calm", tmp_path / "lost"
    assert run_with_losses(config, calm, {}) == [1, 1]
    assert run_with_losses(config, lost, {0: 4, 1: 2}) == [2, 2]
    assert left_by(lost, "selfplay", "eval") == left_by(calm, "selfplay", "eval")
    assert tables(lost) == tables(calm) != {}
    lessons = [
        [sample["tokens.npy"].tolist() for sample in ShardSet(run / "stages" / "selfplay" / "train")]
        for run in (calm, lost)
    ]
    assert lessons[0] and lessons[0] == lessons[1]
    samples = [Journal(run / "stages" / "selfplay" / "journal").samples() for run in (calm, lost)]
    assert samples[0] == samples[1]


@in_turn("planner's weights")
def test_a_planner_sends_lost_weights_again(tmp_path: Path) -> None:
    """Those of the actor in its second call, then those of its world model, which meanwhile counted an answer."""
    config = load(tmp_path, PLANNED)
    calm, lost = tmp_path / "calm", tmp_path / "lost"
    assert run_with_losses(config, calm, {}) == [1, 1]
    assert run_with_losses(config, lost, {0: 2, 1: 2}) == [3, 3]  # both, whichever lost them
    (outcome,) = left_by(lost, "plan")
    assert [outcome] == left_by(calm, "plan") and outcome["planner"]["unreadable"] > 0
    assert tables(lost) == tables(calm) != {}
