"""Trains a recipe with a GRPO and a PPO stage in this process and prints how often its advantage kernels were launched.

Run by test_advantage_recipe.py. On a GPU everything is as it always is. Without one the first argument `interpreted`
sends the advantages, and nothing else, through the Triton kernels in Triton's interpreter; `plain` leaves the CPU's own
way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter, jit

from terrella import kernels
from terrella.core.metrics import MetricsFile
from terrella.launch import supervise, worker
from terrella.launch.cli import main
from terrella.launch.commands import train
from terrella.rl.algorithms import common

RECIPE = """\
name: advantages
world: language
seed: 0
ranks: 1
model: {family: llama, layers: 1, hidden: 32, heads: 4, kv_heads: 4, head_dim: 8, ffn: 32, vocab: 224,
        max_positions: 64, tied: true, init_std: 0.1}
env: {kind: worlds, tags: [OpenSokoban], fmt: state, prompt: bare, window: 1, max_turns: 2, format_penalty: -1.0}
stages:
- {kind: start, name: start}
- {kind: rl, name: grpo, init: start,
   prompts_per_step: 2, samples_per_prompt: 4, steps: 2, max_new_tokens: 4, optimizer: {lr: 1e-2},
   algorithm: {kind: grpo, entropy_coef: 0.01, kl_coef: 0.1, kl_in: reward}}  # from step 2 on the KL makes a group's rewards differ
- {kind: rl, name: ppo, init: start, prompts_per_step: 2, samples_per_prompt: 4, steps: 2, max_new_tokens: 4,
   optimizer: {lr: 1e-2}, critic: {lr: 1e-3}, algorithm: {kind: ppo, bi_level: true, turn_rewards: true}}
"""  # noqa: E501
counted: Counter[str] = Counter()


def counting(run: Any) -> Any:
    def counted_run(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn.__module__.endswith("triton.advantage"):
            counted[self.fn.__name__] += 1
        return run(self, *args, **options)

    return counted_run


def interpret_advantages() -> None:
    """Only the advantages take their kernels, in fp32 as on a GPU; the model would be too slow in the interpreter."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{kernels.__name__}.") and hasattr(module, "use_triton"):
            taken = name.endswith(".advantage")
            setattr(module, "use_triton", lambda tensor, taken=taken: taken)
    join = common.join_rows

    def joined(arrays: Any, device: torch.device) -> torch.Tensor:
        rows = join(arrays, device)
        return rows.float() if rows.is_floating_point() else rows

    common.join_rows = joined


def in_this_process(run: Any, span: Any, until: str | None, _kept: bool) -> int:
    os.environ |= supervise._environment(run, span, 0)
    return worker.run_stages(run.path, 0, span.world, until)


if __name__ == "__main__":
    how, folder = sys.argv[1], Path(sys.argv[2])
    for kind in (jit.JITFunction, interpreter.InterpretedFunction):
        kind.run = counting(kind.run)
    if how == "interpreted":
        interpret_advantages()
    train.run_workers = in_this_process
    folder.mkdir()
    (folder / "advantages.yaml").write_text(RECIPE)
    run = folder / "run"
    with contextlib.suppress(SystemExit):
        main(["train", str(folder / "advantages.yaml"), "--run", str(run)])
    rows = [row for row in MetricsFile(run / "metrics.jsonl").rows() if row.get("stage") in ("grpo", "ppo")]
    print(json.dumps({"launched": counted, "rows": rows}))
