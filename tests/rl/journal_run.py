"""A small training run over a journal, without torch: a child process that the journal's test kills at random
points.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from terrella.core.files import write_atomic
from terrella.rl.journal import Journal, JournalSampler, JournalStream
from terrella.rl.rollout.ahead import Ahead
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.rl.rollout.stream import Stream

STEPS, PROMPTS, GROUP, EVERY = 9, 3, 2, 3


class Dice:
    """Samples that depend on the weights and the key, and are counted on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights, self.version = folder, 1, 0

    def generate(self, requests):
        with open(self.folder / "generated.txt", "a") as stream:
            stream.write("\n" * len(requests))
        made = [random.Random(f"{self.weights}/{r.key}").randrange(1000) for r in requests]
        return [Sample((number,), (-1.0,), "length", self.version) for number in made]


def run(folder: Path) -> None:
    """Train to the last step, from the newest checkpoint."""
    checkpoint = folder / "checkpoint.json"
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "weights": 1}
    journal = Journal(folder / "journal")
    journal.resume(saved["step"])
    dice = Dice(folder)
    dice.weights, dice.version = saved["weights"], saved["step"]
    sampler = JournalSampler(dice, journal, lambda: dice.version)
    for step in range(saved["step"], STEPS):
        prompts = list(range(step * PROMPTS, (step + 1) * PROMPTS))
        journal.note("issued", step, prompts)
        requests = [SampleRequest((1,), (0, p, k, 0), SamplingParams(1)) for p in prompts for k in range(GROUP)]
        samples = [s for r in requests for s in sampler.generate([r])]  # one by one: a kill may fall between any two
        for s in samples:
            dice.weights = (dice.weights * 31 + s.ids[0]) % (1 << 61)
        dice.version = step + 1
        journal.note("trained", step, prompts)
        if (step + 1) % EVERY == 0:
            write_atomic(checkpoint, json.dumps({"step": step + 1, "weights": dice.weights}))
            journal.note("saved", step + 1)
            journal.prune(step + 1)
    write_atomic(folder / "done.json", json.dumps({"weights": dice.weights, "reused": sampler.reused}))


AHEAD = 2


class Walk:
    """Two turns; the second context has the first answer in it."""

    def __init__(self, prompt_id: int, sample_index: int) -> None:
        self.prompt_id, self.sample_index, self.said = prompt_id, sample_index, ()

    def context(self):
        return None if len(self.said) == 2 else (1, *self.said)

    def receive(self, sample) -> None:
        self.said += sample.ids

    def score(self):
        return [0.0, 0.0], 0.0, {}


def walks(step: int) -> list[Walk]:
    return [Walk(p, k) for p in range(step * PROMPTS, (step + 1) * PROMPTS) for k in range(GROUP)]


def run_ahead(folder: Path) -> None:
    """Train to the last step, from the newest checkpoint, while later steps are sampled."""
    checkpoint = folder / "checkpoint.json"
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "weights": 1, "used": []}
    journal = Journal(folder / "journal")
    journal.resume(saved["step"], newest=saved["step"])
    dice = Dice(folder)
    dice.weights, dice.version, used = saved["weights"], saved["step"], saved["used"]
    stream = Stream(dice)
    sampler = JournalStream(stream, journal, lambda: dice.version, staleness=AHEAD)

    def begin(step: int):
        episodes = walks(step)
        journal.note("issued", step, sorted({walk.prompt_id for walk in episodes}))
        return lambda: rollout(sampler, episodes, SamplingParams(1), 0)

    source = Ahead(begin, range(saved["step"], STEPS), AHEAD, 60.0)
    for step in range(saved["step"], STEPS):
        source.reach(step)
        trajectories = source.take(step)
        versions = [s.weight_version for t in trajectories for s in t.sequences]
        assert all(dice.version - AHEAD <= version <= dice.version for version in versions), versions
        used.append([[list(s.ids) for s in t.sequences] for t in trajectories])
        with stream.paused(60.0):
            dice.weights, dice.version = (dice.weights * 31 + hash(str(used[-1]))) % (1 << 61), step + 1
        journal.note("trained", step, sorted({t.prompt_id for t in trajectories}))
        if (step + 1) % EVERY == 0:
            write_atomic(checkpoint, json.dumps({"step": step + 1, "weights": dice.weights, "used": used}))
            journal.note("saved", step + 1)
    stream.close()
    write_atomic(folder / "done.json", json.dumps({"used": used, "reused": sampler.reused}))


if __name__ == "__main__":
    if float(sys.argv[2]) > 0:
        timer = threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    (run_ahead if sys.argv[3:] else run)(Path(sys.argv[1]))
