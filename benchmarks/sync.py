"""`python -m terrella.benchmarks.sync`: how long new weights take from the trainer to a vLLM process, by every way they
can travel.

A time is that of a whole `publish`: names, checksums on both sides and the reset of the prefix cache are in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from . import record
from .children import Child, wait_for_word
from .rollout import TINY, Case, random_engine, recorder, synchronize, vllm_sampler
from .train import QWEN

CASES = {"qwen2.5-1.5b bf16, 3.1 GB": Case(QWEN, 1, 1, 16, 16), "tiny": Case(TINY, 1, 1, 16, 8)}
TRANSPORTS = ("ipc", "disk", "gloo")


class ColocatedVllm:
    """vLLM as a process of its own on the trainer's device, with empty weights until the first sync."""

    def __init__(self, case: Case, engine: Any, share: float, eager: bool = False) -> None:
        from ..rl.sync.transports import IpcTransport

        self.engine, self.transport = engine, IpcTransport()
        self.sampler = vllm_sampler(case, share, most=2048, eager=eager)

    def sync(self, version: int, transport: Any = None) -> float:
        """Seconds until the sampler serves the engine's weights."""
        from ..rl.sync.names import engine_weights
        from ..rl.sync.publish import publish

        synchronize()
        begun = time.perf_counter()
        publish(transport or self.transport, [self.sampler], lambda: engine_weights(self.engine), version)
        return time.perf_counter() - begun

    def times(self, count: int, transport: Any = None) -> list[float]:
        """Seconds of further syncs, after one that warms up."""
        self.sync(0, transport)
        return [self.sync(version, transport) for version in range(1, count + 1)]


def child(name: str, ways: list[str], count: int) -> None:
    """Time the ways one after the other and print the figures as JSON."""
    import torch
    import vllm  # noqa: F401  (imported before the word to begin)

    from ..rl.sync.transports import BroadcastTransport, DiskTransport

    wait_for_word()
    engine = random_engine(CASES[name].model, lr=0)
    colocated = ColocatedVllm(CASES[name], engine, 0.2, eager=True)  # it samples nothing here
    figures: dict[str, Any] = {}
    for way in ways:
        made = {"disk": lambda: DiskTransport(Path(tempfile.mkdtemp())), "gloo": lambda: BroadcastTransport("gloo")}
        figures[way] = colocated.times(count, made[way]() if way in made else None)
        print(f"{way}: {figures[way]} {colocated.transport.took}", flush=True)
    figures["bytes"] = sum(p.param.numel() * p.param.element_size() for p in engine.local_parameters())
    figures["parts"] = colocated.transport.took
    figures["cuda"] = torch.cuda.is_available()
    print("RESULT " + json.dumps(figures), flush=True)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), help="default: 3.1 GB with a GPU, tiny without")
    parser.add_argument("--transport", action="append", choices=list(TRANSPORTS), help="default: all")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = args.transport or list(TRANSPORTS)
    if args.child:
        return child(args.child, ways, args.count)
    name = args.case or next(n for n in CASES if (n == "tiny") != torch.cuda.is_available())
    words = ["--child", name, "--count", str(args.count), *(w for way in ways for w in ("--transport", way))]
    one = Child(__spec__.name, words, Path(tempfile.mkdtemp()) / "sync.log")
    one.start()
    result = one.finish(args.timeout)
    if isinstance(result, str):
        raise SystemExit(f"{name}: failed:\n{result}")
    rows = recorder("sync")
    for way in ways:
        seconds = statistics.median(result[way])
        rows.add(name, f"terrella {way}", "seconds", seconds, "s", min(result[way]), max(result[way]))
        print(f"{name} | {way}: {seconds * 1e3:.0f} ms, {result['bytes'] / seconds / 1e9:.1f} GB/s")
    if "ipc" in ways:
        for part, seconds in result["parts"].items():
            rows.add(name, "terrella ipc", part, seconds, "s")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
