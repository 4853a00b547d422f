"""World speed on one core: vectorised and single steps, room generation, search; rivals in the same run where they are
installed.

Rates are per CPU second of the one thread that runs, so that a busy machine does not change them. Rooms and maps come
from a pool: generation is measured apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..rl.worlds.baselines import VALIDATION_SEEDS, ceiling, random_policy
from ..rl.worlds.frozen_lake import FrozenLakeConfig, make_map
from ..rl.worlds.sokoban import RoomConfig, make_room
from ..rl.worlds.sudoku import SudokuConfig, make_puzzle
from ..rl.worlds.tasks import load_tasks
from . import record


@dataclass(frozen=True)
class Figure:
    """One measurement over repeats."""

    case: str
    impl: str
    metric: str
    samples: list[float]
    unit: str


def _measure(run: Callable[[], int], repeats: int) -> list[float]:
    """Things done per CPU second, once per repeat; the first run only warms up."""
    rates = []
    for repeat in range(repeats + 1):
        start = time.process_time()
        count = run()
        spent = time.process_time() - start
        if repeat:
            rates.append(count / spent)
    return rates


def steps(repeats: int) -> Iterator[Figure]:
    """Steps per second, one world at a time."""
    for tag in ("SimpleSokoban", "FrozenLake"):
        world, choices = load_tasks()[tag].make(), random.Random(0).choices((1, 2, 3, 4), k=3000)
        world.reset(123)
        start = world.snapshot()

        def single(world=world, start=start, choices=choices) -> int:
            for action in choices:
                if world.step(action).done:
                    world.restore(start)
            return len(choices)

        yield Figure(tag, "terrella single world", "steps", _measure(single, repeats), "1/s")


def interfaces(repeats: int) -> Iterator[Figure]:
    """Sokoban through the interfaces to other trainers, where they are installed; over OpenEnv and verifiers, both
    sides together.
    """
    from ..rl.exchange.named_worlds import Play, find_world

    named, words = find_world("SimpleSokoban"), random.Random(0).choices(("Up", "Down", "Left", "Right"), k=300)

    def played(reset: Callable[[], object], step: Callable[[str], bool]) -> Callable[[], int]:
        def run() -> int:
            reset()
            for word in words:
                if step(word):
                    reset()
            return len(words)

        return run

    play = Play(named)
    run = played(lambda: play.reset(123), lambda w: play.step(w).done)
    yield Figure("SimpleSokoban", "terrella play", "steps", _measure(run, repeats), "1/s")
    if importlib.util.find_spec("gymnasium"):
        from ..rl.exchange.to_gymnasium import WorldEnv

        env = WorldEnv(named)
        run = played(lambda: env.reset(seed=123), lambda w: any(env.step(w)[2:4]))
        yield Figure("SimpleSokoban", "terrella gymnasium", "steps", _measure(run, repeats), "1/s")
    if importlib.util.find_spec("openenv"):
        import uvicorn

        from ..rl.exchange.from_openenv import OpenEnvEnvironment
        from ..rl.exchange.to_openenv import app_of

        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(uvicorn.Config(app_of(named), log_level="warning"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            client = OpenEnvEnvironment(f"http://127.0.0.1:{listening.getsockname()[1]}")
            wire = client._open()
            run = played(
                lambda: client._ask(wire, "reset", {"seed": 123}),
                lambda w: client._ask(wire, "step", {"text": w})["done"],
            )
            yield Figure("SimpleSokoban", "terrella openenv", "steps", _measure(run, repeats), "1/s")
            wire.close()
            server.should_exit = True
            thread.join(30)
    if importlib.util.find_spec("verifiers"):
        from ..rl.exchange.from_verifiers import VerifiersEnvironment

        wrapped = VerifiersEnvironment("terrella-worlds", 1, 1, settings={"world": "SimpleSokoban"})
        run = partial(_episodes, lambda: wrapped.play(0), words, 3)
        yield Figure("SimpleSokoban", "terrella verifiers", "steps", _measure(run, repeats), "1/s")


def _episodes(begin: Callable[[], Generator[Any, str, Any]], words: Sequence[str], count: int) -> int:
    """Play so many episodes with these answers; how many were given."""
    steps = 0
    for _ in range(count):
        playing = begin()
        next(playing)
        try:
            for word in words:
                playing.send(word)
                steps += 1
        except StopIteration:
            steps += 1
    return steps


def generation(repeats: int) -> Iterator[Figure]:
    """Milliseconds for one instance."""
    cases: dict[str, tuple[Callable[[int], object], int]] = {
        "sokoban 6x6 1 box": (lambda s: make_room(RoomConfig(), s), 200),
        "sokoban 6x6 2 boxes": (lambda s: make_room(RoomConfig(boxes=2, search_depth=30), s), 100),
        "sokoban 8x8 2 boxes": (lambda s: make_room(RoomConfig(8, 8, 2, 10), s), 100),
        "sokoban 10x10 2 boxes": (lambda s: make_room(RoomConfig(10, 10, 2, 300), s), 48),
        "frozen_lake 4x4": (lambda s: make_map(FrozenLakeConfig(), s), 200),
        "sudoku 4x4": (lambda s: make_puzzle(SudokuConfig(), s), 200),
    }
    for case, (make, count) in cases.items():

        def run(make: Callable[[int], object] = make, count: int = count) -> int:
            for seed in range(123, 123 + count):
                make(seed)
            return count

        yield Figure(case, "terrella", "generation", [1e3 / rate for rate in _measure(run, repeats)], "ms")
    shop = load_tasks()["WebShop"].make()
    shop.reset(0)

    def search() -> int:
        for goal in shop.goals[:100]:
            shop.index.search(goal.instruction)
        return 100

    yield Figure(
        "webshop 200 products", "terrella bm25", "search", [1e3 / rate for rate in _measure(search, repeats)], "ms"
    )


def rivals(repeats: int) -> Iterator[Figure]:
    """The public environments, stepped the way their users do."""
    if importlib.util.find_spec("gymnasium"):
        import gymnasium

        lake = gymnasium.make_vec("FrozenLake-v1", num_envs=64, vectorization_mode="sync")
        lake.reset(seed=0)
        actions = np.random.default_rng(0).integers(0, 4, size=(100, 64))

        def run() -> int:
            for action_B in actions:
                lake.step(action_B)
            return actions.size

        yield Figure(
            "frozen_lake 4x4", f"gymnasium {gymnasium.__version__} sync 64", "steps", _measure(run, repeats), "1/s"
        )
    if importlib.util.find_spec("gym_sokoban"):
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        game = SokobanEnv(dim_room=(6, 6), max_steps=10_000, num_boxes=1, reset=False)
        random.seed(0)
        np.random.seed(0)
        game.reset()

        def push() -> int:
            for action in random.Random(0).choices((1, 2, 3, 4), k=1000):
                game.step(action, observation_mode="tiny_rgb_array")
            return 1000

        yield Figure("sokoban 6x6 1 box", "gym_sokoban 0.0.6", "steps", _measure(push, repeats), "1/s")


def scores() -> Iterator[Figure]:
    """The random policy and the ceiling on the 128 validation seeds, 100 rollouts each, over five seeds of the
    policy.
    """
    for tag in ("SimpleSokoban", "FrozenLake"):
        task = load_tasks()[tag]
        estimates = [random_policy(task, VALIDATION_SEEDS, 100, seed=seed) for seed in range(5)]
        for k in (1, 8):
            yield Figure(tag, "random policy", f"pass@{k}", [100 * f[k].value for f in estimates], "%")
        top = 100 * (ceiling(task, VALIDATION_SEEDS) or 0.0)
        yield Figure(tag, "ceiling", "pass@1", [top], "%")


def processor() -> str:
    """The processor's name, as Linux knows it."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="CSV file to append to")
    settings = parser.parse_args()
    versions = f"python {platform.python_version()}, numpy {np.__version__}"
    recorder = record.Recorder(
        "worlds", "python -m terrella.benchmarks.worlds", f"none (one core, {processor()})", versions
    )
    repeats = settings.repeats
    for figure in (*steps(repeats), *interfaces(repeats), *generation(repeats), *rivals(repeats), *scores()):
        p20, median, p80 = (float(p) for p in np.percentile(figure.samples, [20, 50, 80]))
        recorder.add(figure.case, figure.impl, figure.metric, median, figure.unit, p20, p80)
        print(
            (
                f"{figure.case:24} {figure.impl:28} {figure.metric:10} {median:14.4g} {figure.unit:4} [{p20:.4g}, "
                f"{p80:.4g}]"
            ),
            flush=True,
        )
    record.append(recorder.rows, settings.out)


if __name__ == "__main__":
    main()
