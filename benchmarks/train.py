"""`python -m terrella.benchmarks.train`: training throughput of one model beside its rivals, each in a process of its
own, in one run.

Every implementation trains the same geometry on the same tokens in one microbatch. Regime `master`: bf16 weights with
fp32 master weights, fp32 gradients and clipping at 1.0, which is how this project trains. Regime `pure`: weights and
optimizer state in bf16.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ..models.config import VIDEO_GPT, ModelConfig
from ..models.geometry import GEOMETRIES, flops_per_token
from . import record
from .children import Child, wait_for_word

QWEN = ModelConfig(
    family="qwen2",
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    vocab=151936,
    max_positions=32768,
    rope_theta=1e6,
    tied=True,
    qkv_bias=True,
)
TINY = ModelConfig(
    family="qwen2", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, tied=True, qkv_bias=True
)
TINY_EXPERTS = replace(
    TINY, family="qwen3_moe", qkv_bias=False, qk_norm=True, experts=8, experts_per_token=2, expert_ffn=32
)
CASES: dict[str, tuple[ModelConfig, list[int]]] = {
    "qwen2.5-1.5b 4x4096": (QWEN, [4096] * 4),
    "qwen2.5-1.5b packed 16k": (QWEN, [7000, 2500, 1000, 3000, 884, 1500, 500]),
    "video-gpt 127M 8x2024": (VIDEO_GPT, [2024] * 8),
    "tiny 4x64": (TINY, [64] * 4),
    "tiny experts 4x64": (TINY_EXPERTS, [64] * 4),
}
SIZED = re.compile(r"(?P<size>[^/ ]+)(?:/(?P<layers>\d+))? (?P<count>\d+)x(?P<length>\d+)")
BOTH = ("master", "pure")
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "terrella": {"regimes": BOTH},
    "terrella graphs": {"regimes": ("master",), "needs": "cuda", "dense": True},
    "terrella fp8": {"regimes": BOTH, "needs": "cuda", "dense": True},
    "terrella fp8 forward": {"regimes": ("master",), "needs": "cuda", "dense": True},
    "terrella fp8 all": {"regimes": BOTH, "needs": "cuda", "dense": True},
    "terrella fp8 + head": {"regimes": ("master",), "needs": "cuda", "dense": True},
    "terrella fp8 all + head": {"regimes": BOTH, "needs": "cuda", "dense": True},
    "transformers liger": {"regimes": BOTH, "needs": "liger_kernel"},
    "transformers liger fa4": {"regimes": BOTH, "needs": "flash_attn.cute"},
    "transformers liger autocast": {"regimes": ("master",), "needs": "liger_kernel"},
    "transformers sdpa": {"regimes": BOTH},
    "terrella TE": {"regimes": BOTH, "needs": "transformer_engine"},
    "terrella TE fp8": {"regimes": BOTH, "needs": "transformer_engine"},
    "megatron-core TE": {"regimes": BOTH, "needs": "transformer_engine", "even": True},
    "transformers compile": {"regimes": BOTH, "needs": "cuda"},
    "transformers torchao": {"regimes": BOTH, "needs": "torchao", "dense": True},
}
# a name that holds another comes first
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
}


def find_case(name: str) -> tuple[ModelConfig, list[int]]:
    """A named case, or `SIZE[/LAYERS] COUNTxLENGTH`: a size of `terrella plan`, cut to so many layers."""
    if name in CASES:
        return CASES[name]
    match = SIZED.fullmatch(name)
    if match is None or match["size"] not in GEOMETRIES:
        raise ValueError(
            f"case '{name}': neither one of {', '.join(CASES)}, nor SIZE[/LAYERS] COUNTxLENGTH with a size of "
            f"{', '.join(GEOMETRIES)}"
        )
    model = GEOMETRIES[match["size"]]
    if model.experts:
        model = replace(model, family="qwen3_moe", qk_norm=True)
    layers = int(match["layers"] or model.layers)
    return replace(model, layers=min(layers, model.layers)), [int(match["length"])] * int(match["count"])


def mean_length(lengths: list[int]) -> float:
    """The sequence length that the average token attends over, for counting arithmetic."""
    return sum(n * n for n in lengths) / sum(lengths)


def child(impl: str, regime: str, case: str, steps: int, kernels: Path | None) -> None:
    """Time one implementation and print the figures as JSON. Imports are done before the word to start comes."""
    import torch

    from . import trainers

    if impl.startswith(("terrella", "megatron")):
        from ..models import gpt  # noqa: F401
    else:
        import transformers.models.auto.modeling_auto  # noqa: F401
    wait_for_word()
    cuda = torch.cuda.is_available()
    step = trainers.make_step(impl, regime, *find_case(case))
    losses = [step() for _ in range(4)]  # graphs are captured in the third
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(step())
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    # a graph's memory is not counted as allocated between its runs, yet nobody else has it
    used = torch.cuda.max_memory_reserved if impl.endswith("graphs") else torch.cuda.max_memory_allocated
    peak = used() / 2**30 if cuda else 0.0
    print("RESULT " + json.dumps({"times": times, "losses": losses, "peak_gib": peak}), flush=True)
    if kernels is not None:
        (kernels / re.sub(r"[ /]", "_", f"{impl}-{regime}-{case}.txt")).write_text(kernel_table(step, cuda))


def kernel_table(step: Callable[[], float], cuda: bool) -> str:
    """Time of one step by kernel, and the longest pauses between two of them."""
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        step()
    table = profile.key_averages().table(
        sort_by="self_device_time_total" if cuda else "self_cpu_time_total", row_limit=45
    )
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == kind)
    pauses, last, before = [], spans[0][0], "start"
    for begin, end, name in spans:
        if begin > last:
            pauses.append((begin - last, before, name))
        if end > last:
            last, before = end, name
    lines = [
        f"pauses {sum(p[0] for p in pauses) / 1e3:.2f} ms of {(last - spans[0][0]) / 1e3:.2f} ms, {len(spans)} kernels"
    ]
    lines += [
        f"{length / 1e3:8.3f} ms after {a[:70]} before {b[:70]}" for length, a, b in sorted(pauses, reverse=True)[:25]
    ]
    return table + "\n" + "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Work:
    """One line of the table."""

    case: str
    impl: str
    regime: str

    @property
    def name(self) -> str:
        return self.impl if self.regime == "master" else f"{self.impl} (pure bf16)"


def missing(need: str | None, te: Path | None) -> str:
    """Why an implementation cannot run here, or nothing."""
    import torch

    if need == "cuda" or need == "transformer_engine":
        if not torch.cuda.is_available():
            return "no GPU"
    if need == "transformer_engine" and te is not None:
        return "" if (te / need).is_dir() else f"no {need} in {te}"
    if need not in (None, "cuda") and not _installed(need):
        return f"{need} is not installed"
    return ""


def _installed(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(name) is not None


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    cases_help = (
        f"one of: {', '.join(CASES)}; or SIZE[/LAYERS] COUNTxLENGTH, e.g. 'llama3-70b/2 1x4096' or 'qwen3-30b-a3b/6 "
        "4x4096'; default: 1.5B with a GPU, tiny without"
    )
    parser.add_argument("--case", action="append", help=cases_help)
    parser.add_argument("--impl", action="append", choices=list(IMPLEMENTATIONS), help="default: all that can run")
    parser.add_argument("--regime", choices=["master", "pure", "both"], default="master")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each implementation")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument(
        "--te", type=Path, help="a folder with TransformerEngine, for the rows that use it and for no other"
    )
    parser.add_argument(
        "--logs", type=Path, help="where the output of each implementation goes; default: a temporary folder"
    )
    parser.add_argument("--kernels", type=Path, help="folder for a table of the time by kernel of each implementation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        impl, regime, case = args.child.split("|")
        return child(impl, regime, case, args.steps, args.kernels)
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if cuda else ""
    packages = (
        "torch",
        "triton",
        "transformers",
        "megatron-core",
        "transformer_engine",
        "liger_kernel",
        "flash-attn-4",
        "torchao",
    )
    versions = " ".join(f"{name} {_version(name, args.te)}" for name in packages)
    recorder = record.Recorder(
        "train", record.command_line("python -m terrella.benchmarks.train", sys.argv[1:]), gpu, versions
    )
    peak = next((v for k, v in PEAK_TFLOPS.items() if k in gpu), None)
    cases = args.case or (["qwen2.5-1.5b 4x4096"] if cuda else ["tiny 4x64"])
    for case in cases:
        find_case(case)
    works = []
    for case, impl in itertools.product(cases, args.impl or IMPLEMENTATIONS):
        known = IMPLEMENTATIONS[impl]
        model, lengths = find_case(case)
        why = missing(known.get("needs"), args.te)
        if known.get("even") and len(set(lengths)) > 1:
            why = why or "even sequences only"
        if known.get("dense") and model.experts:
            why = why or "no experts"
        if why:
            print(f"{case} | {impl}: left out, {why}")
            continue
        works += [Work(case, impl, regime) for regime in known["regimes"] if args.regime in (regime, "both")]
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    words = ["--steps", str(args.steps), *(["--kernels", str(args.kernels)] if args.kernels else []), "--child"]
    children = []
    for number, work in enumerate(works):
        te = args.te if IMPLEMENTATIONS[work.impl].get("needs") == "transformer_engine" else None
        arguments = [*words, f"{work.impl}|{work.regime}|{work.case}"]
        children.append(Child(__spec__.name, arguments, logs / f"{number}.log", te, watch_memory=False))
    for place, (work, one) in enumerate(zip(works, children, strict=True)):
        for following in children[place : place + 2]:
            following.start()  # while one is timed the next only imports
        result = one.finish(args.timeout)
        if isinstance(result, str):
            print(f"{work.case} | {work.name}: failed:\n{result}", flush=True)
            continue
        _record(recorder, work, result, peak)
        record.append(recorder.rows, args.out)  # at once: a run that is cut short keeps what it measured
        recorder.rows.clear()


def _record(recorder: record.Recorder, job: Work, result: dict[str, Any], peak: float | None) -> None:
    model, lengths = find_case(job.case)
    name = job.name
    rates = sorted(sum(lengths) / t for t in result["times"])
    middle = statistics.median(rates)
    recorder.add(
        job.case, name, "tokens_per_s", middle, "tokens/s", rates[len(rates) // 5], rates[-1 - len(rates) // 5]
    )
    recorder.add(job.case, name, "peak", result["peak_gib"], "GiB")
    recorder.add(job.case, name, "first_loss", result["losses"][0], "nat")
    share = ""
    if peak is not None:
        percent = middle * flops_per_token(model, mean_length(lengths)) / peak / 1e10
        recorder.add(job.case, name, "mfu", percent, "%")
        share = f" {percent:.1f} % of {peak:.0f} TFLOP/s"
    memory = f"peak {result['peak_gib']:.1f} GiB"
    print(
        f"{job.case} | {name}: {middle:,.0f} tokens/s{share}, {memory}, first loss {result['losses'][0]:.4f}",
        flush=True,
    )


def _version(name: str, beside: Path | None = None) -> str:
    """Of an installed package, or of one in a folder; a dash where there is none."""
    where = [str(beside)] if beside else []
    wanted = name.replace("-", "_").lower()
    found = metadata.distributions(path=[*where, *sys.path])
    return next((d.version for d in found if (d.metadata["Name"] or "").replace("-", "_").lower() == wanted), "-")


if __name__ == "__main__":
    main()
