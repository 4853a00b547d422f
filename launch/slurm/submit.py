"""Submits scripts, chained where they depend on each other, and follows a job until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import DeadlineError, TerrellaError
from ...core.files import write_atomic
from .cluster import ask
from .render import Script

POLL_S = 2.0
SILENT_S = 300.0
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


@dataclass(frozen=True)
class Submitted:
    """A job in the queue."""

    job: str
    script: Path
    log: Path
    tasks: int


def write_scripts(scripts: Sequence[Script], folder: Path) -> list[Path]:
    """Keep the scripts beside the run they start."""
    paths = []
    for script in scripts:
        path = folder / f"{script.name}.sbatch"
        write_atomic(path, script.text)
        paths.append(path)
    return paths


def submit(scripts: Sequence[Script], paths: Sequence[Path], logs: Path) -> list[Submitted]:
    """Submit in order, with logs in `logs`. Each job, or each task of an array, waits for the one before it to end
    well.
    """
    done: list[Submitted] = []
    for script, path in zip(scripts, paths, strict=True):
        command = ["sbatch", "--parsable", f"--output={logs}/%x-{'%A_%a' if script.tasks > 1 else '%j'}.log"]
        if done:
            kind = "aftercorr" if script.tasks > 1 else "afterok"
            command += [f"--dependency={kind}:{done[-1].job}", "--kill-on-invalid-dep=yes"]
        answer = ask(*command, str(path))
        if answer.returncode:
            queued = f"; already in the queue: {', '.join(d.job for d in done)}" if done else ""
            raise TerrellaError(f"sbatch: {answer.stderr.strip()}{queued}")
        job = answer.stdout.strip().split(";")[0]
        done.append(
            Submitted(job, path, logs / f"{script.name}-{job}{'_0' if script.tasks > 1 else ''}.log", script.tasks)
        )
    return done


def fields(job: str) -> dict[str, str]:
    """What the controller knows of a job; empty when it has forgotten it."""
    end = time.monotonic() + SILENT_S
    while True:
        answer = ask("scontrol", "--oneliner", "show", "job", job)
        if answer.returncode == 0 or "Invalid job id" in answer.stderr:
            line = answer.stdout.splitlines()[0] if answer.stdout else ""
            return dict(word.split("=", 1) for word in line.split() if "=" in word)
        if time.monotonic() > end:
            raise DeadlineError(f"scontrol: no answer about job {job} for {SILENT_S:.0f} s: {answer.stderr.strip()}")
        time.sleep(POLL_S)  # a busy controller turns callers away; the job goes on


def follow(job: Submitted, say: Callable[[str], None], poll_s: float = POLL_S) -> int:
    """Print a job's states and log until it ends; returns its exit code. Interrupting it leaves the job alone."""
    state, read = "", 0
    while True:
        known = fields(job.job)
        now = known.get("JobState", "FORGOTTEN")
        if now != state:
            reason = known.get("Reason", "None")
            where = known.get("NodeList", "")
            detail = (
                f" ({reason})"
                if reason != "None" and now == "PENDING"
                else f" on {where}"
                if where and where != "(null)"
                else ""
            )
            say(f"job {job.job}: {now.lower()}{detail}")
            state = now
        read = _tail(job.log, read, say)
        if now in ENDED and not _comes_back(known):
            code, _, signal = known.get("ExitCode", "0:0").partition(":")
            return int(code) or (128 + int(signal) if signal not in ("", "0") else 0 if now == "COMPLETED" else 1)
        if now == "FORGOTTEN":
            raise TerrellaError(f"job {job.job}: the controller has forgotten it; its log is {job.log}")
        time.sleep(poll_s)


def _comes_back(known: dict[str, str]) -> bool:
    """Whether a job that looks ended is on its way back into the queue."""
    return known["JobState"] in ("PREEMPTED", "NODE_FAIL") and known["Requeue"] == "1"


def _tail(log: Path, read: int, say: Callable[[str], None]) -> int:
    """Say the whole lines after the first `read` bytes; returns how many bytes of the log have been read now."""
    try:
        with open(log, "rb") as stream:
            stream.seek(read)
            data = stream.read()
    except FileNotFoundError:
        return read
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        say(line)
    return read + len(whole)
