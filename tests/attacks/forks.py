"""Starts of the attacked run as forks of one process that has everything imported, so that a signal costs a second and
not ten.

`python -m terrella.tests.attacks.forks FOLDER SIGNALS SEED SECONDS` starts runs and signals them at random moments
until so many signals were sent, compares every finished run with one that was left alone, and prints what it counted as
JSON. Each file of a checkpoint takes SECONDS longer to write; above 0, two of the signals at least come during a save.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from terrella.core import run as runs
from terrella.core.errors import TerrellaError
from terrella.core.ports import free_port
from terrella.launch import recipe as recipes
from terrella.launch import worker
from terrella.launch.supervise import STOP_SIGNALS, STOPPED
from terrella.tests.attacks.jobs import RECIPE
from terrella.tests.launch import tiny_run

DEADLINE_S = 120.0  # from a signal, or a start, to the end of the process; a busy machine may need much of it
SENT = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)


def _start(folder: Path) -> int:
    """What `terrella train` and its one worker do, in this process."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    recipe = recipes.load(str(RECIPE), ())
    run, lease = runs.create(folder, recipe)
    for warning in run.verify([stage.name for stage in recipe.stages]):
        print(f"UNEXPECTED {warning}", flush=True)
    os.environ[runs.LEASE_VARIABLE] = run.token
    try:
        return worker.run_stages(folder, 0, 1)
    finally:
        lease.release()


def fork(folder: Path) -> int:
    """Start a run in a fork; its output goes to FOLDER.log. Returns the process id."""
    # as the supervisor does; the worker unblocks them when it listens
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return child
    code = 1
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _start(folder)
    except TerrellaError as error:
        traceback.print_exc()
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int, seconds: float) -> int | None:
    """The exit code of a child (negative for a signal), or None when it still runs after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def slow_disk(seconds: float) -> None:
    """Let every file of a checkpoint take so long, in this process and its forks."""
    from terrella.core import checkpoint

    write = checkpoint.write_shard

    def write_shard(*args: Any) -> dict[str, Any]:
        time.sleep(seconds)
        return write(*args)

    checkpoint.write_shard = write_shard


def play(folder: Path, signals: int, seed: int, during_saves: int) -> dict[str, int]:
    """Send the signals, and up to five times as many until so many came during a save; returns counts, with every
    broken promise under a name in capitals.
    """
    for name in ("cold", "calm"):  # the first start of all is slower, and would make the signals come late
        begun = time.monotonic()
        assert wait(fork(folder / name), 10 * DEADLINE_S) == 0, (folder / f"{name}.log").read_text()
    took, expected = time.monotonic() - begun, tiny_run.results(folder / "calm")
    draw, counts, number = random.Random(seed), Counter({"signals": 0, "in flight": 0}), 0
    run, starts = folder / "run-0", 0
    while counts["signals"] < signals or (counts["in flight"] < during_saves and counts["signals"] < 5 * signals):
        child, starts = fork(run), starts + 1
        code = wait(child, draw.uniform(0.0, 0.7) * took)
        if code is None:
            sent = draw.choice(SENT)
            os.kill(child, sent)
            counts["signals"] += 1
            counts["in flight"] += any(run.glob("checkpoints/*/.saving-*"))
            code = wait(child, DEADLINE_S)
            if code is None:
                counts["HANG"] += 1
                os.kill(child, signal.SIGKILL)
                wait(child, DEADLINE_S)
            elif code not in (
                -sent if sent == signal.SIGKILL else STOPPED,
                0,
            ):  # 0: it had just ended; its results are compared below
                counts[f"WRONG CODE {code} after {sent.name}"] += 1
        elif code != 0:
            counts[f"WRONG CODE {code} of a start"] += 1
        if code == 0 or starts >= 12:
            if code != 0:
                code = wait(fork(run), 10 * DEADLINE_S)
            counts["runs"] += 1
            print(dict(counts), file=sys.stderr, flush=True)
            if code != 0 or tiny_run.results(run) != expected:
                counts["DIFFERENT RESULT"] += 1
            if "UNEXPECTED" in run.with_suffix(".log").read_text():
                counts["UNEXPECTED WARNING"] += 1
            number, starts = number + 1, 0
            run = folder / f"run-{number}"
    if starts and (wait(fork(run), 10 * DEADLINE_S) != 0 or tiny_run.results(run) != expected):
        counts["DIFFERENT RESULT"] += 1
    return dict(counts)


def main() -> None:
    """Import what a run needs once, then play."""
    import torch

    torch.set_num_threads(1)
    import transformers  # noqa: F401

    from terrella.core.mcore import setup  # noqa: F401
    from terrella.launch.stages import collect, export, rl, sft  # noqa: F401
    from terrella.rl.grid import tasks  # noqa: F401

    slow_s = float(sys.argv[4])
    slow_disk(slow_s)
    print(json.dumps(play(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 2 if slow_s else 0)), flush=True)


if __name__ == "__main__":
    main()
