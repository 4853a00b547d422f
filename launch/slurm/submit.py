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


def records(job: str) -> list[dict[str, str]]:
    """What the controller knows of a job: a record, or several for the tasks of an array, of which those that wait
    share one. Of a heterogeneous job it is that of the first part, whose end is the job's. Empty when it has forgotten
    the job.
    """
    end = time.monotonic() + SILENT_S
    while True:
        answer = ask("scontrol", "--oneliner", "show", "job", job)
        if answer.returncode == 0 or "Invalid job id" in answer.stderr:
            lines = [line.split() for line in answer.stdout.splitlines()]
            known = [dict(word.split("=", 1) for word in line if "=" in word) for line in lines if line]
            return [record for record in known if record.get("HetJobOffset", "0") == "0"]
        if time.monotonic() > end:
            raise DeadlineError(f"scontrol: no answer about job {job} for {SILENT_S:.0f} s: {answer.stderr.strip()}")
        time.sleep(POLL_S)  # a busy controller turns callers away; the job goes on


def follow(job: Submitted, say: Callable[[str], None], poll_s: float = POLL_S) -> int:
    """Print a job's states and log until it ends, of an array all tasks and the log of the first; returns its exit
    code. Interrupting it leaves the job alone.
    """
    said, read = "", 0
    codes: dict[str, int] = {}  # of what has ended; the controller forgets that after some minutes
    while True:
        known = records(job.job)
        if (now := _standing(known)) != said:
            say(f"job {job.job}: {now}")
            said = now
        read = _tail(job.log, read, say)
        ended = [record for record in known if record["JobState"] in ENDED and not _comes_back(record)]
        codes |= {record["JobId"]: _exit_code(record) for record in ended}
        if len(ended) == len(known) and codes:
            return next((code for code in codes.values() if code), 0)
        if not known:
            raise TerrellaError(f"job {job.job}: the controller has forgotten it; its log is {job.log}")
        time.sleep(poll_s)


def _standing(known: list[dict[str, str]]) -> str:
    """The state of a job in words, or those that its tasks are in."""
    if len(known) != 1:
        return " and ".join(dict.fromkeys(record["JobState"].lower() for record in known)) or "forgotten"
    state, reason, where = (known[0].get(key, "") for key in ("JobState", "Reason", "NodeList"))
    if state == "PENDING" and reason not in ("", "None"):
        return f"pending ({reason})"
    return f"{state.lower()} on {where}" if where not in ("", "(null)") else state.lower()


def _exit_code(record: dict[str, str]) -> int:
    """0 of what has completed; else what the job or the signal that ended it makes of it."""
    code, _, signal = record.get("ExitCode", "0:0").partition(":")
    killed = 128 + int(signal) if signal not in ("", "0") else 0
    return int(code) or killed or (0 if record["JobState"] == "COMPLETED" else 1)


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
