"""Which sampler a stage uses; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..health import HealthConfig


@dataclass(frozen=True)
class Embedded:
    """On the trainer's own weights."""

    kind: Literal["embedded"] = "embedded"


@dataclass(frozen=True)
class Vllm:
    """vLLM servers: ours, one per entry of `devices`, or other people's by URL. In a cluster job with sampler hosts ours run there."""

    kind: Literal["vllm"] = "vllm"
    devices: list[str] = field(default_factory=lambda: [""])  # CUDA_VISIBLE_DEVICES of each server; "" leaves it as it is
    urls: list[str] = field(default_factory=list)
    transport: Literal["broadcast", "disk"] = "broadcast"
    backend: Literal["gloo", "nccl"] = "gloo"
    host: str = "127.0.0.1"  # of the trainer, as the servers see it
    logprobs: Literal["raw", "processed"] = "raw"  # see VllmSettings
    tensor: int = 1
    max_length: int = 2048
    max_sequences: int = 256
    gpu_memory: float = 0.5
    eager: bool = False
    start_s: float = 600.0  # deadlines
    request_s: float = 600.0
    sync_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.devices and not self.urls:
            raise ValueError("devices: name at least one server, or give urls")
        if min(self.start_s, self.request_s, self.sync_s) <= 0:
            raise ValueError("start_s: deadlines must be positive")


SamplerConfig = Embedded | Vllm


@dataclass(frozen=True)
class Rollouts:
    """How a training stage samples, what it keeps of it, and which alarms watch it."""

    sampler: SamplerConfig = field(default_factory=Embedded)
    ahead: int = 0  # 1: the next step is sampled while this one is trained, by weights one step old; needs kind: vllm
    keep_samples: bool = False  # keep every continuation for a replay, not only those a resume may need
    replay: str | None = None  # folder of a journal whose continuations are used instead of sampling
    deadline_s: float = 3600.0  # for all continuations of one step
    health: HealthConfig = field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        if self.ahead not in (0, 1):
            raise ValueError(f"ahead: {self.ahead} must be 0 or 1")
        if self.ahead and self.sampler.kind != "vllm":
            raise ValueError("ahead: the embedded sampler shares the trainer's weights; sampling ahead needs sampler.kind = vllm")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s: {self.deadline_s} must be above 0")
