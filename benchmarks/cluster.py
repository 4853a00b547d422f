"""`python -m terrella.benchmarks.cluster`: one layout on many GPUs: training tokens/s, MFU and memory, sampled tokens,
and the seconds and bytes of a weight sync, in rows that `terrella plan --refit` reads.

By default ranks of this machine; under SLURM (`--slurm`, see launch/sbatch/bench-cluster.sbatch) one process on each
GPU. The last `--receivers` ranks do not train: each takes the place of a sampler's worker, with a GPU and a link of its
own. Without a GPU the ranks compute on the CPU over gloo: then the counts mean something and the seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from ..core.files import read_json, write_json
from ..models.config import ModelConfig
from ..models.geometry import GEOMETRIES, flops_per_token
from . import record
from .moves import SMALL, Sampler, spawn
from .rollout import recorder
from .train import PEAK_TFLOPS

SMALL_EXPERTS = replace(SMALL, family="qwen3_moe", qk_norm=True, experts=8, experts_per_token=2, expert_ffn=256)
MODELS = {"small": SMALL, "small-experts": SMALL_EXPERTS, **GEOMETRIES}
CASE = re.compile(
    r"(?P<model>\S+) (?P<batch>\d+)x(?P<sequence>\d+) TP(?P<tensor>\d+) PP(?P<pipeline>\d+) VPP(?P<virtual>\d+) "
    r"CP(?P<context>\d+) EP(?P<expert>\d+) MBS(?P<microbatch>\d+) (?P<recompute>none|full), (?P<gpus>\d+) GPUs on "
    r"(?P<nodes>\d+) nodes, (?P<receivers>\d+) receivers"
)
SIZES = ("tensor", "pipeline", "virtual", "context", "expert", "microbatch")


@dataclass(frozen=True)
class Case:
    """A layout, the step it trains, and where it ran; its name in the record says all of it."""

    model: str
    batch: int
    sequence: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    microbatch: int
    recompute: str
    gpus: int  # that train
    nodes: int
    receivers: int

    @property
    def name(self) -> str:
        return (
            f"{self.model} {self.batch}x{self.sequence} TP{self.tensor} PP{self.pipeline} VPP{self.virtual} "
            f"CP{self.context} EP{self.expert} MBS{self.microbatch} {self.recompute}, {self.gpus} GPUs on "
            f"{self.nodes} nodes, {self.receivers} receivers"
        )

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)


def find_case(name: str) -> Case | None:
    """The case of a row; None where it is none of this benchmark's."""
    match = CASE.fullmatch(name)
    if match is None:
        return None
    words = {"model", "recompute"}
    return Case(**{key: value if key in words else int(value) for key, value in match.groupdict().items()})


def sizes_of(name: str) -> ModelConfig:
    """A model by name, in a family that can be built."""
    model = MODELS[name]
    return replace(model, family="qwen3_moe", qk_norm=True) if model.experts else model


class Remote:
    """A worker in another process, called through a connection."""

    def __init__(self, name: str, path: Path, timeout_s: float) -> None:
        place = wait_for(path, timeout_s)
        self.name = name
        self.line = Client((place["host"], place["port"]), authkey=bytes.fromhex(place["key"]))

    def call(self, method: str, *args: str, timeout_s: float) -> Any:
        self.line.send((method, args))
        if not self.line.poll(timeout_s):
            raise TimeoutError(f"{self.name}: {method} gave no answer within {timeout_s:.0f} s")
        return self.line.recv()

    def accept(self, version: int | None, timeout_s: float) -> None:
        pass

    def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        raise NotImplementedError


def receive(path: Path, host: str, device: Any, timeout_s: float) -> None:
    """Be a worker: answer calls until the trainer says that it is over, or is gone."""
    sampler, key = Sampler(path.stem, device), secrets.token_bytes(32)
    with Listener((host, 0), authkey=key) as listener:
        put(path, {"host": host, "port": listener.address[1], "key": key.hex()})
        with listener.accept() as line:
            while line.poll(timeout_s):
                try:
                    method, args = line.recv()
                except EOFError:
                    return
                if method == "bytes":
                    line.send(sampler.worker.bytes)
                else:
                    line.send(sampler.call(method, *args, timeout_s=timeout_s))


