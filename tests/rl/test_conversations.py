"""Conversations that wait for nobody: through a recipe, with an environment by path, they train to the bit as lock-step
does; what a table is asked meanwhile goes together in one call.
"""

import threading
from collections import Counter
from pathlib import Path

import pytest

from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid
from terrella.launch import recipe
from terrella.rl.conversation import Conversation, Conversations
from terrella.rl.environment import End
from terrella.rl.journal import Journal
from terrella.rl.rollout.sampler import Sample, SamplingParams
from terrella.rl.rollout.stream import Stream
from terrella.tests.parallel.recipe_jobs import run_case
from terrella.tests.sampling import in_turn

WAIT_S = 120.0
ENVIRONMENT = """
import time

class Guess:
    def tasks(self, split):
        return [f"{n}" for n in range(12 if split == "train" else 2)]

    def play(self, task):
        right = 0
        for turn in range(1 + int(task) % 4):
            time.sleep(0.003 * (int(task) % 3))
            answer = yield f"{task}:{turn}?"
            right += task in answer
        return right / (1 + int(task) % 4)
"""
RECIPE = """
name: talks
world: language
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 259, max_positions: 128, tied: true}}
env: {{kind: "{file}:Guess"}}
stages:
- {{kind: start, name: start}}
- {{kind: rl, name: rl, init: start, algorithm: {{kind: grpo, tis_cap: 2.0}}, prompts_per_step: 4, samples_per_prompt: 4, steps: 2, max_new_tokens: 4,
   optimizer: {{lr: 1e-2}}, rollouts: {{independent: {independent}, keep_samples: true, sampler: {{kind: embedded, batch_invariant: true}}}}}}
"""  # noqa: E501


def trained(folder: Path, independent: bool) -> tuple[list[dict], dict, Counter[int]]:
    file, path, run = folder / "guess.py", folder / "recipe.yaml", folder / "runs" / f"independent-{independent}"
    file.write_text(ENVIRONMENT)
    path.write_text(RECIPE.format(file=file, independent=str(independent).lower()))
    steps = run_case(recipe.load(str(path)), run)
    journal = Journal(run / "stages" / "rl" / "journal")
    return steps, journal.samples(), journal.trained()


@pytest.mark.timeout(1800)
@in_turn("lock step")
def test_a_recipe_trains_to_the_bit_as_in_lock_step(tmp_path: Path) -> None:
    expected, samples, counts = trained(tmp_path, False)
    steps, independent, again = trained(tmp_path, True)
    assert counts == again == Counter(range(8))
    assert independent == samples and {key[0][3] for key in samples} == {0, 1, 2, 3}
    assert len(steps) == len(expected) == 2
    for one, other in zip(steps, expected, strict=True):
        assert one["metrics"] == other["metrics"]
        assert all(bool((value == other["weights"][name]).all()) for name, value in one["weights"].items())


class Table:
    """Ends after two answers. The first call of answers waits until the sampler was asked for everybody."""

    def __init__(self, together: bool = False) -> None:
        self.together, self.all_asked = together, threading.Event()
        self.turns: Counter[int] = Counter()
        self.calls: list[int] = []

    def start_many(self, asked, max_invalid):
        return ["?" for _ in asked]

    def answer_many(self, answers, max_invalid):
        self.calls.append(len(answers))
        assert self.together or self.all_asked.wait(WAIT_S)
        self.turns.update(number for number, _ in answers)
        return [End(1.0) if self.turns[number] == 2 else "again?" for number, _ in answers]


class Counted:
    def __init__(self, table: Table, wanted: int) -> None:
        self.table, self.wanted, self.keys = table, wanted, []

    def generate(self, requests):
        self.keys += [request.key for request in requests]
        if len(self.keys) >= self.wanted:
            self.table.all_asked.set()
        bad = [request for request in requests if request.key[1] == 3]
        return [Invalid("no") if request in bad else Sample((65, 66), (-0.5,) * 2, "stop", 0) for request in requests]


@pytest.mark.parametrize("together", [False, True])
def test_sampling_goes_on_while_a_table_works_and_faults_stay_with_their_own(together: bool) -> None:
    table = Table(together)
    stream = Stream(Counted(table, 6))
    asked = [Conversation("task", n, 0) for n in range(6)]
    try:
        played = Conversations(table, ByteTokenizer(), max_turns=5).converse(stream, asked, SamplingParams(2), 0)
    finally:
        stream.close()
    assert [t.prompt_id for t in played] == [*range(6)]
    assert [isinstance(t.reward, Invalid) for t in played] == [False] * 3 + [True] + [False] * 2
    assert sum(table.calls) == 10 and (table.calls == [5, 5] if together else len(table.calls) < 10)
    counts = Counter(stream.sampler.keys)
    assert counts.pop((0, 3, 0, 0)) == 3 and set(counts.values()) == {1} and len(counts) == 10
