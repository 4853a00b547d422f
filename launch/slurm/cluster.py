"""Asks the cluster what it has, so that a wrong partition, account or log path is an error now and not a dead job
later.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, DeadlineError, TerrellaError
from ...core.files import make_folder, storage_errors
from .settings import JobSettings, seconds

ANSWER_S = 60.0


def ask(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command; a controller that does not answer is an error that says so."""
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError as error:
        raise TerrellaError(
            f"{command[0]}: no such command here; run this on a SLURM login node, or use --dry-run"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"{command[0]}: the SLURM controller did not answer within {ANSWER_S:.0f} s; try `scontrol ping`"
        ) from error


@dataclass(frozen=True)
class Partition:
    """What sinfo tells of a partition."""

    name: str
    up: bool
    default: bool
    nodes: int
    limit_s: int | None  # None: no limit
    gpus: int  # of its best node


def partitions() -> list[Partition]:
    """All partitions of the cluster; a partition with several kinds of node counts as the sum of them."""
    answer = ask("sinfo", "--noheader", "--format=%P|%a|%D|%l|%G")
    if answer.returncode:
        raise TerrellaError(f"sinfo: {answer.stderr.strip()}; is the SLURM controller up? try `scontrol ping`")
    found: dict[str, Partition] = {}
    for line in answer.stdout.splitlines():
        name, state, nodes, limit, gres = line.split("|")
        default, name = name.endswith("*"), name.rstrip("*")
        before = found.get(name)
        found[name] = Partition(
            name,
            state == "up",
            default,
            int(nodes) + (before.nodes if before else 0),
            None if limit in ("infinite", "n/a") else seconds(limit),
            max(_gpus(gres), before.gpus if before else 0),
        )
    return list(found.values())


def _gpus(gres: str) -> int:
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):  # without the sockets, as in gpu:h100:8(S:0-1)
        parts = item.split(":")
        if parts[0] == "gpu":
            total += int(parts[-1]) if parts[-1].isdigit() else 1
    return total


def check_partition(settings: JobSettings) -> None:
    """The partition, and that of the sampler nodes where it is another, exists, is up, and is large enough."""
    known = partitions()
    _check_part(known, "--", settings.partition, settings.nodes_asked, settings.gpus, settings.time)
    if settings.mixed:
        name = settings.rollout_partition or settings.partition
        gpus = settings.gpus if settings.rollout_gpus is None else settings.rollout_gpus
        _check_part(known, "--rollout-", name, settings.rollout_nodes, gpus, settings.time)


def _check_part(known: list[Partition], option: str, name: str | None, nodes: int, gpus: int, time: str) -> None:
    """`option` is how the options begin that ask for this part of the job."""
    names = ", ".join(sorted(p.name for p in known))
    chosen = [p for p in known if p.name == name or (name is None and p.default)]
    if not chosen:
        what = f"'{name}' is no partition of this cluster" if name else "the cluster has no default partition"
        raise ConfigError(f"{option}partition: {what}; choose one of: {names}")
    p = chosen[0]
    if not p.up:
        raise ConfigError(f"{option}partition: '{p.name}' is not up; choose one of: {names}")
    if nodes > p.nodes:
        raise ConfigError(f"{option}nodes: {nodes} is more than the {p.nodes} nodes of partition '{p.name}'")
    if gpus > p.gpus:
        raise ConfigError(
            f"{option}gpus: {gpus} is more than the {p.gpus} GPUs that a node of partition '{p.name}' has"
        )
    if p.limit_s is not None and seconds(time) > p.limit_s:
        raise ConfigError(f"--time: {time} is beyond the limit of partition '{p.name}' ({p.limit_s // 60} minutes)")


def check_account(settings: JobSettings) -> str | None:
    """Where the cluster keeps accounts, the user has the one that is named, or any at all. Returns what could not be
    checked.
    """
    unchecked = (
        f"--account {settings.account}: not checked, because this cluster keeps no accounts"
        if settings.account
        else None
    )
    if not shutil.which("sacctmgr"):
        return unchecked
    user = getpass.getuser()
    answer = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", "format=Account")
    if answer.returncode or "not running" in answer.stderr or "disabled" in answer.stderr:
        return unchecked  # no accounting on this cluster: sbatch itself decides
    accounts = sorted({line.strip() for line in answer.stdout.splitlines() if line.strip()})
    if not accounts and _enforced():
        raise ConfigError(
            f"--account: this cluster wants an account and user '{user}' has none; ask its administrators"
        )
    if settings.account is not None and accounts and settings.account not in accounts:
        raise ConfigError(
            f"--account: user '{user}' may not use '{settings.account}'; choose one of: {', '.join(accounts)}"
        )
    return None


def _enforced() -> bool:
    config = ask("scontrol", "show", "config").stdout
    return any(line.startswith("AccountingStorageEnforce") and "associations" in line for line in config.splitlines())


def check_writable(folder: Path) -> None:
    """SLURM does not create log folders: a job whose log cannot be opened dies without a word."""
    make_folder(folder)
    probe = folder / f".writable.{os.getpid()}"
    with storage_errors(probe):
        probe.write_text("")
        probe.unlink()


def check_script(text: str) -> None:
    """SLURM's own opinion of a script, without submitting it."""
    answer = ask("sbatch", "--test-only", stdin=text)
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        raise ConfigError(
            "sbatch would refuse this job: "
            f"{said[-1].removeprefix('allocation failure: ') if said else 'no reason given'}"
        )


def check_all(settings: JobSettings, run: Path, logs: Path, texts: list[str]) -> str | None:
    """Everything that can be known before submission. Returns what could not be checked."""
    check_partition(settings)
    unchecked = check_account(settings)
    check_writable(run)
    check_writable(logs)
    for text in texts:
        check_script(text)
    return unchecked
