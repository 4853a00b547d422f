"""`python -m terrella.benchmarks.ragged`: the embedded sampler where answers end early and episodes have many turns.

Weights are random, so that every token is about as likely as any other; a set of stop ids of the right size then gives
answers of a given mean length with a long tail. A memory bound on the cache shows what rows that grow are worth against
rows that are reserved.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from . import record
from .rollout import TINY, random_weights, recorder, synchronize
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
    mean: int  # tokens of an answer
    most: int
    turns: int = 1
    observation: int = 0
    cache_gib: float | None = None


CASES = {
    "qwen2.5-1.5b 256x8, mean 600, most 8192, 48 GiB": Ragged(QWEN, 256, 8, 128, 600, 8192, cache_gib=48.0),
    "qwen2.5-1.5b 32x8, 20 turns of 32 + 100": Ragged(QWEN, 32, 8, 200, 32, 64, 20, 100),
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
    params = SamplingParams(case.most, stop_ids=tuple(stops.tolist()))
    prompts = torch.randint(0, case.model.vocab, (case.prompts, case.prompt), generator=draw).tolist()
    contexts = [tuple(prompt) for prompt in prompts for _ in range(case.samples)]
    sampled = 0
    for turn in range(case.turns):
        requests = [SampleRequest(ids, (seed, i, turn), params) for i, ids in enumerate(contexts)]
        given = torch.randint(0, case.model.vocab, (len(contexts), case.observation), generator=draw).tolist()
        samples = sampler.generate(requests)
        sampled += sum(len(s.ids) for s in samples)
        contexts = [ids + s.ids + tuple(seen) for ids, s, seen in zip(contexts, samples, given, strict=True)]
    return sampled


def main() -> None:
    import torch

    from ..rl.rollout.embedded import EmbeddedSampler

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="default: all but tiny with a GPU, tiny without"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = recorder("ragged")
    for name in args.case or [n for n in CASES if n.startswith("tiny") != torch.cuda.is_available()]:
        case = CASES[name]
        weights = random_weights(case.model)
        steps = [0]
        sampler = EmbeddedSampler(
            lambda w=weights: w,
            case.model,
            version=lambda s=steps: s[0],
            cache_gib=case.cache_gib,
            continuous=True,
            keep=True,
        )
        # compiles, at every batch size
        play(sampler, replace(case, turns=min(case.turns, 2), mean=16, most=min(case.most, 96)), 1)
        for number in range(args.rounds):
            steps[0] += 1
            sampler.rest()
            synchronize()
            begun = time.perf_counter()
            tokens = play(sampler, case, 2 + number)
            synchronize()
            seconds, used = time.perf_counter() - begun, sampler.rest()
            rows.add(name, "terrella embedded", "generation", seconds, "s")
            rows.add(name, "terrella embedded", "speed", tokens / seconds, "tok/s")
            print(f"{name}: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tok/s, {used}", flush=True)
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
