"""Which sampler a stage uses; importable without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ..health import HealthConfig


@dataclass(frozen=True)
class Embedded:
    """On the trainer's own weights."""

    kind: Literal["embedded"] = "embedded"
    max_batch: int | None = None  # requests in flight; default 4096 on a GPU, 256 on a CPU
    # memory for keys and values on a GPU; default: most of what is free when sampling starts
    cache_gib: float | None = None
    batch_invariant: bool = False  # log-probs equal, bit for bit, to those the trainer scores; slower
    # tokens that a pass proposes by copying from a row's own context; samples do not change. 0: none; null: on a GPU as
    # many as pay off, on a CPU none
    copy: int | None = 0

    def __post_init__(self) -> None:
        if self.max_batch is not None and self.max_batch < 1:
            raise ValueError(f"max_batch: {self.max_batch} must be at least 1")
        if self.cache_gib is not None and self.cache_gib <= 0:
            raise ValueError(f"cache_gib: {self.cache_gib} must be above 0")
        if self.copy is not None and not 0 <= self.copy <= 15:
            raise ValueError(f"copy: {self.copy} must be between 0 (none) and 15")


@dataclass(frozen=True)
class Vllm:
    """vLLM servers: started by the run, one per entry of `devices` (in a cluster job with sampler hosts: there), or
    existing ones by URL.

    With `colocated` there are no servers: every rank has an engine on its own device, and trainer and engine take
    turns.
    """

    kind: Literal["vllm"] = "vllm"
    # CUDA_VISIBLE_DEVICES of each server, which shares its model over those it names, e.g. "0,1"; "" leaves it as it
    # is. On sampler hosts with GPUs these are dealt out `tensor` to a server, and devices are not read
    devices: list[str] = field(default_factory=lambda: [""])
    urls: list[str] = field(default_factory=list)  # addresses of existing servers
    # how weights reach the servers: over the network, or through files
    transport: Literal["broadcast", "disk"] = "broadcast"
    # library of the broadcast; default: nccl if servers and trainer have separate GPUs, else gloo
    backend: Literal["gloo", "nccl"] | None = None
    host: str = "127.0.0.1"  # the trainer's address, as the servers see it
    logprobs: Literal["raw", "processed"] = "raw"  # see VllmSettings
    tensor: int = 1  # GPUs that share one server's model, where `devices` does not name them
    max_length: int = 2048  # tokens of prompt and answer together
    # concurrent requests of a server; default: 1024 on GPUs of its own, else 256
    max_sequences: int | None = None
    # share of a GPU's memory that vLLM takes; default: 0.9 on GPUs of its own, else 0.5
    gpu_memory: float | None = None
    eager: bool = False  # no CUDA graphs: starts faster, samples slower
    adapters_only: bool = False  # with lora: vLLM keeps the frozen weights, and only the adapters are sent
    colocated: bool = False  # an engine in every rank instead of servers
    # colocated: while training vLLM gives back its memory; 1 keeps its weights on the host, 2 drops them
    sleep: Literal[0, 1, 2] = 0
    offload: bool = False  # colocated: while sampling the trainer's weights and optimizer lie in host memory
    start_s: float = 600.0  # deadlines
    request_s: float = 600.0  # deadline of one request
    sync_s: float = 300.0  # deadline of one weight update
    # defaults of earlier releases
    earlier_defaults: ClassVar[dict[str, Any]] = {"backend": "gloo", "max_sequences": 256, "gpu_memory": 0.5}

    def __post_init__(self) -> None:
        if not self.devices and not self.urls:
            raise ValueError("devices: name at least one server, or give urls")
        if wrong := next((url for url in self.urls if not re.fullmatch(r"http://[^/\s]+", url)), None):
            raise ValueError(f"urls: {wrong!r} is no address of a server; write it as http://HOST:PORT")
        if min(self.start_s, self.request_s, self.sync_s) <= 0:
            raise ValueError("start_s: deadlines must be positive")
        sizes = [self.tensor, self.max_length, *([] if self.max_sequences is None else [self.max_sequences])]
        if min(sizes) < 1 or (self.gpu_memory is not None and not 0 < self.gpu_memory <= 1):
            raise ValueError(
                "gpu_memory: a share above 0 and up to 1; tensor, max_length and max_sequences are at least 1"
            )
        named = [device.split(",") for device in self.devices if device]
        if not self.colocated and any(self.tensor > 1 and len(names) != self.tensor for names in named):
            raise ValueError(f"tensor: {self.tensor} is not what every entry of devices names; leave tensor out")
        if self.colocated and (self.urls or len(self.devices) > 1 or self.tensor > 1):
            raise ValueError(
                "colocated: every rank has one engine on its own device; leave out urls, devices and tensor"
            )
        if not self.colocated and (self.sleep or self.offload):
            raise ValueError("sleep: servers do not share the trainer's device; sleep and offload need colocated: true")
        if self.adapters_only and self.sleep == 2:
            raise ValueError("sleep: 2 drops the weights that adapters_only does not send again; use 1")

    def resolved(self, own_gpus: bool, cuda: bool) -> Vllm:
        """Fill in defaults, which depend on whether servers have GPUs that no rank trains on, and the trainer any."""
        chosen = {
            "backend": "nccl" if own_gpus and cuda else "gloo",
            "max_sequences": 1024 if own_gpus else 256,
            "gpu_memory": 0.9 if own_gpus else 0.5,
        }
        return replace(self, **{name: value for name, value in chosen.items() if getattr(self, name) is None})

    def shares(self) -> list[tuple[str, int]]:
        """(devices, number of GPUs that share its model) of each server."""
        return [(device, len(device.split(",")) if device else self.tensor) for device in self.devices]


