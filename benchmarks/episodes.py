"""`python -m terrella.benchmarks.episodes`: web episodes an hour, each for itself and in lock-step.

A policy of random weights clicks, scrolls and ends on the local sites, whose pages take their time as real ones do
(log-normal, by default 50 ms at the 5th and 300 ms at the 95th percentile); a word is a whole action, and one of twelve
ends the episode, so that lengths have a long tail. In lock-step all episodes that are open are sampled together once
the last page is there, and others begin when all of them have ended. Independent ones are sampled when their own page
is there, and the next begins when one has ended. Both play the same tasks by the same random numbers, through the same
worlds. The sampler is busy while it computes; the CPU of browsers is that of all processes below this one, in cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..models.config import ModelConfig
from . import record
from .rollout import random_engine, recorder
from .web import tree_cpu

LATENCY_MS = (50, 300)
WORDS = (
    'exit(message="")',
    'do(action="Scroll Down")',
    *(f'do(action="Click", element="{number}")' for number in range(10)),
)
PROMPT = 384  # tokens
TAG = """
WebWaits: {{world: web, config: {{backend: {backend}, max_steps: 30, max_parse_failures: 5, max_repeats: 5,
  boxes: false, latency_ms: [{low}, {high}], deadline_s: 60}}}}
"""
MODELS = {"tiny": (1, 32, 2), "4 layers of 256": (4, 256, 4), "8 layers of 512": (8, 512, 8)}


@dataclass(frozen=True)
class Outcome:
    """One rollout. `said` is every answer by its episode and turn."""

    seconds: float
    busy_s: float
    own_s: float  # CPU seconds of this process: sampler, prompts, page model
    browser_s: float  # and of those below it
    episodes: int
    said: list[tuple[Any, ...]]

    @property
    def per_hour(self) -> float:
        return 3600 * self.episodes / self.seconds

    @property
    def busy(self) -> float:
        return 100 * self.busy_s / self.seconds


def tokenizer() -> Any:
    from ..data.tokenizers import PieceTokenizer

    return PieceTokenizer([*map(chr, range(32, 127)), "\n", *WORDS])


def players(
    backend: str, at_once: int, folder: Path, browsers: int | None, latency_ms: Sequence[float] = LATENCY_MS
) -> Any:
    """The worlds, as a stage has them."""
    from ..rl.webrl.config import WebSiteEnvironment
    from ..rl.webrl.prompts import Prompter
    from ..rl.webrl.sites import Players

    tags = folder / "tags.yaml"
    tags.write_text(TAG.format(backend=backend, low=latency_ms[0], high=latency_ms[1]))
    settings = WebSiteEnvironment(
        kind="web-site",
        tag="WebWaits",
        tag_files=[str(tags)],
        max_prompt_tokens=PROMPT,
        pad_prompts_to=PROMPT,
        at_once=at_once,
        browsers=browsers,
    )
    return Players(settings, Prompter(tokenizer(), PROMPT, pad_to=PROMPT))


class Busy:
    """Time that a sampler computes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - begun


def watch(sampler: Any, busy: Busy) -> None:
    """Measure a sampler's calls, or a stream's turns."""
    name = "turn" if hasattr(sampler, "turn") else "generate"
    original = getattr(sampler, name)

    def generate(requests: list[Any]) -> list[Any]:
        with busy.measured():
            return original(requests)

    @contextmanager
    def turn() -> Iterator[None]:
        with original(), busy.measured():
            yield

    setattr(sampler, name, turn if name == "turn" else generate)


