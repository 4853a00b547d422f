"""The tiny SPA recipe with every number turned down: adapters, a critic, bi-level GAE, validation, a budget. Helper
module, not a test.
"""

import subprocess
import sys
from pathlib import Path

PATIENCE_S = 900.0  # of a busy machine; a free one needs a minute
AGENT = [
    "model.layers=1",
    "model.hidden=32",
    "model.head_dim=8",
    "model.ffn=32",
    "stages.1.prompts=24",
    "stages.2.epochs=6",
    "stages.3.prompts=4",
    "stages.3.env.only_tagged=false",
    "stages.4.prompts=4",
    "stages.4.env.only_tagged=false",
    "stages.5.epochs=0.5",
    "stages.6.epochs=0.5",
    "stages.7.epochs=1",
    *(f"stages.{i}.prompts_per_step=2" for i in (8, 9, 10)),
    *(f"stages.{i}.checkpoint_every=2" for i in (8, 9, 10)),
    "stages.8.steps=2",
    "stages.8.lora={rank: 4, alpha: 4}",
    "stages.8.env.prediction_reward=0.5",
    "stages.9.steps=3",
    "stages.9.algorithm={kind: starpo-s, keep: 0.5}",
    "stages.9.critic={lr: 1e-3}",
    "stages.10.steps=3",
    "stages.10.algorithm={kind: ppo, bi_level: true, turn_rewards: true, entropy_coef: 0.01}",
    "stages.10.critic={lr: 1e-3}",
    "stages.10.validation={every: 2, prompts: 2, samples: 2}",
    "stages.11.n=4",
]


def command(run: Path, recipe: str = "spa-sokoban-tiny", *more: str) -> list[str]:
    """The command line of the turned-down run."""
    sets = [part for override in (*AGENT, *more) for part in ("--set", override)]
    return [sys.executable, "-m", "terrella", "train", recipe, "--run", str(run), *sets]


def train(
    run: Path, recipe: str = "spa-sokoban-tiny", *more: str, timeout: float = PATIENCE_S
) -> subprocess.CompletedProcess:
    """Run it to its end."""
    return subprocess.run(command(run, recipe, *more), capture_output=True, text=True, timeout=timeout)
