"""`python -m terrella.benchmarks.moves`: bytes that ranks move, and seconds, when a model starts, is saved, loaded and
sent to samplers, and the bytes' ratio to what has to move.

By default ranks of this machine; under torchrun those of its world. Samplers are receivers without vLLM in the first
rank, each of which wants the whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from . import record
from .rollout import recorder

SMALL = ModelConfig(family="qwen2", layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=1024, vocab=8192)
RATIO = 1.1  # what the bytes may come to


class Sampler:
    """A target whose one worker counts what arrives."""

    def __init__(self, name: str, device: Any) -> None:
        from ..rl.sync.receiver import WeightReceiver

        class Worker(WeightReceiver):
            rank = 0

            def get_model(self) -> Any:
                return self

            def reload_weights(self, weights_iterator: Any) -> None:
                self.bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in weights_iterator)

        self.name, self.worker = name, Worker()
        self.worker.device, self.worker.model_runner = device, self.worker

    def call(self, method: str, *args: str, timeout_s: float) -> list[dict[str, Any]]:
        return [getattr(self.worker, method)(*args)]

    def accept(self, version: int | None, timeout_s: float) -> None:
        pass

    def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        raise NotImplementedError


def rank_main(args: argparse.Namespace) -> None:
    """One rank; the first prints the figures of all."""
    import torch
    import torch.distributed as dist

    from ..core import checkpoint
    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine
    from ..core.mcore import setup, shim
    from ..models.geometry import GEOMETRIES
    from ..models.gpt import build_gpt
    from ..rl.sync.publish import publish
    from ..rl.sync.sharded import ShardedTransport, own_parts

    if not torch.cuda.is_available():
        shim.install()
    setup.start_process_group()
    model = SMALL if args.model == "small" else GEOMETRIES[args.model]
    parallel = ParallelConfig(
        tensor=args.tensor, pipeline=args.pipeline, expert=args.expert, sequence_parallel=args.tensor > 1
    )
    first, folder = dist.get_rank() == 0, Path(args.folder) / "step-000000"

    def everyone(value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        dist.barrier()
        begun = time.perf_counter()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - begun, result

    figures: dict[str, Any] = {}
    precision = PrecisionConfig("bf16" if torch.cuda.is_available() else "fp32")

    def build() -> Engine:
        return Engine(build_gpt(model, loaded=True), parallel, OptimizerConfig(), precision, 0)

    figures["start s"], engine = timed(build)
    with torch.no_grad():
        for p in engine.local_parameters():
            p.param.fill_(0.01)
    engine.load_weights(lambda name: None)  # the optimizer's copies are these too
    own = sum(p.param.numel() * p.param.element_size() for p in engine.local_parameters())
    figures["save s"], _ = timed(lambda: engine.save(folder, {}))
    written = (folder / f"shard_{dist.get_rank():05d}.safetensors").stat().st_size
    reader = checkpoint.CheckpointReader(folder, verify=False)
    elements = sum(torch.Size(reader.shape(name)).numel() for name in reader.names())
    readers, opened = [], checkpoint.open_verified

    def open_and_keep(path: Path) -> Any:
        readers.append(opened(path))
        return readers[-1]

    checkpoint.open_verified = open_and_keep
    figures["load s"], _ = timed(lambda: engine.load(folder))
    figures["load weights s"], _ = timed(lambda: engine.load(folder, weights_only=True))
    checkpoint.open_verified = opened
    samplers = [Sampler(f"sampler {i}", engine.device) for i in range(args.samplers)] if first else []
    backend = "nccl" if args.nccl else "gloo"
    transport = ShardedTransport(backend, args.host, everyone)
    seconds = []
    for version in range(1, args.count + 2):  # the first connects
        took, _ = timed(
            lambda version=version: publish(
                transport, samplers, lambda: own_parts(engine), version, sends=first, gather=everyone
            )
        )
        seconds.append(took)
    figures["sync s"] = min(seconds[1:])
    sent = transport.bytes_sent / len(seconds)
    # save, load: fp32 weights, and no moments before the first update; sync: in the model's own type
    own_read = [reader.bytes_read for reader in readers]
    totals = [sum(column) for column in zip(*everyone((written, own_read[0], own_read[1], own, sent)), strict=True)]
    payload = samplers[0].worker.bytes if samplers else 0
    if first:
        figures |= {"save ratio": totals[0] / (4 * elements), "load ratio": totals[1] / (4 * elements)}
        figures["load weights ratio"] = totals[2] / (totals[3] * 4 / precision_bytes(precision.params))
        figures |= {"sync ratio": totals[4] / payload, "payload": payload}
        print("RESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def precision_bytes(name: str) -> float:
    return {"fp32": 4.0, "bf16": 2.0}[name]


def spawn(module: str, ranks: int, words: list[str], timeout_s: float) -> dict[str, Any]:
    """Ranks of this machine that run a module; the first's figures."""
    from ..core.ports import free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", module, *words]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        out, _ = started[0].communicate(timeout=timeout_s)
        for line in out.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"{module}: no figures; the first rank ended with code {started[0].returncode}")
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{module}: no figures within {timeout_s:.0f} s") from None
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="small, or a size by name as `terrella plan` knows it")
    parser.add_argument("--ranks", type=int, default=4)
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}", type=int, default=2 if name == "tensor" else 1)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--nccl", action="store_true", help="sync by NCCL; needs a GPU for each rank and sampler")
    parser.add_argument("--host", default="127.0.0.1", help="of this rank, as the samplers see it")
    parser.add_argument("--folder", help="where the checkpoint is written; all ranks see it")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        if not args.folder:
            raise SystemExit("--folder: name a folder that all ranks see")
        rank_main(args)
        return
    folder = args.folder or tempfile.mkdtemp()
    words = [*sys.argv[1:], "--folder", folder]
    try:
        figures = spawn(__spec__.name, args.ranks, words, args.timeout)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    layout = f"TP{args.tensor} PP{args.pipeline} EP{args.expert}, {args.ranks} ranks, {args.samplers} samplers"
    rows = recorder("moves")
    for name, value in figures.items():
        if name != "payload":
            what, unit = name.rsplit(" ", 1)
            rows.add(f"{args.model} {layout}", "terrella", what, value, "s" if unit == "s" else "part")
            print(f"{args.model} {layout} | {name}: {value:.3f}")
    record.append(rows.rows, args.out)
    over = [name for name, value in figures.items() if name.endswith("ratio") and value > RATIO]
    if over:
        raise SystemExit(f"moves: {over[0]} is above {RATIO}")


if __name__ == "__main__":
    main()
