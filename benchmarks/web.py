"""Steps a second of the web worlds: the page model on one core, and Chromium over parallel contexts on MiniWoB++ pages.

All steps are oracle actions with everything that belongs to them: acting, waiting, the observation as text, resets and
judging. The page model is given per CPU second of its one thread. Chromium is given twice: by the clock, and per CPU
second of everything it starts (Python, the driver, the browser) times the number of cores, which a busy machine does
not change.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import platform
import time
from pathlib import Path
from typing import Any

from ..rl.worlds.web.dom import parse_cached
from ..rl.worlds.web.world import WebWorld
from . import record
from .worlds import processor

PAGES = (
    "click-button",
    "click-checkboxes",
    "click-link",
    "click-option",
    "click-tab-2",
    "enter-text",
    "login-user",
    "read-table",
    "choose-list",
)


def dom_rates(repeats: int, *, warm: bool) -> list[float]:
    """Steps per CPU second over the test tasks of the local sites; `warm` keeps the pages that were parsed before."""
    world, scripts = WebWorld(split="test"), []
    for seed in range(len(world.tasks)):
        world.reset(seed)
        while not world.done:
            world.step(world.demonstrate())
        scripts.append(list(world.actions))
    rates = []
    for _ in range(repeats):
        if not warm:
            parse_cached.cache_clear()
        steps, began = 0, time.process_time()
        for seed, actions in enumerate(scripts):
            world.reset(seed)
            for action in actions:
                result = world.step(action)
            steps += len(actions)
            assert result.reward == 1.0, (seed, actions)
        rates.append(steps / (time.process_time() - began))
    return rates


def tree_cpu(root: int) -> float:
    """CPU seconds of a process and all below it, those that have ended included: a renderer that was thrown away has
    cost something.
    """
    parents, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            # its own, and its ended children's
            spent[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in spent:
        above: int | None = pid
        while above is not None and above != root:
            above = parents.get(above)
        total += spent[pid] if above == root else 0.0
    return total


def _browse(number: int, seconds: float, ready: Any, results: Any) -> None:
    world = WebWorld(source="miniwob", backend="chromium", pages=PAGES, max_steps=15)
    world.reset(number)
    ready.wait(300)
    steps = solved = episodes = 0
    began, cpu, seed = time.monotonic(), tree_cpu(os.getpid()), number
    while time.monotonic() - began < seconds:
        world.reset(seed)
        for _ in range(8):  # a few instances of one page, as a worker that trains on it would do
            while not world.done:
                world.step(world.demonstrate())
                steps += 1
            solved, episodes = solved + int(world.score), episodes + 1
            seed += len(PAGES)
            world.reset(seed)
        seed += 1
    results.put((steps, time.monotonic() - began, tree_cpu(os.getpid()) - cpu, solved, episodes))
    ready.wait(300)
    world.close()


def chromium_rates(workers: int, seconds: float) -> tuple[float, float, float]:
    """Steps a second by the clock, CPU seconds of a step, and the share of solved episodes."""
    context = mp.get_context("spawn")
    ready, results = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=_browse, args=(n, seconds, ready, results), daemon=True) for n in range(workers)
    ]
    for process in processes:
        process.start()
    counts = [results.get(timeout=400) for _ in processes]
    for process in processes:
        process.join(60)
    wall = sum(steps / clock for steps, clock, *_ in counts)
    cpu = sum(f[2] for f in counts) / sum(f[0] for f in counts)
    return wall, cpu, sum(f[3] for f in counts) / sum(f[4] for f in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--workers",
        type=int,
        default=4,
        help="browsers, each with one context; more than cores, as each waits for frames",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of browsing")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="CSV file to append to")
    settings = parser.parse_args()
    recorder = record.Recorder(
        "web", "python -m terrella.benchmarks.web", f"none (CPU, {processor()})", f"python {platform.python_version()}"
    )

    def put(case: str, impl: str, metric: str, samples: list[float], unit: str) -> None:
        ordered = sorted(samples)
        low, middle, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8))
        recorder.add(case, impl, metric, middle, unit, low, high)
        print(f"{case:34} {impl:28} {metric:12} {middle:10.4g} {unit} [{low:.4g}, {high:.4g}]", flush=True)

    for warm in (False, True):
        name = "terrella page model, " + ("pages seen before" if warm else "pages new")
        put("local sites, 207 test tasks", name, "steps", dom_rates(settings.repeats, warm=warm), "1/s")
    if not settings.no_browser:
        wall, cpu, solved = chromium_rates(settings.workers, settings.seconds)
        case = f"MiniWoB++, {len(PAGES)} pages, {settings.workers} contexts"
        put(case, "terrella Chromium", "steps", [wall], "1/s")
        put(case, "terrella Chromium", "CPU of a step", [1000 * cpu], "ms")
        cores = len(os.sched_getaffinity(0))
        put(case, "terrella Chromium", f"steps per CPU second x {cores}", [cores / cpu], "1/s")
        put(case, "terrella oracle", "solved", [100 * solved], "%")
    record.append(recorder.rows, settings.out)


if __name__ == "__main__":
    main()
