"""SIGKILL at random points: nothing lost, nothing trained twice, nothing finished sampled again."""

import json
import random
import subprocess
import sys
import time
from collections import Counter

import pytest

from terrella.core.errors import ConfigError, NumericsError, StorageError
from terrella.rl.journal import Journal, JournalSampler, ReplaySampler
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.rl import journal_run

KILLS = 20


def child(folder, kill_after: float, *more: str) -> int:
    command = [sys.executable, "-m", "terrella.tests.rl.journal_run", str(folder), str(kill_after), *more]
    return subprocess.run(command, timeout=600, capture_output=True).returncode


def test_killed_at_twenty_random_points_equals_an_uninterrupted_run(tmp_path) -> None:
    calm = tmp_path / "calm"
    calm.mkdir()
    begun = time.monotonic()
    journal_run.run(calm)
    length = max(time.monotonic() - begun, 0.05)  # of the loop alone: kills fall all over it
    want = json.loads((calm / "done.json").read_text())
    every = Counter(range(journal_run.STEPS * journal_run.PROMPTS))
    assert Journal(calm / "journal").trained() == every
    dice, total = random.Random(7), 0
    for number in range(40):
        killed = tmp_path / f"killed-{number}"
        killed.mkdir()
        kills = 0
        while not (killed / "done.json").exists():
            code = child(killed, length * dice.uniform(0.02, 0.35) if kills < 6 else 0)
            assert code in (0, -9)
            kills += code == -9
        if kills < 3:  # the uninterrupted run was slowed down by something else: kill earlier
            length *= 0.6
        assert json.loads((killed / "done.json").read_text())["weights"] == want["weights"]
        assert Journal(killed / "journal").trained() == every
        # a kill costs at most the one continuation it interrupted
        assert len((killed / "generated.txt").read_text()) <= len((calm / "generated.txt").read_text()) + kills
        total += kills
        if total >= KILLS:
            break
    assert total >= KILLS


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.full)])
def test_rollouts_ahead_of_training_lose_and_repeat_nothing(tmp_path, kills: int) -> None:
    """Which weights sample what depends on time, so that runs differ. But whatever a run was trained on stands in its
    journal, once."""
    length, dice, total = 0.3, random.Random(11), 0
    every = Counter(range(journal_run.STEPS * journal_run.PROMPTS))
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        mine = 0
        while not (folder / "done.json").exists():
            code = child(folder, length * dice.uniform(0.02, 1.0) if mine < 6 else 0, "ahead")
            assert code in (0, -9)
            mine += code == -9
        if mine < 3:
            length *= 0.6
        total += mine
        used = json.loads((folder / "done.json").read_text())["used"]
        assert len(used) == journal_run.STEPS and Journal(folder / "journal").trained() == every
        issued = [e["step"] for e in Journal(folder / "journal").events() if e["event"] == "issued"]
        assert sorted(issued) == list(range(journal_run.STEPS))
        replay = ReplaySampler(folder / "journal")
        for step, trained in enumerate(used):
            again = rollout(replay, journal_run.walks(step), SamplingParams(1), 0)
            assert [[list(s.ids) for s in t.sequences] for t in again] == trained
        if total >= kills:
            break
    assert total >= kills


def requests(n: int) -> list[SampleRequest]:
    return [SampleRequest((1, 2), (0, i, 0, 0), SamplingParams(3)) for i in range(n)]


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def generate(self, asked):
        self.asked += len(asked)
        return [Sample((r.key[1], 5), (-0.123456789, 0.0), "stop", 4, (False, True)) for r in asked]


def test_samples_come_back_exactly_and_only_for_weights_that_fit(tmp_path) -> None:
    first = Counting()
    made = JournalSampler(first, Journal(tmp_path), lambda: 4).generate(requests(3))
    with open(tmp_path / "samples-00000004-0.jsonl", "a") as stream:
        stream.write('{"key": [0, 9')  # torn by a kill
    again = Counting()
    sampler = JournalSampler(again, Journal(tmp_path), lambda: 4)
    assert sampler.generate(requests(3)) == made and (again.asked, sampler.reused) == (0, 3)
    assert len(Journal(tmp_path).samples()) == 3  # the torn line hurt nobody
    sampler = JournalSampler(again, Journal(tmp_path), lambda: 4)
    # the same batch again, or none of it
    assert sampler.generate(requests(4))[:3] == made and (again.asked, sampler.reused) == (4, 0)
    later = Counting()
    JournalSampler(later, Journal(tmp_path), lambda: 5).generate(requests(3))
    assert later.asked == 3
    stale = Counting()
    JournalSampler(stale, Journal(tmp_path), lambda: 5, staleness=1).generate(requests(3))
    assert stale.asked == 0
    Journal(tmp_path).prune(5)
    assert Journal(tmp_path).samples() == {}


