"""Starts the worker processes of a run on this machine, watches them, and turns their end into one message and exit
code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..core.errors import ProgramError, StorageError, TerrellaError, WorkerError
from ..core.files import read_json, storage_errors
from ..core.process import PARENT_VARIABLE, usable_cores
from ..core.run import LEASE_VARIABLE, Run, has_begun

GRACE_S = 10.0  # between a first worker's death and the end of the others
STALL_S, LOOK_S = 300.0, 20.0  # when ranks that do not move are worth a message, and how often that is looked at
STOPPED = 75  # a worker that saved and stopped on request; the run can be started again
FINISHED = 76  # a worker whose stages are all done. Not 0: whatever code a stage runs could end its process with that
# a scheduler's, a container's and a person's request to stop
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def error_file(run: Path, rank: int) -> Path:
    """Where a worker leaves the message of the error that ended it."""
    return run / "logs" / f"rank-{rank}.error.json"


@dataclass(frozen=True)
class Span:
    """The ranks that this machine runs, of all the ranks of the run, and where they meet."""

    first: int
    count: int
    world: int
    host: str
    port: int


def heartbeat_file(run: Path, rank: int) -> Path:
    """Where a rank writes that it is alive, and at what."""
    return run / "logs" / f"rank-{rank}.alive.json"


def _environment(run: Run, span: Span, local: int) -> dict[str, str]:
    threads = max(1, usable_cores() // span.count)
    return {
        **os.environ,
        LEASE_VARIABLE: run.token,
        PARENT_VARIABLE: str(os.getpid()),
        "RANK": str(span.first + local),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(span.count),
        "WORLD_SIZE": str(span.world),
        "MASTER_ADDR": span.host,
        "MASTER_PORT": str(span.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
    }


def run_workers(run: Run, span: Span, until: str | None = None, kept: bool = True) -> int:
    """Run the stages, up to `until` where one is named, in this machine's processes. A run that is not `kept` is gone
    when it ends.

    Returns 0, or STOPPED when a signal asked for a save; raises on failure.
    """
    workers: list[subprocess.Popen] = []
    logs: list[IO[bytes]] = []
    # a request to stop that comes before we, or a worker, can handle it must wait, not kill: workers inherit this
    # (Job.listen unblocks)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for local in range(span.count):
            rank = span.first + local
            error_file(run.path, rank).unlink(missing_ok=True)
            heartbeat_file(run.path, rank).unlink(missing_ok=True)  # of an earlier start: an old beat is not a stall
            log_path = run.path / "logs" / f"rank-{rank}.log"
            with storage_errors(log_path):
                log = open(log_path, "ab")
            logs.append(log)
            out = None if rank == 0 else log
            command = [sys.executable, "-m", "terrella.launch.worker", str(run.path), *([until] if until else [])]
            workers.append(
                subprocess.Popen(command, env=_environment(run, span, local), stdout=out, stderr=log, cwd=os.getcwd())
            )
        return _watch(run.path, workers, span.first, kept)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait(timeout=GRACE_S)
        for log in logs:
            log.close()


def standing(run: Path, ranks: range, now: float) -> str | None:
    """Where each rank stands when none of them has moved for `STALL_S`, else None. The rank that stands alone holds
    up the others.
    """
    places: dict[str, list[int]] = {}
    for rank in ranks:
        beat = read_json(heartbeat_file(run, rank))
        if not beat or now - beat["since"] < STALL_S:
            return None
        places.setdefault(beat["at"], []).append(rank)
    states = "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} at {place}" for place, who in places.items()
    )
    return f"no rank here has moved for {STALL_S / 60:.0f} minutes: {states}"


def _stopping(run: Path, ranks: range, kept: bool) -> str:
    """What a request to stop waits for, and what it costs."""
    loaded = all(heartbeat_file(run, rank).exists() for rank in ranks)
    left = "nothing of it is kept" if not kept else "what is done is saved"
    cost = left if has_begun(run) else "nothing was done yet, so nothing is lost"
    return f"stopping {'after this step' if loaded else 'when the ranks have loaded'}; {cost}"


def _watch(run: Path, workers: list[subprocess.Popen], first: int, kept: bool) -> int:
    ranks = range(first, first + len(workers))
    asked: list[int] = []
    said, looked = "", time.monotonic()

    def ask(number: int, _frame: object) -> None:
        asked.append(number)
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGUSR1)
        if number == signal.SIGINT and len(asked) == 1:
            with suppress(OSError, RuntimeError):  # Ctrl-C has ended `| tee` too
                print(f"\n{_stopping(run, ranks, kept)} (twice more Ctrl-C: at once)", file=sys.stderr, flush=True)

    before = {s: signal.signal(s, ask) for s in STOP_SIGNALS}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # also where who started us had blocked them
        failed_at: float | None = None
        while True:
            codes = [worker.poll() for worker in workers]
            if all(code is not None for code in codes):
                break
            if any(code not in (None, FINISHED, STOPPED) for code in codes):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > GRACE_S:
                    for worker in workers:
                        if worker.poll() is None:
                            worker.kill()
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                text = standing(run, ranks, time.time()) or ""
                if text and text != said:
                    with suppress(OSError):
                        print(f"watchdog: {text}", file=sys.stderr, flush=True)
                said = text
            if len(asked) >= 3:  # asked again and again: do not wait for a save
                for worker in workers:
                    worker.kill()
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _verdict(run, {first + local: worker.returncode for local, worker in enumerate(workers)})


def _verdict(run: Path, codes: dict[int, int]) -> int:
    """The first real cause among the workers' ends; a rank that fell because a peer vanished is not it."""
    if all(code in (FINISHED, STOPPED) for code in codes.values()):
        return STOPPED if STOPPED in codes.values() else 0
    errors = [(rank, read_json(error_file(run, rank))) for rank in codes]
    ends = sorted(
        ((rank, e) for rank, e in errors if e), key=lambda end: (bool(end[1].get("passing")), end[1].get("order", 0))
    )
    cause = ""
    for rank, error in ends[:1]:
        log = run / "logs" / f"rank-{rank}.log"
        if error["exit_code"] == ProgramError.exit_code:
            raise ProgramError(
                f"worker {rank}: {error['message']}; its log is {log}. The same start would meet it again"
            )
        if not error.get("passing"):
            failure = TerrellaError(error["message"])
            failure.exit_code = error["exit_code"]
            raise failure
        cause = f" ({error['message']})"
    unwritten = next((r for r, c in codes.items() if c == StorageError.exit_code), None)
    if unwritten is not None:
        raise StorageError(
            f"{run}: worker {unwritten} could not write its files, nor what went wrong: the disk is full or cannot be "
            "written; free space or choose another --run folder, then run the same command again"
        )
    rank, code = next((r, c) for r, c in codes.items() if c not in (FINISHED, STOPPED))
    if code == 0:
        log = run / "logs" / f"rank-{rank}.log"
        raise ProgramError(
            f"worker {rank} ended before its stages were done, and without a word (code 0); its log is {log}"
        )
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    raise WorkerError(
        f"worker {rank} {how}{cause if codes[rank] > 0 else ''}; its log is {run / 'logs' / f'rank-{rank}.log'}. "
        "Nothing is lost: run the same command to go on from the last checkpoint"
    )
