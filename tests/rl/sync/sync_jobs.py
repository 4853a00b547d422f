"""Weights of a trainer's ranks on their way to workers, run in ranks of the pool. Helper module, not a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from terrella.rl.sync.names import engine_weights
from terrella.rl.sync.publish import publish
from terrella.rl.sync.sharded import ShardedTransport, own_parts
from terrella.tests.parallel import jobs
from terrella.tests.rl.sync.sync_targets import Engine as Target

WIDE = {"hidden": 128, "heads": 8, "head_dim": 16, "ffn": 256, "vocab": 509}


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def send_parts(parallel: dict[str, Any], kind: str = "dense", kv_heads: int = 4) -> dict[str, Any]:
    """Two syncs to two workers that live in the first rank: whether they hold what a gather gives, and the bytes that
    this rank sent to each of them.
    """
    model = replace(jobs.KINDS[kind].get("model", jobs.DENSE), **WIDE, kv_heads=kv_heads)
    engine = jobs.make_engine(parallel, model)
    main = dist.get_rank() == 0
    targets = [Target("one"), Target("two")] if main else []
    transport = ShardedTransport("gloo", "127.0.0.1", everyone, bucket_bytes=1 << 18)
    for version in (1, 2):
        report = publish(
            transport, targets, lambda: own_parts(engine), version, timeout_s=120, sends=main, gather=everyone
        )
        assert report.attempts == 1
    wanted = dict(engine_weights(engine))
    same = all(
        t.worker.loaded.keys() == wanted.keys() and all(torch.equal(t.worker.loaded[n], w) for n, w in wanted.items())
        for t in targets
    )
    payload = sum(w.numel() * w.element_size() for w in wanted.values())
    return {"same": same, "sent": transport.bytes_sent / 2, "payload": payload, "version": [t.version for t in targets]}
