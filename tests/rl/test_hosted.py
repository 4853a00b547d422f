"""User code in a child process: hostile rewards one by one, episodes that outlive a kill, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.trajectory import Invalid
from terrella.rl.environment import End
from terrella.rl.hosted import Host, Sealed
from terrella.rl.hosted import wire as wire_module
from terrella.rl.hosted.process import Prints
from terrella.tests.reap import is_running

REWARDS = """
import asyncio, ctypes, os, subprocess, sys, threading, time
from terrella.data.trajectory import Invalid

class Odd:
    def __repr__(self): raise RuntimeError("no repr")

class OddError(Exception):
    def __str__(self): raise RuntimeError("no text")

def deep(n): return deep(n + 1) + 1

def forks():
    if os.fork() == 0: time.sleep(60)
    os._exit(4)

def returns_twice():
    copy = os.fork()
    if copy: os.waitpid(copy, 0)  # it ends as soon as it would answer
    return 1.0

def prints():
    for _ in range(10): print("x" * 1_000_000)
    os.write(1, b"straight to descriptor 1")
    return 1.0

def prints_on():
    while True: print("x" * 100_000)

def closes_output():
    os.close(1); os.close(2); sys.stdout.close()
    return 1.0

def writes_everywhere():
    for descriptor in range(3, 20):
        if os.path.exists(f"/proc/self/fd/{descriptor}"): os.write(descriptor, b"x" * 4096)

DO = {
    "fine": lambda: 0.5,
    "flag": lambda: True,
    "parts": lambda: {"reward": 1, "length": 7},
    "own invalid": lambda: Invalid("the judge is down"),
    "invalid reward": lambda: {"reward": Invalid("the judge is down")},
    "raises": lambda: {}["answer"],
    "raises oddly": lambda: (_ for _ in ()).throw(OddError()),
    "nan": lambda: float("nan"),
    "inf": lambda: {"reward": -float("inf")},
    "none": lambda: None,
    "text": lambda: "0.5",
    "list": lambda: [1.0],
    "odd": lambda: Odd(),
    "no reward": lambda: {"score": 1.0},
    "bad part": lambda: {"reward": 1.0, "length": None},
    "bad key": lambda: {"reward": 1.0, 3: 1.0},
    "huge": lambda: 10**400,
    "leaves": lambda: sys.exit(2),
    "recursion": lambda: deep(0),
    "hangs": lambda: time.sleep(100),
    "exits": lambda: os._exit(3),
    "crashes": lambda: ctypes.string_at(0),
    "forks": forks,
    "returns twice": returns_twice,
    "prints": prints,
    "prints on": prints_on,
    "closes output": closes_output,
    "closes all": lambda: os.closerange(0, 100),
    "writes everywhere": writes_everywhere,
    "asks": lambda: input(),
    "who": lambda: os.getpid(),
}

def score(prompt, answer, info):
    return DO[answer]()

async def later(prompt, answer, info):
    if answer == "slow":
        await asyncio.sleep(0.5)
        return 1.0
    if answer == "waits":
        await asyncio.sleep(100)
    if answer == "blocks":
        time.sleep(100)
    return DO[answer]()

def batch(prompts, answers, infos):
    if answers == ["short", "one"]: return [1.0]
    if answers == ["one"]: return 1.0
    if answers == ["set", "one"]: return {0.0, 1.0}
    return [DO[a]() for a in answers]

def two(prompt, answer): return 1.0

class Made:
    def __init__(self, bonus): self.bonus = bonus
    def __call__(self, prompt, answer, info): return self.bonus + info["more"] + len(prompt)

def torchless(prompt, answer, info): return float("torch" in sys.modules)

NUMBER = 3
"""

PLAYS = """
import dataclasses, os, random, sys, time

@dataclasses.dataclass
class Room:
    seed: int

class Env:
    def __init__(self, count=4): self.count = count
    def tasks(self, split): return [{"seed": seed, "split": split} for seed in range(self.count)]
    def baselines(self): return {"echo": lambda prompt, task: prompt, "bad": lambda prompt, task: 3}
    def demonstration(self, task): return [str(task["seed"]), "b"]
    def play(self, task):
        total = task["seed"]
        answer = yield [{"role": "user", "content": f"start {total}"}]
        while answer != "stop":
            if answer == "hang": time.sleep(100)
            if answer == "exit": os._exit(5)
            if answer == "raise": raise KeyError("door")
            if answer == "number": answer = yield 7
            if answer == "early": return
            total += len(answer)
            answer = yield f"{total} " + ",".join({"left", "right", "up", "down"})
        return {"reward": total / 100, "turns": total}

