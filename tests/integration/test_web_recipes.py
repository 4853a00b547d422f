"""The web stages that act in the world, by the command line: imitation, on-policy RL, planning, a world model of
pages.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
RECIPE = """
name: web-small
world: language
model: {family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 420, max_positions: 4096, tied: true}
env: {kind: web-site, tag: WebClicks, test_tag: WebClicksTest, templates: [407], max_prompt_tokens: 96, max_verdict_tokens: 96,
  pad_prompts_to: 96, at_once: 3}
stages:
- {kind: start, name: start}
- {kind: collect, name: demos, prompts: 4, validation_share: 0.0}
- {kind: sft, name: sft, data: demos, init: start, optimizer: {lr: 1e-2}, sequences_per_step: 4, epochs: 40}
- {kind: rl, name: grpo, init: sft, env: {data: demos}, algorithm: {kind: grpo}, prompts_per_step: 2, samples_per_prompt: 2, steps: 2,
   max_new_tokens: 8, optimizer: {lr: 1e-3}}
- {kind: collect, name: pages, prompts: 2, env: {kind: web-page, data: pages, sites: true, others: 1, own_tokenizer: true}}
- {kind: sft, name: world, env: {data: pages, non_gold_ratio: null}, steps: 1, sequences_per_step: 2, optimizer: {lr: 1e-3}}
- kind: web-plan
  name: plan
  actor: grpo
  n: 2
  max_new_tokens: 8
  headline: perfect
  arms:
  - {name: one, samples: 1, branching: 1}
  - {name: perfect, samples: 4, world: "true", stop: valued, horizon: 2}
  - {name: wrong, samples: 4, world: corrupted, wrong: 0.5}
  - {name: trained, samples: 4, branching: 2, world: model, model: world, max_new_tokens: 16, stop: valued}
  - {name: scored, samples: 2, branching: 2, world: "true", value: sampled, budget: 2, stop: valued}
"""  # noqa: E501


def test_web_stages_run_and_tell_what_happened(tmp_path: Path) -> None:
    recipe, run = tmp_path / "small.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-m", "terrella", "train", str(recipe), "--run", str(run)],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    outcome = {p.stem: json.loads(p.read_text()) for p in (run / "stages").glob("*.json")}
    assert outcome["grpo"]["episodes"] == 8 and outcome["grpo"]["actions"] >= 8 and outcome["grpo"]["steps"] == 2
    plan = outcome["plan"]
    assert plan["tasks"] == 2 and plan["invalid"] == 0 and plan["perfect"]["checked"] == plan["perfect"]["exact"]
    assert (
        all(plan[arm]["imagined"] > 0 for arm in ("perfect", "wrong", "trained", "scored"))
        and plan["perfect"]["checked"] > 0
    )
    assert plan["trained"]["unreadable"] > 0  # one step of training writes no list of changes
    table = json.loads((run / "results" / "plan.json").read_text())
    assert [row["kind"] for row in table["rows"]] == ["baseline", *["model"] * 5, "ceiling"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("web/success" in json.dumps(line) for line in steps)