def test_replay_gives_the_same_rollouts_and_refuses_what_was_never_sampled(tmp_path) -> None:
    made = JournalSampler(Counting(), Journal(tmp_path), lambda: 4).generate(requests(3))
    replay = ReplaySampler(tmp_path)
    assert replay.generate(requests(3)) == made
    with pytest.raises(ConfigError, match="no sample of key"):
        replay.generate(requests(5))
    with pytest.raises(ConfigError, match="no journal"):
        ReplaySampler(tmp_path / "nothing")


def test_resume_forgets_what_the_checkpoint_does_not_hold(tmp_path) -> None:
    journal = Journal(tmp_path)
    for step in range(4):
        journal.note("issued", step, [step])
        journal.note("trained", step, [step])
        if step == 1:
            journal.note("saved", 2)
    journal.resume(2)
    assert journal.trained() == Counter([0, 1]) and journal.events()[-1] == {"event": "saved", "step": 2, "prompts": []}


def test_samples_of_ranks_that_are_no_more_are_forgotten_too(tmp_path) -> None:
    """A run of four data ranks goes on with one: weights of later versions will be others."""
    request = SampleRequest((1, 2), (7, 0), SamplingParams(1))
    for rank in (0, 3):
        old = Journal(tmp_path, rank)
        old.note("trained", 45, [rank])
        for version in (40, 45):
            old.add([request], [Sample((5,), (-0.5,), "stop", version)])
    assert Journal(tmp_path).ranks() == {0, 3}
    for rank in Journal(tmp_path).ranks():
        Journal(tmp_path, rank).resume(40, 40)
    assert [s.weight_version for s in Journal(tmp_path).samples().values()] == [40]
    assert not Journal(tmp_path).trained()


def test_a_changed_token_is_named_by_file_and_line_and_sampled_again(tmp_path) -> None:
    made = JournalSampler(Counting(), Journal(tmp_path), lambda: 4).generate(requests(3))
    path = tmp_path / "samples-00000004-0.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1].replace('"ids": [1,', '"ids": [7,'), *lines[2:]]))
    with pytest.raises(StorageError, match=r"samples-00000004-0\.jsonl:2: damaged .*checksum"):
        ReplaySampler(tmp_path)
    journal = Journal(tmp_path)
    (damage,) = journal.resume(0)
    assert damage.startswith(f"{path}:2: damaged")
    assert journal.resume(0) == [] and (tmp_path / "samples-00000004-0.jsonl.damaged").exists()
    again = Counting()
    assert JournalSampler(again, journal, lambda: 4).generate(requests(3)) == made and again.asked == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"key": [0, 0, 0, 0], "ids": [0, 5], "logprobs": [0.5, 0.0], "finish": "stop"}',
        '{"key": [0, 0, 0, 0], "ids": [0, 5], "logprobs": [-0.5], "finish": "stop"}',
        '{"key": [0, 0, 0, 0], "ids": [0, "5"], "logprobs": [-0.5, NaN], "finish": "stop"}',
        '{"key": 3, "ids": [], "logprobs": [], "finish": "stop"}',
        '{"ids": []}',
        "[]",
        "\xff",
        '{"key": [0, 0, 0, 0], "ids": [0, 5], "logprobs": [-0.5, 0.0], "finish": "stop", "sun": "0"}',
    ],
)
def test_damage_that_has_no_checksum_is_found_too(tmp_path, line: str) -> None:
    (tmp_path / "samples-00000004-0.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    assert "samples-00000004-0.jsonl:1: damaged" in Journal(tmp_path).resume(0)[0]


def test_rows_of_an_earlier_release_are_read_and_an_impossible_log_prob_is_never_kept(tmp_path) -> None:
    (tmp_path / "samples-00000004-0.jsonl").write_text(
        '{"key": [0, 0, 0, 0], "ids": [0, 5], "logprobs": [-0.5, 0.0], "finish": "stop"}\n'
    )
    journal = Journal(tmp_path)
    assert journal.resume(0) == [] and len(journal.samples()) == 1
    with pytest.raises(NumericsError, match=r"log-prob of 0\.5"):
        journal.add(requests(1), [Sample((0, 5), (-0.1, 0.5), "stop", 4)])