class Plain:
    def tasks(self, split): return [Room(1), {"room": Room(2)}] if split == "train" else [1 / 0]
    def play(self, task):
        room = task if isinstance(task, Room) else task["room"]
        yield f"room {room.seed}"
        return room.seed

class Drifting(Plain):
    def play(self, task):
        yield "a"
        answer = yield str(os.getpid())
        yield "c"

class NoGenerator(Plain):
    def play(self, task): return 1.0

class Silent(Plain):
    def play(self, task):
        return 1.0
        yield

class Broken(Plain):
    def __init__(self): self.x = undefined
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("user")
    (made / "rewards.py").write_text(REWARDS)
    (made / "plays.py").write_text(PLAYS)
    return made


def scores(host: Host, answers: list[str]) -> list:
    return [score.reward for score in host.score(["p"] * len(answers), answers, [{}] * len(answers))]


def test_every_bad_score_is_invalid_by_name_and_the_rows_beside_it_count(folder: Path) -> None:
    wanted = {
        "raises": "raised KeyError: 'answer' at rewards.py:",
        "raises oddly": "raised OddError: (its text cannot be shown) at rewards.py:",
        "nan": "gave nan",
        "inf": "gave a dict with 'reward': -inf",
        "none": "gave None (NoneType)",
        "text": "gave '0.5' (str)",
        "list": "gave [1.0] (list)",
        "odd": "gave <Odd instance at 0x",
        "no reward": "gave a dict without 'reward': {'score': 1.0}",
        "bad part": "gave a dict with 'length': None (NoneType)",
        "bad key": "gave a dict with the key 3",
        "huge": "gave 100000000000000000...0000000000000000000, which float() refuses",
        "leaves": "raised SystemExit: 2 at rewards.py:",
        "recursion": "raised RecursionError",
        "asks": "raised EOFError",
    }
    with Host("rewards.py:score", folder, 20.0) as host:
        answers = [answer for bad in wanted for answer in (bad, "fine")]
        given = scores(host, answers)
        assert given[1::2] == [0.5] * len(wanted)
        for reward, (bad, words) in zip(given[::2], wanted.items(), strict=True):
            assert isinstance(reward, Invalid) and reward.reason.startswith("rewards.py:score "), (bad, reward)
            assert words in reward.reason, (bad, reward)
        child = host.child
        assert scores(host, ["own invalid", "invalid reward"]) == [Invalid("the judge is down")] * 2
        assert host.score(["p", "p"], ["parts", "flag"], [{}, {}]) == [End(1.0, {"length": 7.0}), End(1.0)]
        assert host.child is child  # none of these cost a process
        assert host.score([], [], []) == []
        with pytest.raises(ValueError, match="2 prompts, 1 answers and 1 infos"):
            host.score(["p", "p"], ["a"], [{}])


def test_a_hang_or_a_death_costs_its_own_row_only(folder: Path, capfd: pytest.CaptureFixture) -> None:
    wanted = {
        "exits": "ended its process with exit code 3",
        "crashes": "ended its process by SIGSEGV",
        "forks": "ended its process with exit code 4",
        "closes all": "rewards.py:score",
        "writes everywhere": "rewards.py:score",
        "hangs": "did not finish within 3 s (deadline_s); its process was killed",
    }
    with Host("rewards.py:score", folder, 3.0) as host:
        begun = time.monotonic()
        given = scores(host, [answer for bad in wanted for answer in (bad, "fine")])
        assert given[1::2] == [0.5] * len(wanted)
        for reward, (bad, words) in zip(given[::2], wanted.items(), strict=True):
            assert isinstance(reward, Invalid) and words in reward.reason, (bad, reward)
        assert time.monotonic() - begun < 90  # not the 100 s of the hang, on a busy machine either
        told = capfd.readouterr().out  # at once: many rows that hang take as many deadlines
        assert told.startswith(f"rewards.py:score {wanted['hangs']}. Its sample is Invalid"), told
        assert "later ones are only counted\n" in told
        assert isinstance(scores(host, ["hangs"])[0], Invalid) and capfd.readouterr().out == ""