def measure(engine: Any, model: ModelConfig, worlds: Any, episodes: int, independent: bool, seed: int) -> Outcome:
    """Play so many tasks to their end."""
    from ..rl.rollout.config import Embedded
    from ..rl.rollout.open import as_stream, open_sampler
    from ..rl.rollout.sampler import SamplingParams
    from ..rl.webrl.sites import Seat, pool_of

    tasks = pool_of(worlds.settings)
    seats = [Seat(tasks[(seed * episodes + i) % len(tasks)], i, 0) for i in range(episodes)]
    config = Embedded(cache_gib=8.0 if engine.device.type == "cuda" else None)
    opened = open_sampler(config, engine, model, Path(worlds.settings.tag_files[0]).parent)
    if independent:
        opened = as_stream(opened)
    busy = Busy()
    watch(opened.sampler, busy)
    first = model.vocab - len(WORDS)
    try:
        begun, own, tree = time.monotonic(), time.process_time(), tree_cpu(os.getpid())
        played = worlds.play(opened.sampler, seats, SamplingParams(1, allowed=(first, model.vocab)), seed, 1)
        seconds, own_s = time.monotonic() - begun, time.process_time() - own
        browser_s = max(0.0, tree_cpu(os.getpid()) - tree - own_s)
    finally:
        opened.close()
    faults = [t.reward for t in played if not isinstance(t.reward, float)]
    if faults:
        raise RuntimeError(f"{len(faults)} of {episodes} episodes failed, the first by {faults[0]}")
    said = [(t.prompt_id, *(s.ids[-1] for s in t.sequences)) for t in played]
    return Outcome(seconds, busy.seconds, own_s, browser_s, episodes, said)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["dom", "chromium"], default="dom", help="the page model, or Chromium")
    parser.add_argument("--model", choices=list(MODELS), help="default: tiny without a GPU")
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=32, help="episodes that are open together")
    parser.add_argument("--browsers", type=int, help="default: by cores and memory")
    parser.add_argument(
        "--latency-ms", type=float, nargs=2, default=LATENCY_MS, help="of a page: the 5th and the 95th percentile"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    name = args.model or [*MODELS][2 * torch.cuda.is_available()]
    layers, hidden, heads = MODELS[name]
    model = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=2 * hidden,
        vocab=tokenizer().vocab_size,
        max_positions=PROMPT + 8,
        init_std=0.02,
    )
    engine, found = random_engine(model, 0.0), dict[str, list[Outcome]]()
    where = {"dom": "page model", "chromium": "Chromium"}[args.backend]
    with tempfile.TemporaryDirectory() as folder:
        worlds = players(args.backend, args.at_once, Path(folder), args.browsers, args.latency_ms)
        measure(engine, model, worlds, args.at_once, False, 10**6)  # worlds and browsers are opened before
        for seed in range(args.repeats):
            for mode in ("lock-step", "independent"):
                one = measure(engine, model, worlds, args.episodes, mode == "independent", seed)
                found.setdefault(mode, []).append(one)
                load = f"load {os.getloadavg()[0]:.0f}"
                print(
                    f"{where}, {mode}: {one.per_hour:,.0f} episodes/h in {one.seconds:.1f} s, sampler busy "
                    f"{one.busy:.1f} %, CPU {one.own_s:.1f} s here and {one.browser_s:.1f} s in browsers, {load}",
                    flush=True,
                )
        worlds.worlds.clear()
    rows = recorder("episodes")
    case = f"{where}, {args.episodes} episodes, {args.at_once} at once"
    case += f" in {args.browsers} browsers" if args.browsers else ""
    case += f", pages {args.latency_ms[0]:g}-{args.latency_ms[1]:g} ms, {name}"
    pairs = list(zip(found["lock-step"], found["independent"], strict=True))
    same = [100 * sum(a == b for a, b in zip(x.said, y.said, strict=True)) / args.episodes for x, y in pairs]
    for mode, outcomes in found.items():

        def put(metric: str, values: list[float], unit: str, impl: str = f"terrella, {mode}") -> None:
            rows.add(case, impl, metric, median(values), unit, min(values), max(values))

        put("episodes", [one.per_hour for one in outcomes], "1/h")
        put("sampler busy", [one.busy for one in outcomes], "%")
        put("CPU of this process", [one.own_s / one.seconds for one in outcomes], "cores")
        put("CPU of browsers", [one.browser_s / one.seconds for one in outcomes], "cores")
        put("turns of an episode", [sum(len(s) - 1 for s in o.said) / o.episodes for o in outcomes], "part")
    ratios = [y.per_hour / x.per_hour for x, y in pairs]
    rows.add(case, "terrella, independent", "x lock-step", median(ratios), "part", min(ratios), max(ratios))
    rows.add(
        case,
        "terrella, independent",
        "episodes as in lock-step, %",
        sum(same) / len(same),
        "part",
        min(same),
        max(same),
    )
    print(f"{where}: {median(ratios):.2f} x lock-step, {sum(same) / len(same):.1f} % of the episodes the same")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
