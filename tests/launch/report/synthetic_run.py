"""Makes run directories out of a seed, in the shape that training writes them, for tests of the report and the
terminal view.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def room(rng: random.Random, size: int = 6) -> list[list[str]]:
    """A walled room with a player, a box and a target."""
    grid = [
        ["#" if row in (0, size - 1) or column in (0, size - 1) else "_" for column in range(size)]
        for row in range(size)
    ]
    cells = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    for mark, (row, column) in zip("PXO#", rng.sample(cells, 4), strict=True):
        grid[row][column] = mark
    return grid


def move(grid: list[list[str]], action: str) -> list[list[str]]:
    """The player walks onto free floor, nothing else: enough to make cells change."""
    after = [list(row) for row in grid]
    row, column = next((r, c) for r, line in enumerate(grid) for c, mark in enumerate(line) if mark == "P")
    down, right = MOVES[action]
    if after[row + down][column + right] == "_":
        after[row + down][column + right], after[row][column] = "P", "_"
    return after


def text_of(grid: list[list[str]]) -> str:
    return "\n".join("".join(row) for row in grid)


def trajectory(rng: random.Random, step: int, prompt: int, sample: int, skill: float, turns: int = 4) -> dict[str, Any]:
    """One imagined rollout of `turns` steps; `skill` is the chance that a predicted state is right."""
    grid = room(random.Random(prompt))
    shown = text_of(grid)
    made = []
    for _ in range(turns):
        action = rng.choice(list(MOVES))
        grid = move(grid, action)
        truth = text_of(grid)
        guess = [list(line) for line in truth.split("\n")]
        if rng.random() > skill:
            for _ in range(rng.randint(1, 3)):
                guess[rng.randint(1, 4)][rng.randint(1, 4)] = rng.choice("_PX#O")
        prediction = text_of(guess)
        made.append(
            {
                "prompt": f"state\n{shown}\naction {action}\nnext\n",
                "action": action,
                "prediction": prediction,
                "truth": truth,
                "exact": prediction == truth,
            }
        )
        shown = prediction
    invalid = "world worker timed out after 30 s" if rng.random() < 0.02 else None
    reward = None if invalid else sum(turn["exact"] for turn in made) / turns
    return {
        "step": step,
        "prompt_id": f"room-{prompt}",
        "sample": sample,
        "reward": reward,
        "invalid": invalid,
        "turns": made,
        "tokens": 43 * turns,
    }


def interval(share: float, n: int) -> dict[str, float]:
    half = 1.96 * math.sqrt(max(share * (1 - share), 1e-4) / n)
    return {"value": share, "low": max(0.0, share - half), "high": min(1.0, share + half), "n": n}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def make_run(
    folder: Path,
    seed: int = 0,
    pretrain: int = 300,
    grpo: int = 60,
    prompts: int = 4,
    samples: int = 8,
    finished: bool = True,
) -> Path:
    """Writes a run directory; `finished=False` leaves out results, summary and export."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lr = f"{10 ** -rng.uniform(3, 5):.2e}"
    stages = (
        f"- {{kind: sft, name: pretrain, steps: {pretrain}}}\n- "
        f"{{kind: rl, name: grpo, steps: {grpo}, optimizer: {{lr: {lr}}}}}\n"
    )
    stages += "- {kind: sft, name: control, match_tokens_of: grpo}\n"
    config = f"name: {folder.name}\nenv: {{kind: grid, tag: SimpleSokoban}}\nseed: {seed}\nstages:\n{stages}"
    (folder / "config.yaml").write_text(config)
    versions = {"python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1"}
    write_json(
        folder / "environment.json",
        {
            "versions": versions,
            "git": {"commit": f"{rng.getrandbits(160):040x}", "dirty": False},
            "hardware": {"cpus": 2, "gpus": []},
        },
    )

    lines = []
    for step in range(1, pretrain + 1):
        loss = 2.6 * math.exp(-step / (pretrain / 6)) + 0.09 + rng.gauss(0, 0.012)
        lines.append(
            {
                "stage": "pretrain",
                "step": step,
                "loss": loss,
                "grad_norm": 0.3 + rng.random(),
                "lr": 3e-3 * min(1, step / 20),
                "tokens": 4608 * step,
                "time/step_s": 0.3 + 0.02 * rng.random(),
                "time/tokens_per_s": 15000 + rng.gauss(0, 600),
            }
        )
    skill_of = {}
    for stage in ("grpo", "control"):
        for step in range(1, grpo + 1):
            skill = 0.72 + (0.16 if stage == "grpo" else 0.07) * (1 - math.exp(-step / 25))
            skill_of[stage] = skill
            record = {
                "stage": stage,
                "step": step,
                "grad_norm": 0.2 + 0.1 * rng.random(),
                "lr": 3e-4,
                "tokens": 22000 * step,
                "time/step_s": 2 + rng.random(),
                "time/tokens_per_s": 9000 + rng.gauss(0, 400),
            }
            if stage == "grpo":
                record |= {
                    "loss": rng.gauss(0, 0.01),
                    "reward/mean": skill + rng.gauss(0, 0.03),
                    "reward/std": 0.22 + rng.gauss(0, 0.01),
                    "accuracy/step_1": skill + 0.08,
                    "accuracy/all_4": skill**4,
                    "kl": 0.002 * step / grpo + 1e-5,
                    "entropy": 0.24 - 0.1 * step / grpo,
                    "clip_fraction": 0.02 + 0.01 * rng.random(),
                    "logprob_drift/mean": 2e-7 * (1 + rng.random()),
                    "logprob_drift/max": 2e-6 * (1 + rng.random()),
                    "invalid/count": int(rng.random() < 0.1),
                    "time/rollout_s": 1.2 + 0.2 * rng.random(),
                }
            else:
                record |= {"loss": 0.09 + rng.gauss(0, 0.004)}
            lines.append(record)
            if stage == "grpo" and (step % max(1, grpo // 12) == 0 or step == 1):
                path = folder / "rollouts" / f"grpo-{step}.jsonl"
                path.parent.mkdir(exist_ok=True)
                rows = [
                    trajectory(rng, step, prompt, sample, skill)
                    for prompt in range(prompts)
                    for sample in range(samples)
                ]
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if not finished:
        return folder

    before, after, control = 0.72, skill_of["grpo"], skill_of["control"]
    columns = ["all 4 exact, temperature 1", "all 4 exact, greedy", "1 step exact", "changed cells, 1 step"]
    rows = []
    for name, kind, share in (
        ("copy the state", "baseline", 0.5),
        ("after pre-training", "model", before),
        ("after RLVR", "model", after),
        ("control: same tokens, more pre-training", "control", control),
    ):
        shares = [share**4, min(1, share + 0.04) ** 4, share, share * 0.98 if kind != "baseline" else 0.0]
        rows.append({"name": name, "kind": kind, "cells": [interval(value, 1024) for value in shares]})
    write_json(
        folder / "results" / "final.json",
        {
            "title": "Held-out rooms",
            "columns": columns,
            "rows": rows,
            "note": "Synthetic numbers made from a seed, not a measurement.",
        },
    )
    headline = (
        f"RLVR raised four-step imagination from {100 * before**4:.1f} % to {100 * after**4:.1f} % of rooms "
        "exactly right."
    )
    text = (
        f"More pre-training on the same number of tokens reached {100 * control**4:.1f} %, so part of the gain comes "
        "from training longer."
    )
    text += f" Copying the state is right in {100 * 0.5**4:.1f} % of rooms."
    write_json(folder / "summary.json", {"headline": headline, "paragraphs": [text]})
    tensors = {f"model.layers.{index}.weight": {"xxh3": f"{rng.getrandbits(128):032x}"} for index in range(40)}
    proof = {
        "max_logit_difference": 2.4e-7,
        "largest_logit": 8.0,
        "tolerance": 1e-4,
        "same_choice": 1.0,
        "tensors": tensors,
    }
    write_json(folder / "export" / "export_proof.json", proof)
    return folder