def test_how_many_late_calls_are_waited_for_is_said_with_the_first(
    folder: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrella.rl.hosted.process.PRINTS", Prints())  # other tests of this process print too
    with Host("rewards.py:score", folder, 1.0) as host:
        ends = host.score(["p"] * 4, ["hangs"] * 4, [{}] * 4, 1)
    assert all(isinstance(end.reward, Invalid) for end in ends)
    assert "later ones are only counted; after 2 the others are not waited for" in capfd.readouterr().out


def test_calls_that_cannot_mend_what_is_lost_are_not_made(folder: Path) -> None:
    answers = ["raises", "raises", "fine", "exits", "fine", "exits", "fine"]
    rows = (["p"] * len(answers), answers, [{}] * len(answers))
    with Host("rewards.py:score", folder, 20.0) as host:
        for max_invalid, judged in ((0, 4), (2, 4), (3, 6), (4, 7)):  # a fault that costs nothing ends nothing
            given = [end.reward for end in host.score(*rows, max_invalid)]
            left = [isinstance(reward, Invalid) and reward.reason.startswith("not judged") for reward in given]
            assert left == [False] * judged + [True] * (len(answers) - judged), given
            assert [reward for reward in given[:judged] if reward == 0.5] == [0.5] * answers[:judged].count("fine")
    with Host("plays.py:Env", folder, 20.0) as host:
        host.start_many(enumerate(host.tasks("train")))
        ends = host.answer_many([(0, "ab"), (1, "exit"), (2, "ab"), (3, "ab")], 0)
        assert isinstance(ends[0], str) and all("exit code 5" in end.reward.reason for end in ends[1:])
        assert host.live.keys() == {0} and isinstance(host.answer(0, "stop"), End)


def test_output_and_forks_of_user_code_do_not_reach_the_messages(
    folder: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrella.rl.hosted.process.PRINTS", Prints())  # other tests of this process print too
    with Host("rewards.py:score", folder, 20.0) as host:
        assert scores(host, ["prints", "fine", "returns twice", "fine", "closes output", "fine", "raises"])[:-1] == [
            1.0, 0.5, 1.0, 0.5, 1.0, 0.5,
        ]  # fmt: skip
        assert host.child is not None and host.child.alive
        assert scores(host, ["returns twice", "who"]) == [1.0, host.child.process.pid]  # not its copy
    told = capfd.readouterr()
    assert told.out == "" and told.err.count("x") >= 10_000_000 and "straight to descriptor 1" in told.err


def test_prints_without_end_are_left_out_with_a_word(folder: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second child, of another host too, has what the first one left; where a late one was is still said."""
    monkeypatch.setattr("terrella.rl.hosted.process.MOST_PRINTS", 1_000_000)
    monkeypatch.setattr("terrella.rl.hosted.process.PRINTS", Prints())
    for _ in range(2):
        with Host("rewards.py:score", folder, 1.0) as host:
            assert "did not finish within 1 s" in scores(host, ["prints on"])[0].reason
            assert scores(host, ["fine"]) == [0.5]
    said = capfd.readouterr().err
    assert 1_000_000 <= len(said) < 1_010_000
    assert said.count("prints by rewards.py:score are left out from here on: 1,000,000 bytes of prints are shown") == 2
    left_out = re.findall(r"([0-9,]+) bytes of prints by rewards.py:score were left out", said)
    assert len(left_out) == 2 and all(int(n.replace(",", "")) > 1_000_000 for n in left_out)


def test_async_rows_run_together_and_a_late_one_is_ended_alone(folder: Path) -> None:
    with Host("rewards.py:later", folder, 2.0) as host:
        scores(host, ["fine"])
        child, begun = host.child, time.monotonic()
        given = scores(host, ["slow"] * 20 + ["waits", "nan", "raises", "fine"])
        assert time.monotonic() - begun < 8 and host.child is child  # 20 x 0.5 s and a wait of 2 s, together
        assert given[:20] == [1.0] * 20 and given[-1] == 0.5
        assert "did not finish within 2 s" in given[20].reason and "gave nan" in given[21].reason
        assert "raised KeyError: 'answer' at rewards.py:" in given[22].reason
        given = scores(host, ["fine", "blocks", "fine", "exits", "fine"])  # these two do take the process with them
        assert given[::2] == [0.5] * 3
        assert "did not finish within" in given[1].reason and "exit code 3" in given[3].reason


def test_a_batched_reward_gives_one_score_a_row(folder: Path) -> None:
    with Host("rewards.py:batch", folder, 20.0) as host:
        given = host.score(["p"] * 3, ["fine", "nan", "parts"], [{}] * 3)
        assert given[0] == End(0.5) and given[2] == End(1.0, {"length": 7.0})
        assert "answer 1 of 3: gave nan" in given[1].reward.reason
        assert all("gave 1 scores for 2 answers" in r.reason for r in scores(host, ["short", "one"]))
        assert "gave 1.0 (float); a batched reward gives a list" in scores(host, ["one"])[0].reason
        assert all("gave {0.0, 1.0} (set); a batched" in r.reason for r in scores(host, ["set", "one"]))
        assert all("raised KeyError" in r.reason for r in scores(host, ["fine", "raises"]))
        assert all("exit code 3" in r.reason for r in scores(host, ["fine", "exits"]))
        assert scores(host, ["fine"]) == [0.5]


def test_what_cannot_be_loaded_is_named(folder: Path) -> None:
    for target, args, words in (
        ("rewards.py:two", {}, r"two\(prompt, answer\): a reward takes \(prompt, answer, info\)"),
        ("rewards.py:score", {"x": 1}, "is a function, and takes no arguments from the recipe: x"),
        ("plays.py:Env", {"cuont": 1}, "raised TypeError: .*'cuont'"),
        ("rewards.py:scroe", {}, "did you mean 'score'"),
        ("plays.py:Broken", {}, "NameError: name 'undefined' is not defined at plays.py:"),
    ):
        with Host(target, folder, 5.0, args) as host, pytest.raises(ConfigError, match=words):
            host.score(["p"], ["a"], [{}])
    with (
        Host("rewards.py:two", folder, 5.0) as host,
        pytest.raises(ConfigError, match="an Environment is a class with the method play"),
    ):
        host.tasks("train")
    with Host("rewards.py:Made", folder, 20.0, {"bonus": 2.0}) as host:
        assert host.score(["abc"], ["a"], [{"more": 1}])[0].reward == 6.0
        with pytest.raises(ConfigError, match=r"rewards.py:Made is a reward function, and an Environment is needed"):
            host.tasks("train")


def test_a_file_that_changed_is_not_loaded_into_a_later_child(folder: Path) -> None:
    code = "import os\ndef score(prompt, answer, info): return 1.0 if answer else os._exit(1)"
    (folder / "edited.py").write_text(code)
    with Host("edited.py:score", folder, 20.0) as host:
        assert scores(host, ["a"]) == [1.0]
        (folder / "edited.py").write_text("def score(prompt, answer, info): return 2.0")
        assert scores(host, ["a"]) == [1.0]
        with pytest.raises(ConfigError, match=r"edited.py:score: the file has changed since this run was started"):
            scores(host, ["", "a"])


def test_a_module_beside_it_that_changed_is_not_loaded_into_a_later_child(folder: Path) -> None:
    (folder / "graded.py").write_text(
        "from grading import score_of\ndef score(prompt, answer, info): return score_of()\n"
    )
    (folder / "grading.py").write_text("def score_of(): return 1.0\n")
    with Host("graded.py:score", folder, 10.0) as host:
        assert host.score(["p"], ["a"], [{}]) == [End(1.0)]
        host.close()
        assert host.score(["p"], ["a"], [{}]) == [End(1.0)]
        host.close()
        (folder / "grading.py").write_text("def score_of(): return 2.0\n")
        with pytest.raises(ConfigError, match=r"grading\.py: has changed since this run was started; restore it"):
            host.score(["p"], ["a"], [{}])


def test_the_child_and_this_module_need_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from terrella.rl.hosted import Host\n"
        f"with Host('rewards.py:torchless', Path({str(folder)!r}), 20.0) as host:\n"
        "    print('torch' in sys.modules, host.score(['p'], ['a'], [{}])[0].reward)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout == "False 0.0\n"


def test_live_episodes_go_on_in_a_fresh_process(folder: Path) -> None:
    count = 256
    with Host("plays.py:Env", folder, 3.0, {"count": count}) as host:
        tasks = host.tasks("train")
        assert tasks[3] == {"seed": 3, "split": "train"} and len(tasks) == count
        first = host.start_many(enumerate(tasks))
        assert first[2] == [{"role": "user", "content": "start 2"}]
        before = host.answer_many([(episode, "ab") for episode in range(count)])
        hostile = {5: "hang", 80: "exit", 90: "raise", 100: "number", 110: "early"}
        after = host.answer_many([(episode, hostile.get(episode, "abc")) for episode in range(count)])
        faults = {
            5: "did not finish within 3 s",
            80: "exit code 5",
            90: "raised KeyError: 'door' at plays.py:",
            100: "yielded 7 (int); a prompt is a str after the first turn",
            110: "gave None (NoneType)",
        }
        for episode, words in faults.items():
            reward = after[episode].reward
            assert isinstance(reward, Invalid) and reward.reason.startswith("plays.py:Env.play "), reward
            assert words in reward.reason
        for episode in set(range(count)) - set(hostile):
            assert int(after[episode].split()[0]) == int(before[episode].split()[0]) + 3 == episode + 5
            # a set has the same order in each child
            assert after[episode].split()[1] == before[0].split()[1]
        rest = [episode for episode in range(count) if episode not in hostile]
        ends = host.answer_many([(episode, "stop") for episode in rest])
        assert ends == [End((e + 5) / 100, {"turns": e + 5.0}) for e in rest]
        assert host.live == {} and host.present == set()
        with pytest.raises(ValueError, match="episode 3 is not going on"):
            host.answer(3, "ab")


def test_an_episode_that_replays_differently_is_invalid_by_name(folder: Path) -> None:
    with Host("plays.py:Drifting", folder, 20.0) as host:
        tasks = host.tasks("train")
        host.start_many([(1, tasks[0]), (2, tasks[0])])
        host.answer(1, "x")
        os.kill(host.child.process.pid, signal.SIGKILL)  # between two calls: no call is to blame
        host.child.process.wait(10)
        ends = host.answer_many([(1, "y"), (2, "x")])
        words = "plays.py:Drifting.play gave another prompt in turn 2 when the episode was replayed"
        assert words in ends[0].reward.reason
        assert ends[1] == str(host.child.process.pid)
        host.forget([2])
        assert host.live == {} and host.present == set()


def test_tasks_of_user_classes_pass_unopened_and_the_optional_parts_are_optional(folder: Path) -> None:
    with Host("plays.py:Plain", folder, 20.0) as host:
        tasks = host.tasks("train")
        assert isinstance(tasks[0], Sealed) and isinstance(tasks[1]["room"], Sealed)
        assert repr(tasks[0]) == "Sealed(Room(seed=1))"
        assert host.start_many(enumerate(tasks)) == ["room 1", "room 2"]
        assert host.answer(1, "x") == End(2.0)
        assert host.demonstration(tasks[0]) is None and host.baseline_names() == []
        with pytest.raises(ConfigError, match=r"plays.py:Plain.tasks raised ZeroDivisionError: .* at plays.py:"):
            host.tasks("test")
    with Host("plays.py:Env", folder, 20.0) as host:
        task = host.tasks("train")[1]
        assert host.demonstration(task) == ["1", "b"] and host.baseline_names() == ["echo", "bad"]
        assert host.baseline("echo", "hello", task) == "hello"
        assert "'bad' gave 3 (int); an answer is a str" in host.baseline("bad", "hello", task).reason
    for name, words in (
        ("NoGenerator", "gave 1.0 (float); it must be a generator"),
        ("Silent", "returned 1.0 before it yielded"),
    ):
        with Host(f"plays.py:{name}", folder, 20.0) as host:
            assert words in host.start(0, host.tasks("train")[0]).reward.reason


def test_messages_above_the_limit_are_refused_by_name(folder: Path) -> None:
    code = "def score(prompt, answer, info): return {'reward': 1.0, 'x' * info['long']: 1.0}"
    (folder / "large.py").write_text(code)
    with Host("large.py:score", folder, 60.0) as host:
        given = host.score(["p", "p", "p" * 100_000_001, "p"], ["a"] * 4, [{"long": n} for n in (1, 100_000_001, 1, 1)])
    assert [score.reward for score in given[::3]] == [1.0, 1.0]
    for score in given[1:3]:
        assert "at most 100,000,000 are carried" in score.reward.reason
    with pytest.raises(Exception, match=r"names posix.system, and opening it could run code"):
        wire_module.unpack_in_host(b"cposix\nsystem\n(S'true'\ntR.")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_ends_with_its_parent_but_not_with_the_thread_that_called_first(folder: Path) -> None:
    code = (
        "import threading; from pathlib import Path; from terrella.rl.hosted import Host\n"
        f"host = Host('rewards.py:score', Path({str(folder)!r}), 100.0)\n"
        "t = threading.Thread(target=host.score, args=(['p'], ['fine'], [{}])); t.start(); t.join()\n"
        "pid = host.child.process.pid\n"
        "assert host.score(['p'], ['fine'], [{}])[0].reward == 0.5 and host.child.process.pid == pid\n"
        "print(pid, flush=True)\n"
        "host.score(['p'], ['hangs'], [{}])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())  # type: ignore[union-attr]
        assert is_running(child)
    finally:
        parent.kill()
        parent.wait(10)
    end = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < end, "the child outlived its parent"
        time.sleep(0.02)
