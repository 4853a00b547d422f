"""What a person chooses about a cluster job. Everything here ends up as a visible line of the rendered script."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Literal

from ...core.errors import ConfigError

WORD = re.compile(r"[\w.,:@%+=&|*()\[\]/-]+")
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}|\d+|\d+-\d{1,2}")
SIGNAL_S = 120  # before the time limit; a checkpoint is written within 60 s
RESTARTS = 3  # after a crash that is nobody's setting: a dead worker, a lost peer


@dataclass(frozen=True)
class JobSettings:
    """One allocation: its size, its limits, and how the processes find their software."""

    nodes: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "4:00:00"
    gpus: int = 8  # of each node; 0 trains on the CPU
    ranks_per_node: int | None = None  # default: one rank on each GPU
    cpus: int | None = None  # of each node; default: what the partition gives
    constraint: str | None = None
    interface: str | None = None  # network interface of rendezvous and gloo traffic, e.g. ib0
    venv: str | None = None
    container: str | None = None
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines before the start, e.g. `module load cuda`
    sbatch: tuple[str, ...] = ()  # further options of sbatch, e.g. `--reservation=course`
    check_gpus: bool = False  # look at every node's GPUs before the start
    ray: bool = False
    rollout_nodes: int = 0  # nodes beside those of the trainer, for vLLM servers
    rollout_partition: str | None = None  # any of these three makes it a heterogeneous job
    rollout_constraint: str | None = None
    rollout_gpus: int | None = None
    restarts: int = RESTARTS

    def __post_init__(self) -> None:
        for name in (
            "partition",
            "account",
            "qos",
            "constraint",
            "interface",
            "rollout_partition",
            "rollout_constraint",
        ):
            value = getattr(self, name)
            if value is not None and not WORD.fullmatch(value):
                raise ConfigError(f"--{name.replace('_', '-')}: {value!r} is no word that SLURM takes")
        for option, values in (("--venv", (self.venv,)), ("--container", (self.container,)), ("--mount", self.mounts)):
            for value in values:
                require_path(option, value or "")
        for line in (*self.setup, *self.sbatch):
            require_one_line("--setup" if line in self.setup else "--sbatch", line)
        for line in self.sbatch:
            if not line.startswith("-"):
                raise ConfigError(f"--sbatch: '{line}' is no option of sbatch; write it as --sbatch=--mem=200G")
        if self.nodes < 1:
            raise ConfigError(f"--nodes: {self.nodes} must be at least 1")
        if self.gpus < 0:
            raise ConfigError(f"--gpus: {self.gpus} must not be negative; 0 trains on the CPU")
        if self.ranks < 1:
            raise ConfigError("--ranks-per-node: must be at least 1")
        if not TIME.fullmatch(self.time):
            raise ConfigError(f"--time: '{self.time}' is no SLURM time; write minutes, H:MM:SS or D-HH:MM:SS")
        if seconds(self.time) <= 2 * SIGNAL_S:
            raise ConfigError(
                f"--time: '{self.time}' leaves no room to save {SIGNAL_S} s before the limit; ask for at least 5 "
                "minutes"
            )
        if self.rollout_nodes < 0:
            raise ConfigError(f"--rollout-nodes: {self.rollout_nodes} must not be negative")
        if self.mixed and not self.rollout_nodes:
            raise ConfigError("--rollout-partition, --rollout-constraint, --rollout-gpus: need --rollout-nodes")
        if self.mixed and self.ray:
            raise ConfigError(
                "--ray: a Ray cluster spans one kind of node; leave out --rollout-partition, -constraint and -gpus"
            )
        if self.check_gpus and not self.gpus:
            raise ConfigError("--check-gpus: with --gpus 0 there are none")
        if self.container and self.venv:
            raise ConfigError("--container and --venv: choose one")
        if self.mounts and not self.container:
            raise ConfigError("--mount: needs --container")

    @property
    def ranks(self) -> int:
        """Processes on each node."""
        return self.ranks_per_node if self.ranks_per_node is not None else max(1, self.gpus)

    def without_samplers(self) -> JobSettings:
        """The same job with the trainer's nodes only."""
        return replace(self, rollout_nodes=0, rollout_partition=None, rollout_constraint=None, rollout_gpus=None)

    @property
    def whole_nodes(self) -> bool:
        """Whether the nodes are for this job alone; one with a single GPU shares its node."""
        return self.gpus > 1

    @property
    def asks_gpus(self) -> bool:
        """Whether GPUs are asked for by their number; some clusters want `--sbatch=--gres=gpu:h100:8` instead."""
        return self.gpus > 0 and not any(option.startswith(("--gres=gpu", "--gpus")) for option in self.sbatch)

    @property
    def mixed(self) -> bool:
        """Whether the sampler nodes are asked for on their own terms: a heterogeneous job."""
        return (
            self.rollout_partition is not None or self.rollout_constraint is not None or self.rollout_gpus is not None
        )

    @property
    def nodes_asked(self) -> int:
        """Nodes of the job, or of its first part when it is heterogeneous."""
        return self.nodes if self.mixed else self.nodes + self.rollout_nodes

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks

    def command_prefix(self) -> str:
        """What stands before `terrella` on the line that srun starts."""
        if self.container and self.runtime == "apptainer":
            # the working directory is mounted by default
            binds = "".join(f"--bind {shlex.quote(m)} " for m in self.mounts) + '--bind "$run" '
            return f"apptainer exec {'--nv ' if self.gpus else ''}{binds}{shlex.quote(self.container)} "
        return ""

    def srun_options(self) -> list[str]:
        """Options of srun that come from the container."""
        if not (self.container and self.runtime == "pyxis"):
            return []
        given = "".join(f"{mount}," for mount in self.mounts)
        inside = '"$PWD:$PWD,$(realpath "$run"):$(realpath "$run")"'
        mounts = f"--container-mounts={shlex.quote(given) if given else ''}{inside}"
        return [f"--container-image={shlex.quote(self.container)}", mounts, '--container-workdir="$PWD"']


def require_one_line(option: str, text: str) -> None:
    """What is written into a script must not become a further line of it."""
    if any(ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029" for c in text):
        raise ConfigError(f"{option}: {text!r} holds a line break or another control character")


def require_path(option: str, text: str) -> None:
    """A path as SLURM's and the containers' options take it."""
    require_one_line(option, text)
    if any(c.isspace() for c in text):
        raise ConfigError(f"{option}: {text!r} holds a blank, which SLURM's options do not take; choose another path")


def seconds(time: str) -> int:
    """A SLURM time limit in seconds."""
    days, _, rest = time.rpartition("-") if "-" in time else ("", "", time)
    parts = [int(p) for p in rest.split(":")]
    if days:  # D-H, D-H:M, D-H:M:S
        parts += [0] * (3 - len(parts))
        return int(days) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if len(parts) == 1:
        return parts[0] * 60
    return parts[0] * 60 + parts[1] if len(parts) == 2 else parts[0] * 3600 + parts[1] * 60 + parts[2]
