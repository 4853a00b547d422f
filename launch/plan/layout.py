"""A way to spread a training step over GPUs: what is asked for, and what the search tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.config import ParallelConfig, check_layout
from ...core.errors import ConfigError
from ...models.config import ModelConfig


@dataclass(frozen=True)
class Work:
    """A training step: model, sequence length, global batch, precision."""

    model: ModelConfig
    sequence: int
    batch: int  # sequences of one optimizer step
    precision: Literal["bf16", "fp8"] = "bf16"
    # this engine: fused head and loss, gradients summed after the last microbatch; else megatron-core tuned by its
    # makers
    own: bool = True


@dataclass(frozen=True)
class Layout:
    """Parallel sizes on `gpus` GPUs; data parallelism is what is left."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    microbatch: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    # weights and gradients sharded too; for comparing with published rows, not offered by this engine
    fsdp: bool = False
    overlap_experts: bool = False  # likewise: token exchange hidden behind the other half of the batch
    # likewise: a token crosses the network once for each node (DeepEP, HybridEP), not once for each expert
    once_a_node: bool = False
    # likewise: an expert takes a fixed number of tokens, so that nothing is padded and no number is waited for
    drop: bool = False

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    def microbatches(self, work: Work) -> int:
        return work.batch // (self.data * self.microbatch)

    def text(self) -> str:
        """Short, as people write layouts."""
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        parts += [f"VPP{self.virtual}"] if self.virtual > 1 else []
        parts += [f"CP{self.context}"] if self.context > 1 else []
        parts += [f"EP{self.expert}"] if self.expert > 1 else []
        parts += [f"{'FSDP' if self.fsdp else 'DP'}{self.data}", f"MBS{self.microbatch}"]
        return " ".join(parts) + (f" {self.recompute} recompute" if self.recompute != "none" else "")

    def settings(self) -> ParallelConfig:
        """The layout as a recipe's `parallel` section."""
        return ParallelConfig(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            context=self.context,
            expert=self.expert,
            sequence_parallel=self.tensor > 1,
            recompute="full" if self.recompute == "full" else "none",
        )


def impossible(layout: Layout, work: Work) -> str | None:
    """Why the engine would refuse this layout, or None."""
    try:
        check_layout(layout.settings(), world=layout.gpus, **work.model.cut)
    except (ConfigError, ValueError) as error:
        return str(error)
    if work.batch % (layout.data * layout.microbatch):
        return (
            f"batch: {work.batch} sequences do not divide over {layout.data} data-parallel ranks x {layout.microbatch}"
        )
    if layout.virtual > 1 and layout.microbatches(work) % layout.pipeline:
        return (
            f"virtual_pipeline: {layout.microbatches(work)} microbatches are no multiple of the {layout.pipeline} "
            "pipeline stages"
        )
    if work.sequence % (2 * layout.context * layout.tensor):
        return f"context: {work.sequence} tokens do not divide into {2 * layout.context} x {layout.tensor} parts"
    return None
