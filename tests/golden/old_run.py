"""A run that an earlier version of the code began: killed in RL between a checkpoint and the next step. Helper module,
not a test.

`python -m terrella.tests.golden.old_run` writes begun-run.tar.xz anew. It is to be kept as it is: that later code goes
on from it, or refuses it by name, is what it is for. old-run.tar.xz was begun before the kinds of stages were renamed,
and is refused.
"""

import os
import signal
import sys
import tarfile
import tempfile
from multiprocessing import get_context
from pathlib import Path

from terrella.core.ports import free_port

from .inputs import ARCHIVE
from .play import ALONE, OLD, play

KEPT = ("config.yaml", "metrics.jsonl", "stages", "checkpoints", "rollouts")
EVENT = 7  # of the journal: steps 1 and 2 are trained and saved, step 3 is sampled and about to be noted as trained


def begin(folder: Path) -> None:
    """Play until the moment to be killed."""
    os.chdir(folder)
    os.environ.update(ALONE, MASTER_PORT=str(free_port()))
    left = EVENT

    def watch(event: str, args: tuple) -> None:
        nonlocal left
        if event == "open" and "events-0.jsonl" in str(args[0]) and "a" in str(args[1]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    play(OLD)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the owner's name and the time, which nothing needs."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    """Begin the run, and pack what is needed to go on with it."""
    with tempfile.TemporaryDirectory() as folder:
        process = get_context("spawn").Process(target=begin, args=(Path(folder),))
        process.start()
        process.join(timeout=600)
        if process.exitcode != -signal.SIGKILL:
            process.kill()
            raise SystemExit(f"the run ended with {process.exitcode} instead of being killed")
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for name in KEPT:
                archive.add(Path(folder, "runs", OLD, name), name, filter=anonymous)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
