"""Environments of other projects in one recipe: some steps of RL on each, and a hostile one costs Invalid samples,
not the run.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.core.ports import free_port
from terrella.tests.golden.play import ALONE
from terrella.tests.rl.exchange.extras import REQUIRED
from terrella.tests.sampling import in_turn

if not REQUIRED:
    pytest.importorskip("gymnasium", reason="the extra worlds is not installed")
    pytest.importorskip("reasoning_gym", reason="the extra worlds is not installed")
OPENENV = importlib.util.find_spec("openenv") is not None
if OPENENV:
    from terrella.tests.rl.exchange.test_openenv import servers

    __all__ = ["servers"]  # a fixture
pytestmark = pytest.mark.integration  # of the environment with the extra worlds
SIZES = "{layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 48, vocab: 260, max_positions: 2048}"
FEW = "max_actions: 3, train_tasks: 8, test_tasks: 4"
STAGE = """
- kind: rl
  name: {name}
  init: start
  env: {env}
  algorithm: {{kind: grpo}}
  prompts_per_step: {prompts}
  samples_per_prompt: 2
  steps: {steps}
  max_new_tokens: 4
  optimizer: {{lr: 1e-3}}
  rollouts: {{max_invalid_share: 0.9}}
"""


def train(known: dict[str, str], tmp_path: Path) -> dict[str, int]:
    """Two steps on each of these environments, of the hostile one a single one, and an evaluation on the first; how
    many samples of each were Invalid.
    """
    sizes = {"hostile": {"prompts": 8, "steps": 1}}
    stages = [
        STAGE.format(name=name, env=env, **sizes.get(name, {"prompts": 2, "steps": 2})) for name, env in known.items()
    ]
    evaluated = next(iter(known.values()))
    evaluate = f"- {{kind: eval, name: evaluate, models: [start], max_new_tokens: 4, n: 2, env: {evaluated}}}\n"
    text = f"name: exchange\nmodel: {SIZES}\nstages:\n- {{kind: start, name: start}}{''.join(stages)}{evaluate}"
    (tmp_path / "exchange.yaml").write_text(text)
    (tmp_path / "cases.json").write_text(json.dumps([["exchange", ["exchange.yaml"]]]))
    command = [sys.executable, "-m", "terrella.tests.launch.own_lane", "cases.json"]
    made = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | ALONE | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert json.loads((tmp_path / "cases.errors.json").read_text()) == {}, made.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/exchange/metrics.jsonl").read_text().splitlines()]
    steps = {name: [row for row in rows if row.get("stage") == name] for name in known}
    wanted = {name: sizes.get(name, {"steps": 2})["steps"] for name in known}
    assert {name: len(found) for name, found in steps.items()} == wanted
    result = json.loads((tmp_path / "runs/exchange/results/evaluate.json").read_text())
    assert "random" in [row["name"] for row in result["rows"]]
    return {name: sum(row["invalid"] for row in found) for name, found in steps.items()}


@in_turn("exchange")
def test_environments_of_other_projects_train(tmp_path: Path) -> None:
    known = {
        "cartpole": f"{{kind: 'gymnasium:CartPole-v1', actions: [left, right], {FEW}}}",
        "frozenlake": f"{{kind: 'gymnasium:FrozenLake-v1', render: ansi, {FEW}}}",
        "hostile": f"{{kind: 'gymnasium:terrella.tests.rl.exchange.hostile:Hostile-v0', deadline_s: 5, {FEW}}}",
    }
    tasks = ("leg_counting", "chain_sum", "spell_backward")
    known |= {task: f"{{kind: 'reasoning-gym:{task}', train_tasks: 16, test_tasks: 8}}" for task in tasks}
    invalid = train(known, tmp_path)
    assert invalid.pop("hostile") == 6 and set(invalid.values()) == {0}, invalid


@pytest.mark.skipif(not OPENENV, reason="the extra openenv is not installed")
def test_three_openenv_worlds_train(servers: dict[str, str], tmp_path: Path) -> None:
    assert len(servers) == 3
    known = {f"openenv-{name}": f"{{kind: 'openenv:{url}', {FEW}}}" for name, url in servers.items()}
    assert set(train(known, tmp_path).values()) == {0}