def rank_main(args: argparse.Namespace) -> dict[str, Any] | None:
    """One rank; the first has the figures of all."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainers = world - args.receivers
    folder = Path(args.folder)
    host = socket.gethostname() if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world else "127.0.0.1"
    if rank >= trainers:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        receive(folder / f"receiver-{rank - trainers}.json", host, device, args.timeout)
        return None
    os.environ["WORLD_SIZE"] = str(trainers)
    figures = measure(args, case_of(args, trainers), rank, host, folder)
    return figures if rank == 0 else None


def measure(args: argparse.Namespace, case: Case, rank: int, host: str, folder: Path) -> dict[str, Any]:
    """What the first rank tells of this layout; the others take part."""
    import torch
    import torch.distributed as dist

    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine
    from ..core.mcore import setup, shim
    from ..core.mesh import Mesh
    from ..models.gpt import build_gpt
    from .trainers import cross_entropy, draw

    cuda = torch.cuda.is_available()
    if not cuda:
        shim.install()
    setup.start_process_group()
    model = sizes_of(case.model)
    parallel = ParallelConfig(
        tensor=case.tensor,
        pipeline=case.pipeline,
        virtual_pipeline=case.virtual,
        context=case.context,
        expert=case.expert,
        sequence_parallel=case.tensor > 1,
        recompute="full" if case.recompute == "full" else "none",
    )
    precision = PrecisionConfig("bf16" if cuda else "fp32")

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        result = call()
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - begun, result

    figures: dict[str, Any] = {}
    optimizer = OptimizerConfig(lr=1e-5, clip_grad=1.0)
    figures["start"], engine = timed(lambda: Engine(build_gpt(model, loaded=True), parallel, optimizer, precision, 0))
    with torch.no_grad():
        for p in engine.local_parameters():
            torch.manual_seed(sum(p.name.encode()))  # copies of a parameter are alike
            p.param.copy_(draw(p.name, p.param.shape, model.init_std, p.param.device))
    engine.load_weights(lambda name: None)  # the optimizer's copies are these too
    mesh = Mesh(rank, case.gpus, parallel)
    batches = [batch.to(engine.device) for batch in microbatches(case, model, mesh.data_rank)]
    for _ in range(args.warmup):
        engine.step(batches, cross_entropy)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, result = timed(lambda: [engine.step(batches, cross_entropy) for _ in range(args.steps)][-1])
    here = sum(int((batch.ce_weight_T > 0).sum()) for batch in batches) if mesh.is_leader else 0
    figures |= {"step": seconds / args.steps, "tokens": sum(mesh.gather_all(here)), "loss": result.metrics["loss"]}
    figures["peak"] = max(mesh.gather_all(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0))
    if args.samples:
        figures |= sample(args, model, engine, mesh, timed, folder)
    if args.receivers:
        figures |= send(args, engine, mesh, timed, host, folder)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def microbatches(case: Case, model: ModelConfig, data_rank: int) -> list[Any]:
    """A data rank's part of a step: sequences of one length."""
    import torch

    from ..core.batch import PackedBatch

    generator = torch.Generator().manual_seed(data_rank)
    each, length = case.microbatch, case.sequence
    made = []
    for _ in range(case.batch // (case.data * each)):
        tokens, targets = (torch.randint(0, model.vocab, (each * length,), generator=generator) for _ in range(2))
        made.append(
            PackedBatch(
                tokens_T=tokens,
                targets_T=targets,
                positions_T=torch.arange(length).repeat(each),
                cu_seqlens_D1=torch.arange(0, (each + 1) * length, length).int(),
                max_seqlen=length,
                ce_weight_T=torch.full((each * length,), 1.0 / (case.batch * length)),
            )
        )
    return made


def sample(args: argparse.Namespace, model: ModelConfig, engine: Any, mesh: Any, timed: Any, folder: Path) -> Any:
    """Answers of one length by the embedded sampler of every leader."""
    from ..rl.rollout.config import Embedded
    from ..rl.rollout.open import open_sampler
    from ..rl.rollout.sampler import SampleRequest, SamplingParams

    opened = open_sampler(Embedded(), engine, model, folder, mesh=mesh)
    try:
        if opened.publish:
            opened.publish(engine.steps)
        wanted = mesh.share(range(args.samples))

        def answer(turn: int) -> int:
            if not mesh.is_leader:
                return 0
            params = SamplingParams(args.new_tokens)
            prompts = {i: tuple((i + j) % model.vocab for j in range(args.prompt_tokens)) for i in wanted}
            asked = [SampleRequest(ids, (turn, i, 0, 0), params) for i, ids in prompts.items()]
            return sum(len(s.given) - sum(s.given) for s in opened.sampler.generate(asked))

        answer(0)
        seconds, own = timed(lambda: answer(1))
        return {"sampling": seconds, "sampled": sum(mesh.gather_all(own))}
    finally:
        opened.close()


def send(args: argparse.Namespace, engine: Any, mesh: Any, timed: Any, host: str, folder: Path) -> dict[str, float]:
    """Weights to all receivers, the first time unmeasured: it connects."""
    from ..rl.sync.publish import publish
    from ..rl.sync.sharded import ShardedTransport, own_parts

    first = mesh.is_main
    workers = [
        Remote(f"receiver {i}", folder / f"receiver-{i}.json", args.timeout)
        for i in range(args.receivers if first else 0)
    ]
    transport = ShardedTransport("nccl" if engine.device.type == "cuda" else "gloo", host, mesh.gather_all)
    took = [
        timed(
            lambda version=version: publish(
                transport, workers, lambda: own_parts(engine), version, sends=first, gather=mesh.gather_all
            )
        )[0]
        for version in range(1, args.steps + 2)
    ]
    sent = sum(mesh.gather_all(transport.bytes_sent)) / len(took)
    arrived = [worker.call("bytes", timeout_s=args.timeout) for worker in workers]
    return {"sync": min(took[1:]), "sync sent": sent, "sync arrived": float(sum(arrived))}


def case_of(args: argparse.Namespace, trainers: int) -> Case:
    """The case that options ask for; what cannot be cut is refused by name."""
    if args.model not in MODELS:
        raise SystemExit(f"--model {args.model}: one of {', '.join(MODELS)}")
    try:
        numbers = [int(part) for part in args.layout.split(",")]
        sizes = dict(zip(SIZES, [*numbers, *[1] * (len(SIZES) - len(numbers))], strict=True))
    except ValueError:
        raise SystemExit(f"--layout {args.layout}: write up to six whole numbers, e.g. 4,8,5,1,1,1") from None
    case = Case(
        args.model, args.batch, args.sequence, **sizes, recompute=args.recompute, gpus=trainers, nodes=args.nodes,
        receivers=args.receivers,
    )  # fmt: skip
    if trainers < 1 or trainers % (case.tensor * case.pipeline * case.context):
        raise SystemExit(f"--layout {args.layout}: does not divide the {trainers} ranks that train")
    if case.batch % (case.data * case.microbatch):
        raise SystemExit(f"--batch {case.batch}: no multiple of {case.data} data ranks x {case.microbatch} sequences")
    return case


def rows_of(case: Case, figures: dict[str, Any], peak_tflops: float | None) -> list[tuple[str, float, str]]:
    """Metric, value and unit of what was measured."""
    speed = figures["tokens"] / figures["step"] / case.gpus
    rows = [("tokens_per_s_gpu", speed, "tok/s"), ("step", figures["step"], "s"), ("start", figures["start"], "s")]
    rows += [("tokens", float(figures["tokens"]), "count")]
    if figures["peak"]:
        rows.append(("peak", figures["peak"], "GiB"))
    if peak_tflops:
        rows.append(("mfu", speed * flops_per_token(MODELS[case.model], case.sequence) / (peak_tflops * 1e12), "share"))
    if "sampled" in figures:
        rows.append(("sampled", float(figures["sampled"]), "count"))
        rows.append(("sampled_tokens_per_s", figures["sampled"] / figures["sampling"], "tok/s"))
    if "sync" in figures:
        rows += [("sync", figures["sync"], "s")]
        rows += [(name, figures[name], "bytes") for name in ("sync sent", "sync arrived")]
    return rows


def from_slurm(folder: Path, timeout_s: float) -> None:
    """The variables of a rank, as srun's tasks have them; the first says in the folder where it is found."""
    from ..core.ports import free_port

    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID", "LOCAL_WORLD_SIZE": "NTASKS_PER_NODE"}
    for name, task in names.items():
        if f"SLURM_{task}" not in os.environ:
            raise SystemExit(f"--slurm: SLURM_{task} is not set; start this with srun --ntasks-per-node=N")
        os.environ[name] = os.environ[f"SLURM_{task}"]
    if os.environ["RANK"] == "0":
        put(folder / "first.json", {"host": socket.gethostname(), "port": free_port()})
    first = wait_for(folder / "first.json", timeout_s)
    os.environ |= {"MASTER_ADDR": first["host"], "MASTER_PORT": str(first["port"])}


def put(path: Path, value: dict[str, Any]) -> None:
    """A small file that others wait for: whole once it is there, and for this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    write_json(beside, value)
    beside.chmod(0o600)
    beside.rename(path)


def wait_for(path: Path, timeout_s: float) -> dict[str, Any]:
    """What another rank put into a file."""
    limit = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{path}: not there within {timeout_s:.0f} s; do all ranks see the folder?")
        time.sleep(0.1)
    return read_json(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="small, small-experts, or a size that `terrella plan` knows")
    parser.add_argument("--layout", default="1", help="tensor,pipeline,virtual,context,expert,microbatch")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3, help="of each measurement, after --warmup ones")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--samples", type=int, default=0, help="answers by the embedded sampler; 0: none")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--receivers", type=int, default=1, help="ranks that weights are sent to; 0: none")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of this machine, receivers among them")
    parser.add_argument("--nodes", type=int, default=1, help="on which they are")
    parser.add_argument("--slurm", action="store_true", help="be one of srun's tasks")
    parser.add_argument("--folder", help="that all ranks see, new for each run")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    if (args.slurm or "RANK" in os.environ) and not args.folder:
        raise SystemExit("--folder: name a new folder that all ranks see")
    if args.slurm:
        from_slurm(Path(args.folder), args.timeout)
    case = case_of(args, int(os.environ.get("WORLD_SIZE", args.ranks)) - args.receivers)
    if "RANK" in os.environ:
        figures = rank_main(args)
        if figures is not None and args.slurm:
            write(args, case, figures)
        elif figures is not None:
            print("RESULT " + json.dumps(figures), flush=True)
        return
    folder = args.folder or tempfile.mkdtemp()
    try:
        figures = spawn(__spec__.name, args.ranks, [*sys.argv[1:], "--folder", folder], args.timeout)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    write(args, case, figures)


def write(args: argparse.Namespace, case: Case, figures: dict[str, Any]) -> None:
    """Rows of one case, printed and kept."""
    rows = recorder("cluster")
    peak = next((value for name, value in PEAK_TFLOPS.items() if name in rows.shared["gpu"]), None)
    for metric, value, unit in rows_of(case, figures, peak):
        rows.add(case.name, "terrella", metric, value, unit)
        print(f"{case.name} | {metric}: {value:,.6g} {unit}")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
