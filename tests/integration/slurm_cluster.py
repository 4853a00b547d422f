"""A real SLURM of several "nodes" on this machine: one controller and one slurmd for each node, on loopback, without
systemd or cgroups.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from terrella.tests.reap import is_running

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "munged")
FIRST_PORT = 17000
ANSWER_S = 300.0  # of a command; a busy machine needs seconds where a free one needs milliseconds

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=cred_expire=5,socket={folder}/munge/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
SlurmctldTimeout=60
KillWait=5
TCPTimeout=10
BatchStartTimeout=300
MinJobAge=600
SlurmdParameters=config_overrides
{gres_types}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=4000 State=UNKNOWN {gres}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
PartitionName=short Nodes=n1 MaxTime=10 State=UP
"""  # noqa: E501


def missing() -> str | None:
    """Why SLURM cannot be brought up here, or None."""
    absent = [name for name in PROGRAMS if not _find(name)]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)}); apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM daemons of this fixture need root"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class Cluster:
    """A running SLURM; `environment` makes its commands speak to it."""

    folder: Path
    nodes: int
    gpus: int = 0

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TERRELLA"))}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def up(self, deadline_s: float = 600.0) -> Cluster:
        """Start munge, the controller and the nodes, and wait until the nodes are idle."""
        for name in ("state", "log", "munge", "dev", *(f"spool-n{i + 1}" for i in range(self.nodes))):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._munge()
        self._write_config()
        self._run(_find("slurmctld") or "", "-f", str(self.folder / "slurm.conf"))
        for i in range(self.nodes):
            self._run(_find("slurmd") or "", "-f", str(self.folder / "slurm.conf"), "-N", f"n{i + 1}")
        limit = time.monotonic() + deadline_s
        while True:
            states = self.ask("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T", check=False).split()
            if states.count("idle") >= self.nodes:
                return self
            if time.monotonic() > limit:
                log = (self.folder / "log" / "slurmctld.log").read_text()[-2000:]
                raise TimeoutError(f"SLURM has nodes {states} after {deadline_s:.0f} s\n{log}")
            time.sleep(0.5)

    def _munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(1024))
        os.chmod(folder / "key", 0o400)
        self._run(
            _find("munged") or "", "--force", f"--key-file={folder / 'key'}", f"--socket={folder / 'munge.socket'}",
            f"--pid-file={folder / 'munged.pid'}", f"--log-file={folder / 'munged.log'}", f"--seed-file={folder / 'seed'}",  # noqa: E501
        )  # fmt: skip

    def _write_config(self) -> None:
        gres_types = gres = ""
        if self.gpus:  # GPUs are names only: enough for scheduling and `sbatch --test-only`
            gres_types, gres = "GresTypes=gpu", f"Gres=gpu:{self.gpus}"
            for i in range(self.gpus):
                (self.folder / "dev" / f"gpu{i}").touch()
            (self.folder / "gres.conf").write_text(
                f"AutoDetect=off\nName=gpu File={self.folder}/dev/gpu[0-{self.gpus - 1}]\n"
            )
        ports = _free_ports(self.nodes + 1)
        text = CONFIG.format(
            folder=self.folder, host=socket.gethostname().split(".")[0], nodes=self.nodes,
            port=ports, first=ports + 1, last=ports + self.nodes, cpus=64 if self.gpus else 4, gres_types=gres_types,
            gres=gres, 
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=ANSWER_S)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")

    def ask(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """The answer of a SLURM command."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=ANSWER_S, cwd=cwd)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """The controller's record of a job."""
        line = self.ask("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def wait(self, job: str, states: tuple[str, ...] = ("COMPLETED",), deadline_s: float = 600.0) -> dict[str, str]:
        """Wait until a job is in one of the states; another end is an error."""
        limit = time.monotonic() + deadline_s
        while True:
            known = self.job(job)
            if known["JobState"] in states:
                return known
            if known["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "COMPLETED"):
                raise AssertionError(
                    f"job {job} is {known['JobState']}, exit code {known['ExitCode']}\n{self.log(known)}"
                )
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"job {job} is {known['JobState']} ({known['Reason']}) after {deadline_s:.0f} s\n{self.log(known)}"
                )
            time.sleep(0.5)

    def log(self, known: dict[str, str]) -> str:
        """What a job printed."""
        path = Path(known.get("StdOut", ""))
        return path.read_text() if path.is_file() else "no log"

    def pid(self, node: str) -> int:
        """The process of a node's slurmd."""
        return int((self.folder / f"slurmd-{node}.pid").read_text())

    def down(self) -> None:
        """End the jobs and then the daemons that were started here, by their ids."""
        self.ask("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        self.ask("scancel", "--user=root", check=False)
        limit = time.monotonic() + 60.0  # what a job started must not outlive its cluster
        while self.ask("squeue", "--noheader", check=False).strip() and time.monotonic() < limit:
            time.sleep(0.5)
        files = [
            *self.folder.glob("slurmd-n*.pid"),
            self.folder / "slurmctld.pid",
            self.folder / "munge" / "munged.pid",
        ]
        pids = [int(path.read_text()) for path in files if path.is_file() and path.read_text().strip()]
        for number, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            limit = time.monotonic() + grace_s
            while pids and time.monotonic() < limit:
                pids = [pid for pid in pids if is_running(pid)]
                time.sleep(0.1)


@contextlib.contextmanager
def running(folder: Path, nodes: int, deadline_s: float = 1800.0) -> Iterator[Cluster]:
    """A cluster for the tests of one file, brought up when no other file on this machine has one: two and their jobs
    would be too much for two cores.
    """
    with (Path(tempfile.gettempdir()) / "terrella-slurm.lock").open("w") as lock:
        limit = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise TimeoutError(f"{lock.name}: other tests have a SLURM after {deadline_s:.0f} s") from None
                time.sleep(1.0)
        cluster = Cluster(folder, nodes)
        try:
            yield cluster.up()
        finally:
            cluster.down()


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free on loopback."""
    for first in range(FIRST_PORT, 60000, 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError("no free ports")
