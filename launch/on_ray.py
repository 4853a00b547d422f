"""A run on a Ray cluster: Ray finds machines and detects lost ones; the run itself is what `terrella train` starts.

Trainer machines and sampler hosts are actors. If a machine is lost, all are placed again on the remaining ones, and the
run continues from its last checkpoint; the lease fences off any processes left of the earlier start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..core.errors import (
    ConfigError,
    LeaseError,
    NumericsError,
    ProgramError,
    StorageError,
    TerrellaError,
    WorkerError,
)
from ..core.files import make_folder
from ..core.ports import free_port
from ..core.process import PARENT_VARIABLE
from ..core.run import LEASE_VARIABLE
from ..rl.rollout.hosts import VARIABLE
from .slurm.settings import RESTARTS
from .supervise import STOPPED

if TYPE_CHECKING:
    from ..rl.ray_pool import Actors

POLL_S, ANSWER_S, START_S = 0.5, 60.0, 300.0
LASTING = (ConfigError, StorageError, LeaseError, NumericsError, ProgramError)  # as in templates/job.sh
FINAL = (0, STOPPED, *(error.exit_code for error in LASTING))  # exit codes after which another start would not help
# set by a job around Ray, such as the one that started its daemons; this run has its own
OUTER = ("TERRELLA_COORDINATOR", "TERRELLA_NODES", "TERRELLA_NODE_RANK", "SLURM_NODEID", VARIABLE)
OUTER += (LEASE_VARIABLE, PARENT_VARIABLE)


class Launcher:
    """Runs in the actor on a machine: holds one process of ours, which dies with the actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.log: IO[bytes] | None = None

    def address(self) -> str:
        """The address at which other machines reach this one."""
        return f"{socket.gethostname()}:{free_port()}"

    def start(self, words: list[str], environment: dict[str, str], log: str) -> None:
        make_folder(Path(log).parent)
        self.log = open(log, "ab")
        kept = {name: value for name, value in os.environ.items() if name not in OUTER}
        command = [sys.executable, "-m", __name__, str(os.getpid()), *words]
        self.process = subprocess.Popen(command, env={**kept, **environment}, stdout=self.log, stderr=subprocess.STDOUT)

    def poll(self) -> int | None:
        return self.process.poll() if self.process else None

    def signal(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)


@dataclass(frozen=True)
class RayJob:
    """What to run: the arguments of `terrella`, the run directory, and the number of machines of each kind."""

    words: tuple[str, ...]
    run: Path
    nodes: int
    sampler_hosts: int


def run_on_ray(job: RayJob, say: Callable[[str], None]) -> int:
    """Run to the end, starting again after a lost machine or a crash; returns 0 or STOPPED, raises other errors."""
    from ..rl.ray_pool import connect

    gpus = connect()
    asked: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _frame: asked.append(number))
        for s in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    }
    try:
        for start in range(RESTARTS + 1):
            try:
                code = _one_start(job, start, gpus, asked, say)
            except WorkerError as error:
                if start == RESTARTS:
                    raise
                say(f"ray: {error}; placing the run again ({start + 1} of {RESTARTS})")
                continue
            if code in (0, STOPPED):
                return code
            failure = TerrellaError(
                f"ray: the run ended with code {code}; its log is {job.run / 'logs' / 'ray-trainer-0.log'}"
            )
            failure.exit_code = code
            raise failure
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    raise AssertionError("unreachable")


def _one_start(job: RayJob, start: int, gpus: float, asked: list[int], say: Callable[[str], None]) -> int:
    """Place all machines at once, so that Ray spreads them, start their processes and follow them."""
    from ..rl.ray_pool import Actors

    logs, folder = job.run.absolute() / "logs", job.run.absolute() / "samplers" / f"ray-{uuid.uuid4().hex[:8]}"
    count = job.nodes + job.sampler_hosts
    machines = Actors(f"{__name__}:Launcher", count, gpus, START_S)
    try:
        shared = {
            "TERRELLA_COORDINATOR": machines.each("address", [()] * count, deadline_s=ANSWER_S)[0],
            "TERRELLA_NODES": str(job.nodes),
        }
        if job.sampler_hosts:
            shared[VARIABLE] = f"{folder}:{job.sampler_hosts}"
        calls: list[tuple] = [
            (list(job.words), {**shared, "TERRELLA_NODE_RANK": str(rank)}, str(logs / f"ray-trainer-{rank}.log"))
            for rank in range(job.nodes)
        ]
        calls += [
            (["sampler-host", str(folder)], {}, str(logs / f"ray-sampler-{i}.log")) for i in range(job.sampler_hosts)
        ]
        machines.each("start", calls, deadline_s=ANSWER_S)
        places = [node[:8] for node in machines.nodes]
        samplers = f"; samplers on {', '.join(places[job.nodes :])}" if job.sampler_hosts else ""
        say(f"ray: start {start + 1}: trainer on {', '.join(places[: job.nodes])}{samplers}")
        return _follow(job, machines, asked)
    finally:
        machines.close()


def _follow(job: RayJob, machines: Actors, asked: list[int]) -> int:
    """Wait until all trainer processes have ended. A lost machine, a dead sampler host and a crash are WorkerErrors."""
    forwarded, every = 0, [()] * len(machines.actors)
    while True:
        if len(asked) > forwarded:
            forwarded = len(asked)
            machines.each("signal", [(signal.SIGUSR1,)] * len(every), deadline_s=ANSWER_S)
        codes = machines.each("poll", every, deadline_s=ANSWER_S)
        trainers = codes[: job.nodes]
        if all(code is not None for code in trainers):
            worst = next((code for code in trainers if code), 0)
            if worst not in FINAL:
                raise WorkerError(f"trainer {trainers.index(worst)} ended with code {worst}")
            return worst
        if any(code is not None for code in codes[job.nodes :]):
            raise WorkerError("a sampler host ended")
        time.sleep(POLL_S)


def main() -> None:
    """Run `terrella` with the arguments after the parent's process id, and die with that parent."""
    from ..core.process import die_with_parent
    from .cli import main as terrella

    die_with_parent(int(sys.argv[1]))
    terrella(sys.argv[2:])


if __name__ == "__main__":
    main()
