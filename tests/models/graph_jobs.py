"""CUDA graphs of a model's layers inside the engine. Without a GPU a recording of torch's operations stands in for a
graph.

The recording keeps a graph's law: what was captured is not carried out, and a replay reads and writes the tensors of
the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terrella.core.batch import PackedBatch
from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.models.lora import LoraConfig
from terrella.tests.parallel.jobs import WIDE, batches, fused_loss, score
from terrella.tests.parallel.pool import run_ranks


class Recording:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def pool(self) -> int:
        return 1

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Recording) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what the capture overwrites

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[i] if i < len(args) else None)
                assert isinstance(value, torch.Tensor), func
                self.before.setdefault(id(value), (value, value.detach().clone()))
        out = func(*args, **kwargs)
        self.graph.calls.append((func, args, kwargs, out))
        return out


@contextmanager
def record(graph: Recording, **_: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    with _Recorder(graph) as recorder:
        yield
    for value, old in recorder.before.values():
        value.detach().copy_(old)


def moved(batch: PackedBatch, by: int) -> PackedBatch:
    """The same documents in another order, at other positions."""
    bounds = batch.cu_seqlens_D1.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    lengths = lengths[by % len(lengths) :] + lengths[: by % len(lengths)]
    positions = torch.cat([torch.arange(n) + by for n in lengths])
    return replace(batch, positions_T=positions, cu_seqlens_D1=torch.tensor([0, *lengths]).cumsum(0).int())


def measure(graphs: bool, packed: bool, folder: str, lora: bool = False) -> dict[str, Any]:
    """Losses, norms and final weights of steps with ever other contents, with scores, an offload and a loaded
    checkpoint in between.
    """
    if torch.cuda.is_available():
        return _measure(graphs, packed, Path(folder), lora)
    from terrella.models.layers import Layer

    # as on a GPU
    with patch.multiple(torch.cuda, graph=record, CUDAGraph=Recording), patch.object(Layer, "in_halves", True):
        return _measure(graphs, packed, Path(folder), lora)


def _measure(graphs: bool, packed: bool, folder: Path, lora: bool) -> dict[str, Any]:
    from terrella.models.gpt import build_gpt

    cuda = torch.cuda.is_available()
    build = build_gpt(WIDE, lora=LoraConfig(rank=4, alpha=8.0) if lora else None)
    precision = PrecisionConfig("bf16" if cuda else "fp32")  # CPUs are slow in bf16
    engine = Engine(build, ParallelConfig(cuda_graphs=graphs and cuda), OptimizerConfig(lr=1e-3), precision, seed=3)
    chunk: Any = engine.chunks[0]
    if graphs and not cuda:
        chunk.use_graphs()
    results, scores, captured = [], [], 0

    def steps(first: int, count: int) -> None:
        for number in range(first, first + count):
            # ragged documents change their order on CUDA only: there a graph reads their bounds, on CPU it knows their
            # rows
            by = number if cuda or not packed else 4 * number
            items = [moved(b, by) for b in batches(4, vocab=WIDE.vocab, packed=packed, seed=number)]
            results.append(engine.step(items, fused_loss))

    steps(0, 4)
    captured = len(chunk.graphs.pairs) if graphs else 0
    engine.save(folder / f"{graphs}", {})
    scores += engine.score(batches(2, vocab=WIDE.vocab, packed=packed), score)
    steps(4, 1)
    engine.load(folder / f"{graphs}")
    steps(5, 1)
    engine.offload()
    forgotten = not graphs or not chunk.graphs.pairs
    engine.reload()
    steps(6, 4)
    return {
        "losses": [r.metrics["loss"] for r in results],
        "norms": [r.grad_norm for r in results],
        "scores": [s["logprob"].cpu() for s in scores],
        "weights": {name: value.cpu().clone() for name, value in engine.parameters()},
        "captured": captured,
        "again": len(chunk.graphs.pairs) if graphs else 0,
        "forgotten": forgotten,
    }


def check_graphs(packed: bool, lora: bool, folder: Path) -> None:
    """With and without graphs, in the pool: the same to the bit."""
    job = "terrella.tests.models.graph_jobs:measure"
    without, captured = (
        run_ranks(job, 1, graphs=graphs, packed=packed, lora=lora, folder=str(folder))[0] for graphs in (False, True)
    )
    assert captured["captured"] == captured["again"] == (4 if packed else 1) and captured["forgotten"]
    assert captured["losses"] == without["losses"] and captured["norms"] == without["norms"]
    for name, weight in without["weights"].items():
        assert torch.equal(captured["weights"][name], weight), name
    assert all(torch.equal(a, b) for a, b in zip(captured["scores"], without["scores"], strict=True))
