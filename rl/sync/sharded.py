"""Sends weights from the trainer ranks as they hold them: each rank sends its parts to all workers over a group of its
own, and the workers assemble them. Nothing is gathered in the trainer; experts are sent from the ranks that hold them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.mcore.params import Shard
from ...core.ports import free_port
from ...core.store import open_store
from ...models.config import ModelConfig
from ...models.families import FAMILIES, hf_names
from ...models.families.base import VOCABULARIES, qkv_runs
from ...models.lora import is_added
from .flat_buffer import flatten
from .transports import Target, broadcast, buckets, call_all, make_group, with_checksums

if TYPE_CHECKING:
    from ...core.engine import Engine

Parts = Iterable[tuple[str, torch.Tensor, Shard]]


def own_parts(engine: Engine) -> Iterator[tuple[str, torch.Tensor, Shard]]:
    """What this rank sends: its parts of the Hugging Face tensors, without duplicates of other ranks' parts and without
    value heads. Adapters cannot be merged part by part.
    """
    builder: Any = engine.build
    groups = engine.groups
    for p in engine.local_parameters():
        copy = groups.expert_replica_rank if p.expert else groups.replica_rank
        whole_elsewhere = p.shard.dim is None and not p.expert and groups.tensor_rank
        if not (is_added(p.name) or p.tied_copy or copy or whole_elsewhere):
            yield from hf_parts(builder.model, p.name, p.param.detach(), p.shard)


def hf_parts(
    config: ModelConfig, name: str, part: torch.Tensor, shard: Shard
) -> Iterator[tuple[str, torch.Tensor, Shard]]:
    """A part of a global tensor as parts of its Hugging Face tensors."""
    names, one = hf_names(FAMILIES[config.family], name), replace(shard, halves=1)
    if name in VOCABULARIES:
        first = shard.rank * len(part)
        yield names[0], part[: max(0, config.vocab - first)], one
    elif "linear_qkv" in name:
        sizes = config.heads, config.kv_heads, config.head_dim
        runs = [qkv_runs(*sizes, rank, shard.size) for rank in range(shard.size)]
        own = runs[shard.rank]
        pieces = list(zip(own, part.split([high - low for _, low, high in own]), strict=True))
        for index, hf in enumerate(names):  # not all ranks that share a key head hold rows of it
            holders = [rank for rank, found in enumerate(runs) if any(which == index for which, _, _ in found)]
            if shard.rank in holders:
                rows = torch.cat([piece for (which, _, _), piece in pieces if which == index])
                yield hf, rows, Shard(0, holders.index(shard.rank), len(holders))
    elif len(names) > 1:  # gate and up, each cut on its own
        for hf, tensor in zip(names, part.chunk(len(names)), strict=True):
            yield hf, tensor, one
    else:
        yield names[0], part, shard


class Assembly:
    """The receiving side: collects parts until a tensor is complete."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[int, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor, place: dict[str, Any]) -> torch.Tensor | None:
        """The whole tensor once its last part is added, else None."""
        shard = Shard(**place)
        if shard.size == 1:
            return tensor
        found = self.waiting.setdefault(name, {})
        found[shard.rank] = tensor
        if len(found) < shard.size:
            return None
        del self.waiting[name]
        return shard.join([found[rank] for rank in range(shard.size)])


class ShardedTransport:
    """Every trainer rank has one and calls `send` with the parts it holds; only the main rank has targets and calls
    them. `gather` returns every trainer rank's value, on all of them.
    """

    def __init__(
        self, backend: str, host: str, gather: Callable[[Any], list[Any]], bucket_bytes: int = 1 << 28
    ) -> None:
        self.backend, self.host, self.gather, self.bucket_bytes = backend, host, gather, bucket_bytes
        self.store: dist.Store | None = None
        self.group: Any = None
        self.connected = False
        self.sent = 0
        self.bytes_sent = 0  # sent to each worker by this rank

    def connect(self, sends: bool, targets: Sequence[Target], timeout_s: float) -> None:
        """Build a group for each sending rank: that rank, then every worker of every target. Collective."""
        workers: dict[str, int] = {}
        error, port = None, free_port() if sends else 0
        try:
            workers = {t.name: len(t.call("terrella_state", timeout_s=timeout_s)) for t in targets}
            if sends:
                self.store = open_store(self.host, port, True, timedelta(seconds=timeout_s), wait=False)
        except Exception as problem:  # the others must learn of it, or they would wait
            error = f"{type(problem).__name__}: {problem}"
        per_rank = self.gather((error, sum(workers.values()), (self.host, port) if sends else None))
        if problems := [problem for problem, _, _ in per_rank if problem]:
            raise RuntimeError(f"weight groups: {problems[0]}")
        addresses = [address for _, _, address in per_rank if address]
        world = 1 + sum(count for _, count, _ in per_rank)
        answers: dict[str, list[dict[str, Any]]] = {}
        threads, first = [], 1
        for target in targets:
            args = (json.dumps(addresses), str(first), str(world), self.backend, str(timeout_s))
            threads.append(
                threading.Thread(
                    target=lambda target=target, args=args: answers.update(
                        call_all([target], "terrella_join_all", *args, timeout_s=timeout_s)
                    ),
                    daemon=True,
                )
            )
            threads[-1].start()
            first += workers[target.name]
        if self.store is not None:
            self.group = make_group(self.store, 0, world, self.backend, timeout_s)
        for thread in threads:
            thread.join(timeout_s)
        failed = {name: a for name, found in answers.items() for a in found if "error" in a}
        if failed or len(answers) != len(targets):
            raise RuntimeError(f"weight groups of {world}: {failed or 'a target did not answer'}")
        self.connected = True

    def send(
        self, weights: Parts, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        parts = list(weights)
        if not self.connected:
            self.connect(bool(parts), targets, timeout_s)
        self.sent += 1
        prefix, answers = f"sync-{self.sent}", {}
        receiving = threading.Thread(
            target=lambda: answers.update(
                call_all(targets, "terrella_receive_parts", prefix, str(version), timeout_s=timeout_s)
            ),
            daemon=True,
        )
        if targets:
            receiving.start()
        if self.store is not None:
            self._send(parts, prefix, timeout_s)
        if not targets:
            return {}
        receiving.join(timeout_s + 5)
        return answers or {t.name: [{"error": f"no answer within {timeout_s:.0f} s"}] for t in targets}

    def _send(self, parts: list[tuple[str, torch.Tensor, Shard]], prefix: str, timeout_s: float) -> None:
        assert self.store is not None
        places, count = {name: vars(shard) for name, _, shard in parts}, 0
        for count, bucket in enumerate(buckets(((name, part) for name, part, _ in parts), self.bucket_bytes), 1):
            flat, entries = flatten(bucket)
            described = [{**entry, "shard": places[entry["name"]]} for entry in with_checksums(flat, entries)]
            self.store.set(f"{prefix}/{count - 1}", json.dumps({"bytes": flat.numel(), "tensors": described}))
            broadcast(self.group, flat, timeout_s)
            self.bytes_sent += flat.numel()
        self.store.set(f"{prefix}/{count}", "{}")

    def close(self) -> None:
        """Drop the groups, so that the next send builds new ones with the targets that are alive then."""
        self.group, self.store, self.connected = None, None, False
