"""The engine's settings. Importable without torch; each rule that Megatron leaves unchecked is checked here or in
`check_layout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from .errors import ConfigError

LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "sequence_parallel")  # which rank holds what


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks; data parallelism is what is left of the world."""

    tensor: int = 1  # ranks that share each layer's matrices
    pipeline: int = 1  # ranks that the layers are dealt to in turn
    virtual_pipeline: int = 1  # model chunks on each pipeline rank
    context: int = 1  # ranks that share each sequence's tokens
    expert: int = 1  # ranks that a layer's experts are dealt to
    # how tokens reach experts of other ranks: each is sent where it goes, or every rank gathers all; auto: sent on
    # GPUs, gathered on CPUs
    expert_dispatch: Literal["auto", "alltoall", "gather"] = "auto"
    sequence_parallel: bool = False  # norms and dropout share the sequence over the tensor ranks: less memory
    recompute: Literal["none", "full"] = "none"  # activations of whole layers are made again in the backward pass
    # gradients are summed over data ranks while the backward pass still runs; default: where there are several, and
    # not with cuda_graphs
    overlap_grad_reduce: bool | None = None
    # updated weights are gathered in the background: a layer waits for its own, whatever else reads them for all
    overlap_param_gather: bool = False
    # on a GPU: layers are replayed as graphs once a microbatch's shape has come back; for small models
    cuda_graphs: bool = False
    timeout_minutes: float = 10.0  # of every collective
    earlier_defaults: ClassVar[dict[str, Any]] = {"overlap_grad_reduce": False}  # the default of earlier releases

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline: needs pipeline > 1")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel: needs tensor > 1")
        if self.cuda_graphs and (
            self.model_size * self.expert > 1 or self.recompute != "none" or self.overlap_grad_reduce
        ):
            raise ValueError(
                "cuda_graphs: needs tensor, pipeline, context and expert of 1, recompute: none and "
                "overlap_grad_reduce: false"
            )
        if self.timeout_minutes <= 0:
            raise ValueError("timeout_minutes: must be positive")

    def resolved(self, world: int) -> ParallelConfig:
        """With what is not given chosen for so many ranks."""
        several = world // (self.tensor * self.pipeline) > 1  # of data and context
        overlap = several and not self.cuda_graphs if self.overlap_grad_reduce is None else self.overlap_grad_reduce
        return replace(self, overlap_grad_reduce=overlap)

    @property
    def model_size(self) -> int:
        """Ranks that together hold one copy of the model and its sequence."""
        return self.tensor * self.pipeline * self.context

    @property
    def token_multiple(self) -> int:
        """A microbatch is padded to a multiple of this many tokens."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence_parallel else 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning-rate schedule that is a pure function of the step."""

    lr: float = 1e-5  # the learning rate after warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # how it falls from there
    warmup_steps: int = 0  # steps over which it rises from 0
    total_steps: int = 0  # of linear and cosine
    min_lr: float = 0.0  # where linear and cosine end
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's decay of the mean and of the square of gradients
    eps: float = 1e-8  # AdamW's term against division by zero
    weight_decay: float = 0.0  # AdamW's
    clip_grad: float = 1.0  # 0 turns clipping off
    # of a model with experts: weight of the loss that keeps each layer's choices even within every sequence; 0: none
    balance: float = 0.0

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError("lr: must not be negative")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps: schedule '{self.schedule}' needs total_steps > warmup_steps")
        if self.min_lr > self.lr:
            raise ValueError("min_lr: must not exceed lr")
        if self.balance < 0:
            raise ValueError("balance: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} must be at least 0 and below 1")


@dataclass(frozen=True)
class PrecisionConfig:
    """Type of the parameters, and whose layers compute; the optimizer always keeps fp32 master weights and fp32
    gradients.
    """

    params: Literal["fp32", "bf16"] = "fp32"  # the type that weights and activations have
    layers: Literal["ours", "te"] = "ours"  # te: TransformerEngine's, on a GPU where it imports
    # matrix products of the layers in fp8: ours with a scale for each row, TransformerEngine's with delayed scaling
    fp8: bool = False
    # of our layers: which products; forward alone, dgrad: also the inputs' gradients, all: also the weights'
    fp8_products: Literal["forward", "dgrad", "all"] = "dgrad"
    fp8_skip: int = 0  # of our layers: so many at each end of the model stay in bf16
    # beside our layers the head's logits too, whose rounding log-probs take over (in RL see logprob_drift/mean)
    fp8_head: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.params != "bf16":
            raise ValueError("fp8: needs params: bf16")
        if self.fp8_skip < 0:
            raise ValueError("fp8_skip: must not be negative")
        if (self.fp8_products, self.fp8_skip, self.fp8_head) != ("dgrad", 0, False) and not self.own_fp8:
            raise ValueError("fp8_products, fp8_skip, fp8_head: need fp8: true and layers: ours")

    @property
    def own_fp8(self) -> bool:
        """Whether our own layers compute in fp8."""
        return self.fp8 and self.layers == "ours"


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of update number `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def heads_fit(tensor: int, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether attention can be cut over so many tensor ranks: each has its own key and value heads, or several ranks
    use the same one with queries of their own. In that case the rows of a head are cut too.
    """
    own = kv_heads % tensor == 0 or (tensor % kv_heads == 0 and (heads + 2 * kv_heads) * head_dim % tensor == 0)
    return heads % tensor == 0 and own


def check_layout(
    parallel: ParallelConfig,
    *,
    world: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    experts: int,
    vocab: int,
) -> None:
    """Refuse a layout the model cannot be cut into, naming the setting to change. `vocab` is the padded size."""
    p = parallel
    if world % p.model_size:
        raise ConfigError(
            f"parallel: tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} does not divide the {world} "
            "ranks"
        )
    for what, size in (("heads", heads), ("ffn", ffn), ("padded vocabulary", vocab)):
        if size % p.tensor:
            raise ConfigError(f"parallel.tensor: {p.tensor} does not divide the model's {what} ({size})")
    if not heads_fit(p.tensor, heads, kv_heads, head_dim):
        rows = (heads + 2 * kv_heads) * head_dim
        raise ConfigError(
            f"parallel.tensor: {p.tensor} does not divide the model's kv_heads ({kv_heads}), and ranks cannot share "
            "them: it "
            + (
                f"is no multiple of {kv_heads} either"
                if p.tensor % kv_heads
                else f"does not divide the {rows} rows of queries, keys and values"
            )
        )
    if layers % (p.pipeline * p.virtual_pipeline):
        raise ConfigError(
            f"parallel.pipeline: pipeline {p.pipeline} x virtual_pipeline {p.virtual_pipeline} does not divide the "
            f"{layers} layers"
        )
    if p.expert > 1 and not experts:
        raise ConfigError("parallel.expert: the model has no experts")
    if experts and p.tensor > 1 and not p.sequence_parallel:
        raise ConfigError("parallel.sequence_parallel: a model with experts needs it when tensor > 1")
    if experts % p.expert:
        raise ConfigError(f"parallel.expert: {p.expert} does not divide the model's {experts} experts")
    if (world // p.pipeline) % p.expert:
        raise ConfigError(
            f"parallel.expert: {p.expert} does not divide the {world // p.pipeline} ranks of a pipeline stage"
        )
