"""The engine: one `step`, one `score`, one checkpoint format for every kind of training. Model and loss are passed in
as callables, so that core needs no sibling package.

Shape suffixes: T tokens of this context rank, H hidden, V rows of this tensor rank's head.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import checkpoint, profile
from .batch import PackedBatch
from .config import OptimizerConfig, ParallelConfig, PrecisionConfig, learning_rate
from .errors import ConfigError
from .layout import (
    DocumentLayout,
    balance_weights,
    context_rows,
    document_layout,
    pad_batch,
    slice_batch,
    trained_lengths,
)


@dataclass(frozen=True)
class Head:
    """What a loss needs besides the hidden states. Per-token fields are aligned with the batch passed to the loss."""

    weight_VH: torch.Tensor
    group: dist.ProcessGroup | None  # tensor ranks that hold the other rows of the head, in order
    vocab_size: int  # real size; rows beyond it are padding
    values_T: torch.Tensor | None  # if the model has a value head
    document_T: torch.Tensor  # document of each token, counted over the whole packed batch
    context_group: dist.ProcessGroup | None  # ranks that hold the other tokens of these documents
    # on CUDA: an fp32 buffer to which a kernel may add the head's gradient instead of returning it
    weight_grad_VH: torch.Tensor | None = None
    fp8: Any = None  # fp8 copy of the weight (`Scaled`), if the logits are computed in fp8


LossFn = Callable[[torch.Tensor, Head, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
ScoreFn = Callable[[torch.Tensor, Head, PackedBatch], dict[str, torch.Tensor]]


class Builder(Protocol):
    """Builds this rank's model chunks, and describes them for checkpoints."""

    def __call__(self, parallel: ParallelConfig, precision: PrecisionConfig, seed: int) -> list[torch.nn.Module]: ...

    def describe(self) -> dict[str, Any]: ...

    @property
    def width(self) -> int:
        """The hidden size, which determines the cost of a token apart from attention."""
        ...


class Cuttable(Protocol):
    """A tensor that is not in memory; each rank reads only its own part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def cut(self, shard: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. `metrics` are sums over all microbatches and ranks; a step is skipped if its
    gradient norm is not finite.
    """

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class _Item:
    batch: PackedBatch
    layout: DocumentLayout
    tokens: int  # before padding


def _check(names: list[str]) -> float:
    """A checksum of metric names, sent with the sums: ranks that measured different things must not be added up."""
    return float(zlib.crc32("\n".join(names).encode()) % 65521)


