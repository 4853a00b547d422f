"""`python -m terrella.benchmarks.ahead`: trajectories an hour of RL in a slow world, by how far rollouts may be ahead.

Episodes have two to six turns, and after each of them their world takes 100 ms, as a browser or a service does. With
`ahead: 0` a step is sampled turn by turn, all episodes together, and then trained. Ahead, episodes wait for nobody,
those of k + 1 steps are under way at once, and training goes on meanwhile: what is gained is the time in which the
policy would only wait for worlds. Steps, samples and the correction for older weights are the same everywhere, and so
is what was learnt if the rewards of the last steps are. Seeds may be run side by side, one to a command with a file of
its own, and `--merge` makes one row of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from ..models.config import ModelConfig
from . import record
from .rollout import random_engine, recorder

STOP = 0
LAST = 10  # steps whose mean reward is the final one


@dataclass(frozen=True)
class Case:
    """Groups of `samples` episodes. An answer has at most `most` tokens and should begin with the prompt's letter."""

    model: ModelConfig
    lr: float
    prompts: int = 8
    samples: int = 8
    most: int = 8
    turns: tuple[int, int] = (2, 6)  # at least and at most, of an episode
    cache_gib: float | None = None


def _model(layers: int, hidden: int, heads: int, vocab: int, init_std: float) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=2 * hidden,
        vocab=vocab,
        max_positions=128,
        init_std=init_std,
    )


CASES = {
    "tiny": Case(_model(1, 32, 2, 6, 0.1), 1e-2, prompts=4, samples=6, most=3),
    "tiny, 4-12 turns": Case(_model(1, 32, 2, 4, 0.1), 1e-2, prompts=2, samples=6, most=3, turns=(4, 12)),
    # converges within 60 steps at every k up to 4; chosen on seeds 100 and 101
    "tiny, 8-12 turns": Case(_model(1, 32, 2, 4, 0.1), 5e-3, prompts=4, samples=6, most=3, turns=(8, 12)),
    "8 layers of 512": Case(_model(8, 512, 8, 64, 0.02), 3e-4, prompts=32, cache_gib=2.0),
}


class Spell:
    """An episode: the world says a letter in every turn, and after the answer takes its time."""

    def __init__(self, prompt_id: int, sample_index: int, case: Case, step_s: float) -> None:
        self.prompt_id, self.sample_index, self.step_s = prompt_id, sample_index, step_s
        fewest, most = case.turns
        self.letter = 1 + prompt_id * 7 % (case.model.vocab - 1)
        self.left = fewest + prompt_id % (most - fewest + 1)
        self.ids, self.right = (self.letter,), []

    def context(self) -> tuple[int, ...] | None:
        return self.ids if self.left else None

    def receive(self, sample: Any) -> None:
        time.sleep(self.step_s)
        self.right.append(float(sample.ids[0] == self.letter))
        self.ids, self.left = (*self.ids, *sample.ids, self.letter), self.left - 1

    def score(self) -> tuple[list[float], float, dict]:
        return self.right, sum(self.right) / len(self.right), {}


@dataclass(frozen=True)
class Outcome:
    """What a run gave. Lengths are those of all answers that were sampled, and of those that were trained on."""

    seconds: float
    cpu_s: float  # of this process
    trajectories: int
    rewards: list[float]
    oldest: list[float]
    sampled: Counter[int]
    trained: Counter[int]

    @property
    def per_hour(self) -> float:
        return 3600 * self.trajectories / self.seconds

    @property
    def final(self) -> float:
        return mean(self.rewards[-LAST:])

    @property
    def before(self) -> float:
        """The reward of as many steps before the last ones: the same as the final one where learning is over."""
        return mean(self.rewards[-2 * LAST : -LAST] or self.rewards)


