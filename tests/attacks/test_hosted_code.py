"""A reward of the user's that harms its own process: its row is Invalid by name, or counts, and the rows beside it
count.
"""

from __future__ import annotations

import time
from pathlib import Path

from terrella.data.trajectory import Invalid
from terrella.rl.hosted import Host

REWARDS = """
import atexit, gc, os, resource, shutil, signal, sys, tempfile, threading, time

class Slow(float):
    def __float__(self): time.sleep(100)

class Many(dict):
    def items(self): return iter([("reward", 1.0)] * 10**9)

def no_folder():
    os.chdir(tempfile.mkdtemp()); shutil.rmtree(os.getcwd())
    return 1.0

def no_memory():
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    return len(bytes(2**40))

def spins():
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=False).start()
    return 1.0

def ignores():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
    while True:
        try: time.sleep(100)
        except BaseException: pass

def breaks_modules():
    sys.modules["pickle"] = sys.modules["struct"] = None; sys.path.clear(); gc.disable(); sys.setrecursionlimit(60)
    return 1.0

def bomb():
    for _ in range(20):
        if os.fork() == 0: time.sleep(100)
    return 1.0

DO = {
    "fine": lambda: 0.5,
    "lambda": lambda: (lambda: 1),
    "unpicklable part": lambda: {"reward": 1.0, "lock": threading.Lock()},
    "huge text": lambda: "x" * 300_000_000,
    "huge parts": lambda: {"reward": 1.0, "x" * 150_000_000: 1.0},
    "slow number": lambda: Slow(),
    "lone surrogate": lambda: {"reward": 1.0, "\\ud800": 1.0},
    "generator exit": lambda: (_ for _ in ()).throw(GeneratorExit()),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminates": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "no folder": no_folder, "no memory": no_memory, "spins": spins, "ignores": ignores, "breaks modules": breaks_modules, "bomb": bomb,
}

def score(prompt, answer, info): return DO[answer]()
"""  # noqa: E501
COUNTS = ("no folder", "spins", "bomb")  # what they leave behind ends with their process
EITHER = ("breaks modules",)


def test_harmful_rewards(tmp_path: Path) -> None:
    (tmp_path / "harm.py").write_text(REWARDS)
    harmful = [
        line.split('"')[1]
        for line in REWARDS.split("DO = {")[1].split("}\n")[0].splitlines()
        if line.startswith('    "')
    ][1:]
    harmful += ["no memory", "spins", "ignores", "breaks modules", "bomb"]
    begun = time.monotonic()
    with Host("harm.py:score", tmp_path, 4.0) as host:
        answers = [answer for bad in dict.fromkeys(harmful) for answer in (bad, "fine")]
        given = [score.reward for score in host.score(["p"] * len(answers), answers, [{}] * len(answers))]
        for bad, reward, beside in zip(answers[::2], given[::2], given[1::2], strict=True):
            assert beside == 0.5, (bad, beside)
            if bad in COUNTS:
                assert reward == 1.0, (bad, reward)
            elif bad not in EITHER or isinstance(reward, Invalid):
                assert isinstance(reward, Invalid) and "harm.py" in reward.reason, (bad, reward)
        group = host.child.process.pid if host.child else 0
    assert time.monotonic() - begun < 120
    until = time.monotonic() + 20  # twenty processes take a moment to die
    while group and _alive(group):
        assert time.monotonic() < until, "what a reward started outlives its host"
        time.sleep(0.2)


def _alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = path.read_text().rsplit(")", 1)[1].split()
            if int(of) == group and state not in "ZX":  # the dead may wait for a parent that never asks
                return True
        except (OSError, IndexError, ValueError):
            continue
    return False