SamplerConfig = Embedded | Vllm


@dataclass(frozen=True)
class Validation:
    """Rollouts on training tasks that are set aside: never trained on in this stage, and not part of the test set.
    Played before training and every `every` steps.
    """

    every: int = 0  # steps between two; 0 never validates
    prompts: int = 64  # number of tasks set aside
    samples: int = 1  # of each prompt

    def __post_init__(self) -> None:
        if self.every < 0 or self.prompts < 1 or self.samples < 1:
            raise ValueError("every: must be 0 (never) or above, with at least one prompt and one sample")


@dataclass(frozen=True)
class Rollouts:
    """How a training stage samples, what it keeps, and which alarms watch it."""

    sampler: SamplerConfig = field(default_factory=Embedded)  # the engine that writes answers
    # steps that rollouts may start before they are trained on: sampling overlaps with training, with weights at most
    # this many steps old. 0: each step is sampled by its own weights, and runs are reproducible
    ahead: int = 0
    # sample an episode's next turn as soon as its world has answered, not when all worlds have. With it, and always
    # with `ahead`, the last bits of log-probs depend on timing, unless sampler.batch_invariant
    independent: bool = False
    keep_samples: bool = False  # keep every continuation for a replay, not only those a resume may need
    replay: str | None = None  # folder of a journal whose continuations are used instead of sampling
    # of a model with experts: the trainer sends every token to the experts that the sampler sent it to, whatever its
    # own router would choose by other rounding or newer weights; a reference and a critic choose for themselves
    replay_routing: bool = True
    # with `ahead`: seconds that a step waits for its rollouts; without it, each request and each turn of a world has
    # its own deadline. Default: 3600
    deadline_s: float | None = None
    # of a step's samples that may fail, after retries, without stopping the run; they train nothing
    max_invalid_share: float = 0.25
    health: HealthConfig = field(default_factory=HealthConfig)  # alarms on the metrics of a step
    validation: Validation = field(default_factory=Validation)  # held-out rollouts while training
    # if the algorithm has no KL term: measure the divergence from the stage's start every rollouts_every steps, which
    # keeps a second copy of the weights
    report_kl: bool = False
    earlier_defaults: ClassVar[dict[str, Any]] = {"deadline_s": 3600.0}  # default of earlier releases

    @property
    def streamed(self) -> bool:
        """Whether requests are answered one by one, as they arrive."""
        return self.independent or self.ahead > 0

    @property
    def step_s(self) -> float:
        """Seconds that a step waits for its rollouts, or a stream for its sampler to pause."""
        return self.earlier_defaults["deadline_s"] if self.deadline_s is None else self.deadline_s

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise ValueError(f"ahead: {self.ahead} must be 0 (on-policy) or above")
        if self.ahead and self.sampler.kind == "vllm" and self.sampler.colocated:
            raise ValueError(
                "ahead: a colocated engine takes turns with the trainer; use servers, or sampler.kind = embedded"
            )
        if not 0 <= self.max_invalid_share < 1:
            raise ValueError(f"max_invalid_share: {self.max_invalid_share} must be at least 0 and below 1")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError(f"deadline_s: {self.deadline_s} must be above 0")