def train(case: Case, ahead: int, seed: int, steps: int, step_s: float, folder: Path) -> Outcome:
    """One run, with a journal as a stage has it."""
    from ..core.mesh import Mesh
    from ..data.trajectory import Role
    from ..rl.algorithms.config import GRPO
    from ..rl.journal import Journal, JournalSampler, JournalStream
    from ..rl.loop import Trainer
    from ..rl.loop_settings import LoopSettings
    from ..rl.multiturn import Limits, rollout_worlds
    from ..rl.objective import logprob_score
    from ..rl.rollout.config import Embedded
    from ..rl.rollout.open import as_stream, open_sampler
    from ..rl.rollout.sampler import SamplingParams

    engine, frozen = random_engine(case.model, case.lr, seed), random_engine(case.model, 0.0, seed)
    config = Embedded(cache_gib=case.cache_gib)
    opened = open_sampler(config, engine, case.model, folder, ahead=ahead)
    if ahead:
        opened = as_stream(opened, aside=True)
    kind = JournalStream if ahead else JournalSampler
    journal = Journal(folder / "journal")
    sampler = kind(opened.sampler, journal, lambda: engine.steps, staleness=ahead)  # type: ignore[arg-type]
    limits = Limits(workers=case.prompts * case.samples)
    rewards: list[float] = []
    oldest: list[float] = []
    trained: Counter[int] = Counter()

    class Learner(Trainer):
        def episodes(self, step: int) -> list[Any]:
            first = step * case.prompts
            made = [(first + i, k) for i in range(case.prompts) for k in range(case.samples)]
            return [lambda p=p, k=k: Spell(p, k, case, step_s) for p, k in made]

        def play(self, sampler: Any, episodes: list[Any], seed: int) -> list[Any]:
            return rollout_worlds(sampler, episodes, self.params, seed, limits)

        def reference(self, batches: list[Any]) -> list[Any]:
            return [r["logprob"] for r in frozen.score(batches, logprob_score(1.0))]

        def publish(self, version: int) -> None:
            if opened.publish:
                opened.publish(version)

        def rest(self) -> dict[str, float]:
            return opened.rest() if opened.rest else {}

        def trained(self, kept: Any) -> None:
            spans = (span for t in kept for s in t.sequences for span in groupby(s.roles))
            trained.update(len([*span]) for role, span in spans if role == Role.ACTION)

        def record(self, step: int, values: dict[str, Any], episodes: Any, trajectories: Any) -> None:
            rewards.append(values["reward/mean"])
            oldest.append(values.get("staleness/max", 0.0))

    settings = LoopSettings(microbatch_tokens=8192, drift_gate=0.05, seed=seed, ahead=ahead)
    params = SamplingParams(case.most, stop_ids=(STOP,))
    begun, cpu = time.monotonic(), time.process_time()
    try:
        Learner(engine, sampler, GRPO(tis_cap=2.0), params, Mesh(), settings).run(range(steps))
        seconds, cpu_s = time.monotonic() - begun, time.process_time() - cpu
    finally:
        opened.close()
    sampled = sampler.lengths[seed] if isinstance(sampler, JournalStream) else trained
    return Outcome(seconds, cpu_s, steps * case.prompts * case.samples, rewards, oldest, sampled, trained)


def measure(case: Case, ks: list[int], seeds: range, steps: int, step_s: float) -> dict[int, list[Outcome]]:
    """The outcomes of all seeds by how far rollouts were ahead."""
    found: dict[int, list[Outcome]] = {k: [] for k in ks}
    for seed in seeds:
        for k in ks:
            with tempfile.TemporaryDirectory() as folder:
                found[k].append(train(case, k, seed, steps, step_s, Path(folder)))
            one = found[k][-1]
            busy = f"{one.seconds:.1f} s, {one.cpu_s:.1f} s of them computing"
            print(
                f"ahead {k}, seed {seed}: {one.per_hour:,.0f} trajectories/h ({busy}), reward {one.final:.3f}",
                flush=True,
            )
    return found


def merged(rows: list[record.Row]) -> list[record.Row]:
    """One row for the rows of several seeds on one machine: their mean, least and most."""
    groups: dict[tuple[str, ...], list[record.Row]] = {}
    for row in rows:
        groups.setdefault((row.run_id, row.case, row.impl, row.metric), []).append(row)
    return [
        replace(
            same[-1],
            value=mean(row.value for row in same),
            p20=min(row.value for row in same),
            p80=max(row.value for row in same),
        )
        for same in groups.values()
    ]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), help="default: tiny without a GPU")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=100.0, help="what a world takes for a step")
    parser.add_argument("--merge", type=Path, nargs="+", help="run nothing: rows of these files, seeds made one")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    if args.merge:
        record.append(merged([row for path in args.merge for row in record.read(path)]), args.out)
        return
    name = args.case or [*CASES][torch.cuda.is_available()]
    if torch.cuda.is_available():  # kernels are compiled once, and not in the first run's time
        measure(CASES[name], args.ahead[-1:], range(1), 2, 0.0)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    found = measure(CASES[name], args.ahead, seeds, args.steps, args.step_ms / 1000)
    rows = recorder("ahead")
    case = f"{name}, {args.steps} steps, world {args.step_ms:g} ms"
    for k, outcomes in found.items():

        def put(metric: str, values: list[float], unit: str, impl: str = f"terrella, ahead {k}") -> None:
            rows.add(case, impl, metric, mean(values), unit, min(values), max(values))

        put("trajectories", [one.per_hour for one in outcomes], "1/h")
        put("final reward", [one.final for one in outcomes], "part")
        put("reward before", [one.before for one in outcomes], "part")
        put("reward of all steps", [mean(one.rewards) for one in outcomes], "part")
        put("oldest token", [max(one.oldest) for one in outcomes], "part")
        for which in ("sampled", "trained"):
            counts = [getattr(one, which) for one in outcomes]
            put(f"tokens of an answer, {which}", [sum(c.elements()) / c.total() for c in counts], "part")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
