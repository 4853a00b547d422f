"""Errors a person can act on. Each carries the exit code of the command that meets it (docs/configuration.md lists them)."""

from __future__ import annotations


class TerrellaError(Exception):
    """Something went wrong that the message explains; no traceback is shown for it."""

    exit_code = 1


class ConfigError(TerrellaError):
    """A recipe, an option or an input file must be changed before anything can run."""

    exit_code = 2


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
    """More samples of a step failed than the recipe tolerates; the message gives their share and the commonest reason."""

    exit_code = 9
