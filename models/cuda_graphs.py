"""The layers of a model as CUDA graphs, which save a small model's host time in every step.

Embedding, head and loss stay outside. A shape is captured when it recurs; others run eagerly. Shape suffixes: T tokens,
H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .layers import PackedInput

MOST = 4  # captured shapes; each keeps the addresses of its activations
SEEN = 2  # eager passes of a shape before it is captured, which compile its kernels
FORGET = 4096  # shapes whose passes are counted

Block = Callable[[torch.Tensor, PackedInput], torch.Tensor]


def shape_of(packed: PackedInput) -> tuple[Any, ...]:
    """What a captured pass is specific to: everything but the contents of `table_T2R`, `cu_q` and `cu_k`."""
    layout = packed.layout
    groups = tuple((g.count, g.q_len, g.k_len) for g in layout.groups) if layout.restore_T is None else ()
    return (len(packed.rows_T), len(layout.cu_q), layout.max_q, layout.max_k, groups)


class GraphedBlock:
    """Runs the layers of a chunk, by graphs for captured shapes. Weight gradients are added directly to their fp32
    buffers.
    """

    def __init__(self, run: Block, module: torch.nn.Module) -> None:
        self.run, self.module = run, module
        # number of forward passes; graphs share memory, so only the last one's activations exist
        self.turn = 0
        self.forget()

    def forget(self) -> None:
        """Drop all graphs and their memory; called when weights or gradients change their addresses."""
        self.pairs: dict[tuple[Any, ...], _Pair] = {}
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __call__(self, hidden_T1H: torch.Tensor, packed: PackedInput) -> torch.Tensor:
        shape = shape_of(packed)
        pair = self.pairs.get(shape)
        if pair is None:
            if len(self.seen) > FORGET:
                self.seen.clear()
            self.seen[shape] += 1
            if self.seen[shape] <= SEEN or len(self.pairs) == MOST:
                return self.run(hidden_T1H, packed)
            pool = next(iter(self.pairs.values())).forward.pool() if self.pairs else None
            pair = self.pairs[shape] = capture(self.run, self.module, hidden_T1H, packed, pool)
        return _Replay.apply(
            hidden_T1H, torch.zeros((), device=hidden_T1H.device, requires_grad=True), packed, pair, self
        )


@dataclass
class _Pair:
    """A captured forward and backward pass, and the tensors they read and write."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    packed: PackedInput
    hidden: torch.Tensor
    out: torch.Tensor
    grad_out: torch.Tensor
    grad_hidden: torch.Tensor


@contextmanager
def _stand_ins(module: torch.nn.Module, weights: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """New leaf tensors in place of `weights`, on the same memory.

    Megatron keeps the weights' accumulation nodes alive. They belong to the default stream, and a capture that meets
    them fails.
    """
    made = {id(weight): torch.nn.Parameter(weight.detach()) for weight in weights}
    places = [
        (owner, name, made[id(w)], w)
        for owner in module.modules()
        for name, w in owner._parameters.items()
        if id(w) in made
    ]
    try:
        for owner, name, leaf, _ in places:
            owner._parameters[name] = leaf
        yield [made[id(weight)] for weight in weights]
    finally:
        for owner, name, _, weight in places:
            owner._parameters[name] = weight


def capture(run: Block, module: torch.nn.Module, hidden_T1H: torch.Tensor, packed: PackedInput, pool: Any) -> _Pair:
    """Record both passes, after a warm-up pass on a side stream with a gradient of zero, which changes nothing."""
    trained: list[Any] = [w for w in module.parameters() if w.requires_grad]
    layout = replace(packed.layout, cu_q=packed.layout.cu_q.clone(), cu_k=packed.layout.cu_k.clone())
    packed = replace(packed, layout=layout, table_T2R=packed.table_T2R.clone())
    hidden = hidden_T1H.detach().clone().requires_grad_()
    grad_out = torch.zeros_like(hidden)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for weight in trained:
            weight.grad_added_to_main_grad = False
        torch.autograd.grad(run(hidden, packed), hidden, grad_out)
        # the others' gradients are added by their matrix products
        plain = [w for w in trained if not w.grad_added_to_main_grad]
    torch.cuda.current_stream().wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events from its own thread, which a capture of the whole process would report as an
    # error
    mode: Any = {"capture_error_mode": "thread_local"}
    with _stand_ins(module, plain) as leaves:
        with torch.cuda.graph(forward, pool=pool, **mode):
            out = run(hidden, packed)
        with torch.cuda.graph(backward, pool=forward.pool(), **mode):
            grad_hidden, *grads = torch.autograd.grad(out, [hidden, *leaves], grad_out)
            for weight, grad in zip(plain, grads, strict=True):
                weight.main_grad.add_(grad)
    return _Pair(forward, backward, packed, hidden, out.detach(), grad_out, grad_hidden)


class _Replay(torch.autograd.Function):
    """`anchor` has a gradient even where the hidden states have none (frozen embeddings): the weights' must be made."""

    @staticmethod
    def forward(ctx, hidden_T1H, anchor, packed: PackedInput, pair: _Pair, block: GraphedBlock):
        with torch.no_grad():
            pair.hidden.copy_(hidden_T1H)
        pair.packed.table_T2R.copy_(packed.table_T2R)
        pair.packed.layout.cu_q.copy_(packed.layout.cu_q)
        pair.packed.layout.cu_k.copy_(packed.layout.cu_k)
        pair.forward.replay()
        block.turn += 1
        ctx.pair, ctx.block, ctx.turn = pair, block, block.turn
        return pair.out.detach()

    @staticmethod
    def backward(ctx, grad_T1H):
        if ctx.turn != ctx.block.turn:
            raise RuntimeError("cuda_graphs: another forward pass came before the backward pass of this one")
        ctx.pair.grad_out.copy_(grad_T1H)
        ctx.pair.backward.replay()
        return ctx.pair.grad_hidden.detach(), None, None, None, None
