"""Bytes on one GPU: weights, gradients, optimizer, activations, what is at work, and the cache of a colocated
sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...models.geometry import activation_bytes, count, gradient_bytes
from .layout import Layout, Work
from .machine import Gpu

RUNTIME = 3.5e9  # CUDA context, NCCL and cuBLAS buffers; assumed
FRAGMENTS = 0.06  # of the activations: what the allocator holds beyond what is asked for; assumed
CHUNK = 1280 * 2.0**20  # logits that the fused head holds at a time (kernels/triton/linear.py)
# a logit of megatron-core: in bf16, in fp32, and its exponential; seen: peaks of 81.1 GiB, and of 63.3 all in bf16
LOGIT = 10.0


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU of the layout."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # the logits, or one layer's gradients where they are larger
    cache: float
    runtime: float

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def table(self) -> list[tuple[str, float]]:
        """Names and bytes, for printing."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)] + [("total", self.total)]


def parameters_here(work: Work, layout: Layout) -> tuple[float, float]:
    """Dense and expert parameters on the fullest GPU: a pipeline stage with an end of the model."""
    counts, m = count(work.model), work.model
    layers = m.layers / layout.pipeline
    dense = layers * counts.attention / layout.tensor
    expert = 0.0
    if m.experts:
        expert = layers * counts.mlp / layout.expert
    else:
        dense += layers * counts.mlp / layout.tensor
    ends = counts.embedding + counts.head if layout.pipeline == 1 else max(counts.embedding, counts.head)
    return dense + ends / layout.tensor, expert


def cache_bytes(work: Work, layout: Layout, tokens: int) -> float:
    """Keys and values of `tokens` tokens that a sampler on the same GPUs keeps, at the trainer's tensor-parallel
    size; ranks beyond the key heads hold copies.
    """
    m = work.model
    return 4.0 * m.layers * m.kv_heads * m.head_dim * tokens / min(layout.tensor, m.kv_heads)


def memory(work: Work, layout: Layout, cache_tokens: int = 0) -> Memory:
    """What the fullest GPU holds at the worst moment of a step: bf16 weights, fp32 gradients, sharded fp32 Adam."""
    m = work.model
    dense, expert = parameters_here(work, layout)
    expert_copies = max(1, layout.gpus // (layout.pipeline * layout.expert))
    here, share = dense + expert, layout.data if layout.fsdp else 1
    tokens = layout.microbatch * work.sequence / layout.context
    stage_layers = m.layers / layout.pipeline
    # the first stage of 1F1B keeps `pipeline` microbatches in flight; interleaving adds (pipeline - 1) / virtual of one
    # more
    in_flight = (
        layout.pipeline + (layout.pipeline - 1) / layout.virtual if layout.virtual > 1 else float(layout.pipeline)
    )
    in_flight = min(in_flight, max(1, layout.microbatches(work)))
    # our layers make the gated product again; fp8 takes TransformerEngine's
    remade = work.own and work.precision == "bf16"
    kept = tokens / layout.tensor * stage_layers * activation_bytes(m, layout.recompute, remade) * in_flight
    if layout.recompute == "full":
        kept += tokens / layout.tensor * activation_bytes(m, "none", remade)  # the layer being made again
    logits = tokens * m.padded_vocab / layout.tensor
    gradients = tokens / layout.tensor * gradient_bytes(m)
    if m.experts and work.own:
        gradients += 2.0 * 2.0 / 3.0 * count(m).mlp / layout.expert  # the experts' first weights side by side
    return Memory(
        weights=2.0 * here / share,
        gradients=4.0 * here / share,
        optimizer=12.0 * (dense / (layout.data * layout.context) + expert / expert_copies),
        activations=kept,
        working=max(min(2.0 * logits, CHUNK) if work.own else LOGIT * logits, gradients),
        cache=cache_bytes(work, layout, cache_tokens),
        runtime=RUNTIME + FRAGMENTS * kept,
    )


def too_large(used: Memory, gpu: Gpu) -> str | None:
    """Why it does not fit, or None."""
    if used.total <= 0.95 * gpu.memory:
        return None
    name, most = max(used.table()[:-1], key=lambda row: row[1])
    return f"memory: {used.total / 1e9:.0f} GB of {gpu.memory / 1e9:.0f} GB, most of it {name} ({most / 1e9:.0f} GB)"
