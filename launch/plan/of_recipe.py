"""A recipe's own sizes: the layout it is to run on, and what a step of each of its training stages does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...rl.algorithms import needs
from ...rl.rollout.config import Embedded, SamplerConfig
from ..recipe import Recipe
from ..settings.base import OnPolicy
from .layout import Layout, Work
from .rl import Rollout

PROMPT = 512  # tokens of a prompt, which no recipe states


@dataclass(frozen=True)
class Trained:
    """A stage that trains: its step, and the rollout of one of RL."""

    name: str
    work: Work
    layout: Layout
    microbatch_tokens: int
    rollout: Rollout | None
    steps: int | None
    save_every: int


def layout_of(recipe: Recipe, microbatch: int = 1) -> Layout:
    """The layout that a recipe asks for."""
    p = recipe.parallel
    recompute = "full" if p.recompute == "full" else "none"
    return Layout(recipe.ranks, p.tensor, p.pipeline, p.virtual_pipeline, p.context, p.expert, microbatch, recompute)


def trained(recipe: Recipe, prompt: int | None = None, new: int | None = None) -> list[Trained]:
    """The stages that train. Lengths that nobody gives are the most that a recipe allows, prompts of RL 512 tokens."""
    found = []
    for stage in recipe.stages:
        inner = getattr(stage, "training", None) or stage
        tokens = getattr(inner, "microbatch_tokens", 0)
        rollout = rollout_of(stage, recipe, tokens, prompt, new) if isinstance(stage, OnPolicy) else None
        batch = rollout.samples if rollout else getattr(inner, "sequences_per_step", None)
        if not tokens or batch is None:
            continue
        length = min(rollout.prompt + rollout.new if rollout else tokens, recipe.model.max_positions)
        work = Work(recipe.model.sizes, length, batch, "fp8" if recipe.precision.fp8 else "bf16")
        layout = layout_of(recipe, max(1, tokens // length))
        every = getattr(inner, "checkpoint_every", 0)
        found.append(Trained(stage.name, work, layout, tokens, rollout, getattr(inner, "steps", None), every))
    return found


def rollout_of(stage: Any, recipe: Recipe, tokens: int, prompt: int | None, new: int | None) -> Rollout:
    """What a step of an RL stage samples."""
    clip = getattr(getattr(stage, "env", None) or recipe.env, "layout", None)  # of a video: its tokens in all
    most: int = getattr(stage, "max_new_tokens", None) or (clip.total if clip else recipe.model.max_positions)
    new = new or most
    prompt = prompt or (1 if clip else min(PROMPT, max(1, recipe.model.max_positions - new)))
    sampler, wanted = stage.rollouts.sampler, needs(stage.algorithm)
    beside = sampler_gpus(sampler, recipe.ranks)
    updates = stage.updates_per_rollout * stage.epochs_per_rollout
    return Rollout(
        samples=stage.prompts_per_step * stage.samples_per_prompt,
        group=stage.samples_per_prompt,
        prompt=prompt,
        new=new,
        gpus=beside,
        tensor=1 if isinstance(sampler, Embedded) else max(size for _, size in sampler.shares()),
        at_once=(sampler.max_batch or 4096) if isinstance(sampler, Embedded) else sampler.max_sequences,
        vllm=not isinstance(sampler, Embedded),
        updates=stage.updates_per_rollout,
        passes=updates // stage.updates_per_rollout,
        scores=len(wanted & {"reference", "policy"}),
        critic="values" in wanted,
        ahead=stage.rollouts.ahead > 0,
        microbatch_tokens=tokens,
    )


def sampler_gpus(sampler: SamplerConfig, ranks: int) -> int:
    """GPUs that only sample: those of servers beside the trainer. None where one GPU does both."""
    if isinstance(sampler, Embedded) or sampler.colocated or sampler.urls:
        return 0
    own = sum(size for _, size in sampler.shares())
    return 0 if ranks == own == 1 and not any(sampler.devices) else own
