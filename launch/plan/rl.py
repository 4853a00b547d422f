"""What a step of RL costs beside its training: sampling, scoring, weights to the samplers; and starts and restarts.

Sampling is memory traffic and arithmetic like training, with its two constants from three runs on one H200. A sync is
what rl/sync/sharded.py does: every worker of every sampler takes each byte once, over its own link, a bucket of each
sender in turn, and nothing else happens meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...core.progress import clock
from ...models.config import ModelConfig
from ...models.geometry import count
from .layout import Layout, Work
from .machine import Constants, Gpu
from .simulate import (
    FAILURES_PER_GPU_DAY,
    best_interval,
    lost_share,
    restart_seconds,
    save_seconds,
    start_seconds,
)
from .timing import fitted, step_time

# of a pass of the sampler in which the device waits, and bytes moved for each logit that is drawn from; fitted: 8.66 s
# of 2048 samples of 512 tokens, 23.3 s of as many with a mean of 600 and a tail of 8192 (both Qwen2.5-1.5B), 1.71 s of
# the video model's
PASS_S, LOGIT_BYTES = 0.8e-3, 46.0
VLLM_PASS_S = 8.0e-3  # likewise of vLLM on that machine's host: 43.7 s of 2048 samples of 512 tokens, 256 at once
CACHE = 0.85  # of the memory that weights leave on a sampler's own GPUs; assumed
SHARED_CACHE = 0.4  # likewise where the trainer keeps its state beside it; assumed
BUCKET = float(1 << 28)  # bytes that are sent at a time
BUCKET_S = 2e-3  # of a bucket, beside its bytes: names through the store, and reading the checksums back; assumed
PASSES = 8.0  # times that a byte crosses the receiver's memory: checksum, putting parts together, loading; counted
LOADING_KERNELS = 3.0  # of a tensor that is loaded; counted


@dataclass(frozen=True)
class Rollout:
    """What a step samples, on which GPUs, and how it is trained on."""

    samples: int  # trajectories of a step
    group: int = 1  # samples of one prompt, whose keys and values they share
    prompt: int = 512  # tokens
    new: int = 512  # sampled tokens of a trajectory, on average
    most: int = 0  # of the longest; 0: as the average
    gpus: int = 0  # of the samplers alone; 0: they take turns with the trainer on its own
    tensor: int = 1  # GPUs of one sampler
    at_once: int = 1024  # sequences of one sampler
    vllm: bool = True  # else the embedded sampler, which needs no sync
    updates: int = 1  # parts that a rollout is cut into, an optimizer step each
    passes: int = 1  # times that a rollout is gone through
    scores: int = 1  # passes over it before the first: reference, policy
    critic: bool = False
    ahead: bool = False  # sampled while the step before is trained on
    microbatch_tokens: int = 8192


@dataclass(frozen=True)
class Sync:
    """New weights on their way to the samplers."""

    payload: float  # bytes of the model
    moved: float  # bytes that arrive, at all workers together
    seconds: float


@dataclass(frozen=True)
class RlStep:
    """Seconds of one step of RL, and of what happens once."""

    sampling: float
    scoring: float
    training: float
    sync: Sync
    saving: float  # of one checkpoint
    start: float
    restart: float
    tokens: float  # sampled in a step
    gpus: int  # trainer and samplers
    ahead: bool

    @property
    def total(self) -> float:
        learning = self.scoring + self.training
        return (max(self.sampling, learning) if self.ahead else self.sampling + learning) + self.sync.seconds


def sampling_seconds(
    model: ModelConfig, rollout: Rollout, gpus: int, gpu: Gpu, constants: Constants | None = None
) -> float:
    """Seconds until the last sample of a step is written, on `gpus` GPUs: every pass reads the weights and gives each
    running sequence one token; the longest answer goes on alone.
    """
    c, counts = constants or fitted(), count(model)
    bandwidth = c.bandwidth * gpu.bandwidth * rollout.tensor
    samplers = max(1, gpus // rollout.tensor)
    each = rollout.samples / samplers
    most = max(rollout.most, rollout.new)
    token = 4.0 * model.layers * model.kv_heads * model.head_dim
    weights = 2.0 * (counts.total - (0 if model.tied else counts.embedding))
    share = CACHE if rollout.gpus else SHARED_CACHE
    room = (share * gpu.memory * rollout.tensor - weights) / (token * (rollout.prompt / rollout.group + rollout.new))
    at_once = max(1.0, min(rollout.at_once, each, room))
    passes = max(1.0, each / at_once) * rollout.new + (most - rollout.new)
    running = each * rollout.new / passes  # sequences of a pass, on average
    if model.experts:  # those that no token of a pass goes to are not read
        touched = 1.0 - (1.0 - model.experts_per_token / model.experts) ** running
        weights -= 2.0 * model.layers * counts.mlp * (1.0 - touched)
    seconds = passes * (weights / bandwidth + (VLLM_PASS_S if rollout.vllm else PASS_S))
    if rollout.tensor > 1:  # two sums in every layer
        speed = c.nvlink * gpu.nvlink if rollout.tensor <= gpu.domain else c.network * gpu.network
        seconds += passes * 2.0 * model.layers * (c.hop_s + 4.0 * running * model.hidden / speed)
    seconds += each * rollout.new * (rollout.prompt / rollout.group + rollout.new / 2.0) * token / bandwidth
    seconds += each * rollout.new * LOGIT_BYTES * model.padded_vocab / bandwidth
    prompts = each * rollout.prompt / rollout.group
    return seconds + (each * rollout.new + prompts) * 2.0 * counts.active / (c.gemm * gpu.bf16 * rollout.tensor)


def sync_seconds(
    model: ModelConfig, workers: int, gpu: Gpu, *, near: bool = False, constants: Constants | None = None
) -> Sync:
    """Weights in bf16 to `workers` workers, each of which takes the whole model over one link; `near`: within NVLink's
    reach, or the same GPU.
    """
    c, counts = constants or fitted(), count(model)
    payload = 2.0 * counts.total
    tensors = model.layers * (7 + 3 * model.experts) + 3
    speed = c.nvlink * gpu.nvlink if near else c.network * gpu.network
    seconds = payload / speed + PASSES * payload / (c.bandwidth * gpu.bandwidth)
    seconds += math.ceil(payload / BUCKET) * BUCKET_S + tensors * LOADING_KERNELS * c.host_s
    return Sync(payload, payload * workers, seconds if workers else 0.0)


def rl_step(work: Work, layout: Layout, rollout: Rollout, gpu: Gpu, constants: Constants | None = None) -> RlStep:
    """The whole step. `work` gives model and precision; sequences and batch are the rollout's."""
    c = constants or fitted()
    length = rollout.prompt + max(1, rollout.new)
    batch = max(1, rollout.samples // rollout.updates)
    microbatch = max(1, min(rollout.microbatch_tokens // length, batch // layout.data))
    step = step_time(
        replace(work, sequence=length, batch=batch), replace(layout, microbatch=microbatch), gpu, constants
    )
    forward = c.forward * (step.total - step.data - step.optimizer) * rollout.updates
    models = 2.0 if rollout.critic else 1.0
    gpus = layout.gpus + rollout.gpus
    workers = (rollout.gpus or layout.gpus) if rollout.vllm else 0
    return RlStep(
        sampling=sampling_seconds(work.model, rollout, rollout.gpus or layout.gpus, gpu, constants),
        scoring=forward * (rollout.scores + models - 1.0),
        training=models * step.total * rollout.updates * rollout.passes,
        sync=sync_seconds(work.model, workers, gpu, near=not rollout.gpus or gpus <= gpu.domain, constants=constants),
        saving=models * save_seconds(work, gpu, layout.gpus),
        start=start_seconds(work, gpu, layout, served=rollout.vllm),
        restart=restart_seconds(work, gpu, layout, served=rollout.vllm),
        tokens=float(rollout.samples * rollout.new),
        gpus=gpus,
        ahead=rollout.ahead and rollout.gpus > 0,
    )


def rl_lines(step: RlStep, rollout: Rollout, save_every: int = 0) -> list[str]:
    """The step in words."""
    longest = f", the longest {rollout.most:,}" if rollout.most > rollout.new else ""
    where = f"{rollout.gpus} GPUs of their own" if rollout.gpus else "the trainer's GPUs, by turns"
    together = "the longer of sampling and learning" if step.ahead else "one after the other"
    sync = step.sync
    sent = f" ({sync.payload / 1e9:.1f} GB to each of {sync.moved / sync.payload:.0f} workers)" if sync.moved else ""
    return [
        f"a step of RL, {rollout.samples:,} samples of {rollout.prompt:,} + {rollout.new:,} tokens{longest}; samplers "
        f"on {where}: {step.total:.1f} s, {together}",
        f"  sampling {step.sampling:.1f} s ({step.tokens / step.sampling:,.0f} tokens/s), scoring "
        f"{step.scoring:.1f} s, training {step.training:.1f} s, weights to the samplers {sync.seconds:.2f} s{sent}",
        *once_lines(step.gpus, step.total, step.saving, save_every, step.start, step.restart),
    ]


def once_lines(gpus: int, step_s: float, save_s: float, every: int, start_s: float, restart_s: float) -> list[str]:
    """What a start, checkpoints and failures cost beside the steps; saved after `every` steps, 0: as often as is
    best.
    """
    between = 86400.0 / (FAILURES_PER_GPU_DAY * gpus)
    every = every or max(1, round(best_interval(save_s, between) / step_s))
    lost = lost_share(every * step_s, save_s, between, restart_s)
    return [
        f"start {clock(start_s)}; a checkpoint takes {save_s:.0f} s, every {every:,} steps; a restart takes "
        f"{clock(restart_s)}, a failure comes every {clock(between)}: {100 * lost:.1f} % of the time is lost to both"
    ]