class Engine:
    """A model spread over ranks, with its optimizer. Every method that computes is collective: all ranks call it
    together.
    """

    def __init__(
        self,
        build: Builder,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig | None,
        precision: PrecisionConfig,
        seed: int = 0,
    ) -> None:
        from .mcore import optimizer as adam
        from .mcore import setup

        parallel = parallel.resolved(dist.get_world_size())
        self.groups = setup.start_parallel(parallel, seed)
        self.parallel, self.optimizer_config, self.precision, self.seed = parallel, optimizer, precision, seed
        self.build = build
        self.device = setup.device()
        self.steps = 0
        self.weights_version = 0  # raised whenever weights change: by a step, and by every load
        self.writer: Any = None  # writes a checkpoint in the background
        self.chunks = [chunk.to(self.device) for chunk in build(parallel, precision, seed)]
        self._parked: list[Any] = []
        self.optimizer: Any = None
        self._wrapped: list[Any] = list(self.chunks)
        if optimizer is not None:
            if optimizer.balance and not all(getattr(chunk, "routes", False) for chunk in self.chunks):
                raise ConfigError("optimizer.balance: the model has no experts; leave it at 0")
            self._wrapped = adam.wrap_ddp(self.chunks, parallel)
            self.optimizer = adam.build_optimizer(optimizer, precision, self._wrapped)
        self._routing_2: torch.Tensor | None = None  # last step: choices given to routers, those that differ
        self._balance: torch.Tensor | None = None  # in the last step: the experts' balancing loss, if there is one
        self._gathering = False  # updated weights are still on their way
        self._cast_version = -1  # of the weights that the fp8 copies were made of
        self._profiler = profile.claim(dist.get_rank()) if optimizer is not None else None

    def _wait_for_weights(self) -> None:
        """Wait for updated weights. Everything that reads parameters must call this first, or it sees old ones."""
        from .mcore import optimizer as adam

        if self._gathering:
            adam.finish_gather(self._wrapped)
            self._gathering = False

    def _cast(self) -> None:
        """Update the model's fp8 copies of the weights; everything that computes with the model must call this first.
        Without such copies, layers themselves wait for weights that are still being gathered.
        """
        if self.precision.own_fp8 or self.parallel.cuda_graphs:
            self._wait_for_weights()
        if self._cast_version != self.weights_version and self.precision.own_fp8:
            for chunk in self.chunks:
                chunk.cast_weights()  # type: ignore[operator]
        self._cast_version = self.weights_version

    def _balance_tokens(self, microbatches: list[PackedBatch]) -> float:
        """The number of tokens, over all data ranks, that the experts' balance of a step is averaged over; 0 if no
        balance loss is set. Collective.
        """
        if self.optimizer_config is None or not self.optimizer_config.balance:
            return 0.0
        tokens = torch.tensor(
            float(sum(int(trained_lengths(batch).sum()) for batch in microbatches)), dtype=torch.float64
        ).to(self.device)
        dist.all_reduce(tokens, group=self.groups.reduce)
        return float(tokens) / self.parallel.context  # context ranks counted the same documents

    def _items(self, microbatches: list[PackedBatch], balance_tokens: float = 0.0) -> tuple[list[_Item], list[int]]:
        """Pad, slice over context ranks and move to the device; also returns the padded lengths before slicing.
        Interleaved pipelines need the same length for all microbatches.
        """
        if not microbatches:
            raise ConfigError("microbatches: a step needs at least one")
        if self.parallel.virtual_pipeline > 1 and len(microbatches) % self.parallel.pipeline:
            raise ConfigError(
                f"microbatches: virtual_pipeline needs a multiple of parallel.pipeline ({self.parallel.pipeline}), "
                f"not {len(microbatches)}"
            )
        # fp8 products need multiples of 16 rows
        multiple = self.parallel.token_multiple * (16 if self.precision.fp8 else 1)
        lengths = [-(-batch.num_tokens // multiple) * multiple for batch in microbatches]
        if self.parallel.expert > 1:  # experts gather tokens of several data ranks in equal parts
            common = torch.tensor(lengths, device=self.device)
            dist.all_reduce(common, op=dist.ReduceOp.MAX)
            lengths = common.tolist()
        if self.parallel.virtual_pipeline > 1:
            lengths = [max(lengths)] * len(lengths)
        items = []
        for batch, length in zip(microbatches, lengths, strict=True):
            padded = pad_batch(batch, length)
            layout = document_layout(padded.cu_seqlens_D1.tolist(), self.parallel.context, self.groups.context_rank)
            if balance_tokens and self.optimizer_config is not None:
                weights_D = balance_weights(trained_lengths(padded), balance_tokens, self.optimizer_config.balance)
                layout = replace(layout, balance_D=weights_D)
            if self.parallel.context > 1:
                padded = slice_batch(
                    padded,
                    context_rows(length, self.parallel.context, self.groups.context_rank).to(padded.tokens_T.device),
                )
            items.append(_Item(padded.to(self.device), layout.to(self.device), batch.num_tokens))
        return items, lengths

    @staticmethod
    def _forward(chunk: torch.nn.Module, item: _Item) -> torch.Tensor:
        return chunk(item.batch.tokens_T, item.batch.positions_T, item.layout, item.batch.experts_T)

    def _read(self, chunk: Any, output: torch.Tensor, item: _Item) -> tuple[torch.Tensor, Head]:
        hidden_TH, weight_VH, values_T = chunk.readout(output)
        direct = (
            weight_VH.is_cuda
            and weight_VH.requires_grad
            and torch.is_grad_enabled()
            and not self.parallel.overlap_grad_reduce
        )
        buffer = getattr(weight_VH, "main_grad", None) if direct else None
        head = Head(
            weight_VH,
            self.groups.tensor,
            chunk.vocab,
            values_T,
            item.layout.document_T,
            self.groups.context,
            buffer,
            chunk.head_copy() if self.precision.own_fp8 else None,
        )
        return hidden_TH, head

    def accumulate(self, microbatches: list[PackedBatch], loss: LossFn) -> dict[str, float]:
        """Forward and backward of a whole step: gradients summed over microbatches and ranks, and the summed
        metrics.
        """
        return self._read_metrics(*self._accumulate(microbatches, loss))

    def _accumulate(self, microbatches: list[PackedBatch], loss: LossFn) -> tuple[list[str], torch.Tensor | None]:
        from .mcore import schedule

        if self.optimizer is None:
            raise ConfigError("optimizer: this engine was built without one and can only score")
        self._cast()
        for chunk in self._wrapped:
            if not chunk.training:
                chunk.train()
            chunk.zero_grad_buffer()
        self._take_routing()  # choices made while scoring do not count
        items, lengths = self._items(microbatches, self._balance_tokens(microbatches))

        def finish(chunk, output, item):
            value, sums = loss(*self._read(chunk, output, item), item.batch)
            return value, {name: torch.as_tensor(x).detach() for name, x in sums.items()}

        records = schedule.run(self._wrapped, items, lengths, self._forward, finish, train=True)
        self._routing_2 = self._take_routing()
        if self._routing_2 is not None:
            dist.all_reduce(self._routing_2)  # each rank's routers saw different tokens or belong to different layers
        self._balance = None
        if items[0].layout.balance_D is not None:
            self._balance = torch.stack([chunk.take_balance() for chunk in self.chunks]).sum()  # type: ignore[operator]
            dist.all_reduce(self._balance)
        return self._sum_metrics(records)

    def _take_routing(self) -> torch.Tensor | None:
        """For a model with experts: this rank's counts of given choices since the last call; see `take_routing`."""
        if not any(getattr(chunk, "routes", False) for chunk in self.chunks):
            return None
        counts: list[Any] = [chunk.take_routing() for chunk in self.chunks]  # type: ignore[operator]
        return sum((x for x in counts if x is not None), start=torch.zeros(2, dtype=torch.int64, device=self.device))

    def step(self, microbatches: list[PackedBatch], loss: LossFn) -> StepResult:
        """One optimizer step over this data rank's microbatches (equally many on every data rank)."""
        with self._profiler.step() if self._profiler else contextlib.nullcontext():
            return self._step(microbatches, loss)

    def _step(self, microbatches: list[PackedBatch], loss: LossFn) -> StepResult:
        from .mcore import optimizer as adam

        with profile.marked("forward and backward"):
            names, sums = self._accumulate(microbatches, loss)
        assert self.optimizer_config is not None
        lr = learning_rate(self.optimizer_config, self.steps)
        with profile.marked("update"):
            norm = adam.update(self.optimizer, self._wrapped, self.optimizer_config, lr)
        self._gathering = self.parallel.overlap_param_gather
        self.weights_version += 1
        if not self._gathering:
            self._cast()  # the host has time while the device still computes
        self.steps += 1
        # the step's only wait for the device, after all its work is queued
        metrics = self._read_metrics(names, sums)
        grad_norm = float(norm)
        return StepResult(metrics, grad_norm, lr, not math.isfinite(grad_norm))

    def _sum_metrics(self, records: list[dict[str, torch.Tensor]]) -> tuple[list[str], torch.Tensor | None]:
        """The metric names and, on the last stage, their sums over microbatches, data and context ranks, on the
        device.
        """
        if not records:
            return [], None
        names = sorted(records[0])
        rows = [torch.stack([r[n].to(torch.float64).reshape(()) for r in records]).sum() for n in names]
        sums = torch.stack([torch.full((), _check(names), dtype=torch.float64, device=self.device), *rows])
        dist.all_reduce(sums, group=self.groups.reduce)
        return names, sums

    def _read_metrics(self, names: list[str], sums: torch.Tensor | None) -> dict[str, float]:
        """Copy the sums to the host, and send them to the other stages."""
        metrics: dict[str, float] = {}
        if sums is not None:
            values = sums.tolist()
            if values[0] != _check(names) * dist.get_world_size(self.groups.reduce):
                raise ConfigError(f"loss: data ranks returned different metric names; this one returned {names}")
            metrics = dict(zip(names, values[1:], strict=True))
        if self.parallel.pipeline > 1:
            box = [metrics]
            dist.broadcast_object_list(box, src=self.groups.last_rank, group=self.groups.pipeline)
            metrics = box[0]
        given, disagreed = self._routing_2.tolist() if self._routing_2 is not None else (0, 0)
        if self._balance is not None:
            metrics["balance_loss"] = float(self._balance)
        return metrics | ({"routing_given": given, "routing_disagreed": disagreed} if given else {})

    @torch.no_grad()
    def score(self, microbatches: list[PackedBatch], score: ScoreFn) -> list[dict[str, torch.Tensor]]:
        """Forward only: per-token results of each microbatch, complete and unpadded, on all ranks that share them."""
        from .mcore import schedule

        self._cast()
        for chunk in self._wrapped:
            chunk.eval()
        asked = len(microbatches)
        if self.parallel.virtual_pipeline > 1:  # interleaving needs a multiple of the stages; repeat the last one
            microbatches = [*microbatches, *microbatches[-1:] * (-asked % self.parallel.pipeline)]
        items, lengths = self._items(microbatches)

        def finish(chunk, output, item):
            return score(*self._read(chunk, output, item), item.batch)

        collected = schedule.run(self._wrapped, items, lengths, self._forward, finish, train=False)
        results = (
            [self._whole(record, item.tokens) for record, item in zip(collected, items, strict=True)]
            if collected
            else []
        )
        if self.parallel.pipeline > 1:
            box = [[{k: v.cpu() for k, v in r.items()} for r in results[:asked]]]
            dist.broadcast_object_list(box, src=self.groups.last_rank, group=self.groups.pipeline)
            results = [{k: v.to(self.device) for k, v in r.items()} for r in box[0]]
        return results

    def _whole(self, record: dict[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
        if self.groups.context is not None:
            size = self.parallel.context
            for name in sorted(record):
                parts = [torch.empty_like(record[name]) for _ in range(size)]
                dist.all_gather(parts, record[name].contiguous(), group=self.groups.context)
                joined = torch.cat(parts)
                rows = torch.cat([context_rows(joined.shape[0], size, r) for r in range(size)]).to(joined.device)
                record[name] = torch.empty_like(joined).index_copy_(0, rows, joined)
        return {name: value[:tokens] for name, value in record.items()}

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory, so that a sampler can use the device. Undone
        by `reload`.
        """
        from .mcore import offload

        self._wait_for_weights()
        for chunk in self.chunks:
            graphs: Any = getattr(chunk, "graphs", None)
            if graphs is not None:
                graphs.forget()  # they hold addresses of what is moved
            if self.precision.own_fp8:
                chunk.drop_casts()  # type: ignore[operator]
        self._cast_version = -1
        self._parked = offload.park(self.chunks, self._wrapped, self.optimizer)

    def reload(self) -> None:
        """Bring back what `offload` moved."""
        from .mcore import offload

        offload.restore(self._parked)
        self._parked = []

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters with their global names, one at a time, on every rank, in the same order. Collective."""
        from .mcore import params

        own = self.local_parameters()
        yield from params.gather(own, [p.param.detach() for p in own])

    def local_parameters(self) -> list[Any]:
        """This rank's parts with their global names and shards."""
        from .mcore import params

        self._wait_for_weights()
        return params.named_parameters(self.chunks)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full gradients of the last `accumulate` under the parameters' global names. Collective; for tests and
        diagnosis.
        """
        from .mcore import optimizer as adam
        from .mcore import params

        own = [p for p in params.named_parameters(self.chunks) if p.param.requires_grad]
        yield from params.gather(own, adam.full_gradients(self.optimizer, [p.param for p in own]))

    def load_weights(self, source: Callable[[str], torch.Tensor | Cuttable | None]) -> None:
        """Overwrite parameters with their part of `source(global name)`; keep those for which it returns None. The
        optimizer's state is reset.
        """
        from .mcore import optimizer as adam

        self.weights_version += 1
        with torch.no_grad():
            for p in self.local_parameters():
                full = source(p.name)
                if full is None:
                    continue
                p.require_shape(tuple(full.shape))
                p.param.copy_(p.shard.cut(full) if isinstance(full, torch.Tensor) else full.cut(p.shard))
        if self.optimizer is not None:
            adam.refresh_masters(self.optimizer)

    def save(self, path: str | Path, extra: dict[str, Any] | None = None, *, wait: bool = True) -> None:
        """Write a checkpoint to the folder `path`, which appears only when it is complete.

        With `wait=False` the files are written in the background; the next `save` or `finish_save` waits for them and
        publishes them.
        """
        checkpoint.save(self, Path(path), extra or {}, wait)

    @property
    def writing(self) -> bool:
        """Whether this rank's part of a save is still being written in the background."""
        return self.writer is not None and self.writer.is_alive()

    def finish_save(self) -> None:
        """Wait for a save in the background, and raise its error if it had one. Collective."""
        checkpoint.finish(self)

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Restore weights, optimizer, step and generators from a checkpoint of any layout; returns the saved
        `extra`.
        """
        self.weights_version += 1
        return checkpoint.load(self, Path(path), weights_only)
