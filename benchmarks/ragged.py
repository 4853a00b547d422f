"""`python -m terrella.benchmarks.ragged`: the embedded sampler where answers end early and episodes have many turns,
beside vLLM in the same loop.

Weights are random, so that every token is about as likely as any other; a set of stop ids of the right size then gives
answers of a given mean length. With a `median` every answer has a limit of its own, out of one list with a long tail. A
memory bound on the cache shows what rows that grow are worth against rows that are reserved. vLLM runs with prefix
caching, graphs for all batch sizes and its newest runner.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from . import record
from .rollout import TINY, Case, long_tail, random_engine, random_weights, recorder, synchronize
from .sync import ColocatedVllm
from .train import QWEN


@dataclass(frozen=True)
class Ragged:
    """Groups of `samples` requests; after every turn the answer and `observation` given tokens go behind the
    context.
    """

    model: ModelConfig
    prompts: int
    samples: int
    prompt: int
    mean: int  # tokens of an answer, as stop ids end it
    most: int
    turns: int = 1
    observation: int = 0
    cache_gib: float | None = None
    median: int = 0  # of the answers' limits, which have a long tail up to `most`
    least: int = 0  # or limits between this and `most`, evenly

    @property
    def length(self) -> int:
        """Of the longest context with its last answer."""
        return self.prompt + self.turns * self.most + (self.turns - 1) * self.observation


ADAPTERS = "terrella embedded, adapters"  # of rank 64, merged once a version
IMPLEMENTATIONS = ("terrella embedded", ADAPTERS, "vllm")
NEVER = 10**9  # a mean length that only a single stop id gives
CASES = {
    "qwen2.5-1.5b 32x8, long-tailed to 16384": Ragged(QWEN, 32, 8, 128, NEVER, 16384, median=500),
    "qwen2.5-1.5b 256x8, mean 600, most 8192, 48 GiB": Ragged(QWEN, 256, 8, 128, 600, 8192, cache_gib=48.0),
    "qwen2.5-1.5b 32x8, 20 turns of 32 + 100": Ragged(QWEN, 32, 8, 200, 32, 64, 20, 100),
    "qwen2.5-1.5b 32x8, 5 turns of 155 + 130": Ragged(QWEN, 32, 8, 450, NEVER, 200, 5, 130, 10.0, least=110),
    "tiny 4x2, 3 turns": Ragged(replace(TINY, max_positions=512), 4, 2, 20, 10, 40, 3, 7),
}


def play(sampler: Any, case: Ragged, seed: int) -> int:
    """All turns of all episodes; returns the tokens sampled."""
    import torch

    from ..rl.rollout.sampler import SampleRequest, SamplingParams

    draw = torch.Generator().manual_seed(seed)
    stops = torch.randperm(case.model.vocab, generator=torch.Generator().manual_seed(0))[
        : max(1, case.model.vocab // case.mean)
    ]
    rows, ids = case.prompts * case.samples, tuple(stops.tolist())
    limits = [case.most] * rows
    if case.median:
        limits = long_tail(rows, case.median, case.most, sigma=1.2)
    elif case.least:
        limits = torch.randint(case.least, case.most + 1, (rows,), generator=draw).tolist()
    params = {limit: SamplingParams(limit, stop_ids=ids) for limit in set(limits)}
    prompts = torch.randint(0, case.model.vocab, (case.prompts, case.prompt), generator=draw).tolist()
    contexts = [tuple(prompt) for prompt in prompts for _ in range(case.samples)]
    sampled = 0
    for turn in range(case.turns):
        asked = zip(contexts, limits, strict=True)
        requests = [SampleRequest(ids, (seed, i, turn), params[limit]) for i, (ids, limit) in enumerate(asked)]
        given = torch.randint(0, case.model.vocab, (len(contexts), case.observation), generator=draw).tolist()
        samples = sampler.generate(requests)
        sampled += sum(len(s.ids) for s in samples)
        contexts = [ids + s.ids + tuple(seen) for ids, s, seen in zip(contexts, samples, given, strict=True)]
    return sampled


def make_sampler(impl: str, case: Ragged, versions: list[int]) -> Any:
    """A sampler with random weights."""
    import torch

    from ..rl.rollout.embedded import EmbeddedSampler

    if impl == "vllm":
        shape = Case(case.model, case.prompts, case.samples, case.length - 1, 1)
        served = ColocatedVllm(shape, random_engine(case.model, lr=0), 0.8 if torch.cuda.is_available() else 0.2)
        served.sync(1)
        return served.sampler
    weights = adapted(case.model, versions) if impl == ADAPTERS else random_weights(case.model).copy
    return EmbeddedSampler(
        weights, case.model, version=lambda: versions[0], cache_gib=case.cache_gib, continuous=True, keep=True
    )


def adapted(model: ModelConfig, versions: list[int]) -> Callable[[], dict[str, Any]]:
    """The weights of an engine with adapters, which count as trained when the version changes."""
    from ..models.lora import LoraConfig
    from ..rl.rollout.open import sampling_weights

    engine = random_engine(model, lr=0, lora=LoraConfig(64, 64.0))
    merged = sampling_weights(engine)

    def weights() -> dict[str, Any]:
        engine.weights_version = versions[0]
        return merged()

    return weights


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="default: all but tiny with a GPU, tiny without"
    )
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS[0], help="one in a process")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    for name in args.case or [n for n in CASES if n.startswith("tiny") != torch.cuda.is_available()]:
        case, versions, rows = CASES[name], [0], recorder("ragged")
        sampler = make_sampler(args.impl, case, versions)
        rest = getattr(sampler, "rest", dict)
        # compiles, at every batch size
        play(sampler, replace(case, turns=min(case.turns, 2), mean=16, most=min(case.most, 96), median=0), 1)
        seconds, speeds = [], []
        for number in range(args.rounds):
            versions[0] += 1
            rest()
            synchronize()
            begun = time.perf_counter()
            tokens = play(sampler, case, 2 + number)
            synchronize()
            seconds.append(time.perf_counter() - begun)
            speeds.append(tokens / seconds[-1])
            used = rest()
            print(
                f"{name} | {args.impl}: {tokens:,} tokens in {seconds[-1]:.2f} s, {speeds[-1]:,.0f} tok/s, {used}",
                flush=True,
            )
        rows.add(name, args.impl, "generation", statistics.median(seconds), "s", min(seconds), max(seconds))
        rows.add(name, args.impl, "speed", statistics.median(speeds), "tok/s", min(speeds), max(speeds))
        for figure in ("cache_pages", "cache_waste", "prompt_reuse"):
            if f"time/{figure}" in used:
                rows.add(name, args.impl, figure, used[f"time/{figure}"], "pages" if "pages" in figure else "share")
        record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
