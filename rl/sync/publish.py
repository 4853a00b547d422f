"""One weight sync: send, compare every worker's checksums, retry, and stop the run if some worker stays incomplete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import SyncError
from .adapter import AdapterTransport
from .sharded import Parts, ShardedTransport
from .transports import BroadcastTransport, DiskTransport, Target, Transport, Weights

log = logging.getLogger("terrella")


@dataclass(frozen=True)
class SyncReport:
    """What a sync cost."""

    version: int
    seconds: float
    attempts: int
    tensors: int


def publish(
    transport: Transport | ShardedTransport,
    targets: Sequence[Target],
    weights: Callable[[], Weights | Parts],
    version: int,
    *,
    attempts: int = 3,
    timeout_s: float = 300.0,
    sends: bool = True,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    revive: Callable[[], None] = lambda: None,
) -> SyncReport:
    """Bring all targets to `version`. With several trainer ranks every rank calls this: `weights()` is collective;
    ranks with `sends` send, each to its own targets, and with a `ShardedTransport` the others send too. `revive` is
    called before every attempt, on all ranks: a target may die while it is sent to."""
    start = time.monotonic()
    problems: list[str] = []
    for attempt in range(1, attempts + 1):
        answers: dict[str, list[dict[str, Any]]] = {}
        revive()
        if sends:
            for target in targets:
                target.accept(None, timeout_s)
        stream, problems = iter(weights()), []
        if sends or isinstance(transport, ShardedTransport):
            try:
                answers = transport.send(stream, version, targets if sends else [], timeout_s)  # type: ignore[arg-type]
                problems = faults(answers, version)
                for target in targets if sends and not problems else ():
                    target.accept(version, timeout_s)
            except Exception as error:
                problems = [f"sender: {type(error).__name__}: {error}"]
        for _ in stream:  # all ranks iterate over the whole stream together, even if sending failed
            pass
        # all ranks retry, or none
        problems = [fault for faults in gather(problems) for fault in faults]
        if not problems:
            tensors = max((a.get("tensors", 0) for workers in answers.values() for a in workers), default=0)
            return SyncReport(version, time.monotonic() - start, attempt, tensors)
        log.warning("weight sync: version %d, attempt %d of %d: %s", version, attempt, attempts, "; ".join(problems))
        if isinstance(transport, BroadcastTransport | ShardedTransport):
            transport.close()  # a failed send may have left its group unusable
    raise SyncError(f"weight sync: version {version} failed {attempts} times: {'; '.join(problems)}")


def send_again(
    transport: Transport | ShardedTransport,
    alone: BroadcastTransport,
    target: Target,
    weights: Callable[[], Weights],
    version: int,
    timeout_s: float,
) -> None:
    """Bring one restarted target to the version that the others hold: from that version's files if `transport` writes
    any, else through `alone`, a transport to this target only.
    """
    if isinstance(transport, DiskTransport | AdapterTransport):
        answers = transport.load(transport.path(version), version, [target], timeout_s)
        if faults(answers, version):
            raise SyncError(f"weight sync: version {version} again: {'; '.join(faults(answers, version))}")
        target.accept(version, timeout_s)
        return
    publish(alone, [target], weights, version, timeout_s=timeout_s)
    if isinstance(transport, BroadcastTransport | ShardedTransport):
        transport.close()  # its group includes a dead worker; the next publish builds a new one


def faults(answers: dict[str, list[dict[str, Any]]], version: int) -> list[str]:
    """What went wrong, by target; empty if all workers hold the complete version."""
    problems = []
    for target, workers in answers.items():
        for number, answer in enumerate(workers):
            if "error" in answer:
                problems.append(f"{target}: {answer['error']}")
            elif answer["damaged"]:
                problems.append(
                    f"{target}, worker {number}: tensor {answer['damaged'][0]} arrived damaged "
                    f"({len(answer['damaged'])} in all)"
                )
            elif answer["version"] != version:
                problems.append(f"{target}, worker {number}: has version {answer['version']}, not {version}")
    return problems
