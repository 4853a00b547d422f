"""The run directory: resolved config, metrics, stage outcomes, checkpoints, rollouts, logs. One process group writes
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from . import lease as leases
from . import schema
from .environment import describe
from .errors import ConfigError, StorageError
from .files import file_digest, json_digest, make_folder, read_json, storage_errors, write_atomic, write_json
from .metrics import MetricsFile
from .sinks import Sink, result_table, rollout_table

FOLDERS = ("checkpoints", "rollouts", "logs", "results", "stages")
# a launcher, or a start that was killed early, may leave these without a config.yaml
BEFORE_CONFIG = {*FOLDERS, "samplers", "profile"}
DIGEST_LINE = "# digest: "
ASIDE = "set-aside"
ROWS = "rows.json"  # digests of the files of rows, and of modules beside the user's code
LEASE_VARIABLE = "TERRELLA_LEASE"
SHOWN = 5  # differing settings that a refusal names


@dataclass(frozen=True)
class Run:
    """A run directory as its owner sees it; every write first checks that the lease is still held."""

    path: Path
    token: str
    sinks: tuple[Sink, ...] = ()
    extra: Callable[[], Mapping[str, Any]] = dict  # see MetricsFile

    def guard(self) -> None:
        leases.require(self.path, self.token)

    @property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl", self.guard, self.sinks, self.extra)

    def outcome(self, stage: str) -> dict[str, Any] | None:
        """The outcome of a stage, or None if it has not finished."""
        return read_json(self.path / "stages" / f"{stage}.json")

    def finish(self, stage: str, outcome: dict[str, Any]) -> None:
        """Mark a stage finished: from now on it is skipped, and its files are verified before others use them."""
        self.guard()
        outcome = json.loads(json.dumps(outcome))  # as it will be read
        left = {
            "outcome": json_digest(outcome),
            "metrics": self.metrics.digest(stage),
            "files": _files_of(self.path, stage),
        }
        write_json(self.path / "stages" / f"{stage}.sums", {**left, "digest": json_digest(left)})
        write_json(self.path / "stages" / f"{stage}.json", outcome)

    def verify(self, stages: Sequence[str]) -> list[str]:
        """Compare the files and rows of finished stages with their recorded digests. A changed file or outcome is an
        error, because later stages build on it; changed rows of the record are a warning.
        """
        warnings: list[str] = []
        ended = [stage for stage in stages if self.outcome(stage) is not None]
        for stage in ended:
            sums = self.path / "stages" / f"{stage}.sums"
            remedy = f"restore it from a backup, or add --back-to {stage} to the same command"
            left = read_json(sums)
            if left is None:
                why = "missing (lost, or an earlier release finished the stage)"
                warnings.append(f"{sums}: {why}; changes to the files of {stage} cannot be detected")
                continue
            if not isinstance(left, dict) or left.pop("digest", None) != json_digest(left):
                raise StorageError(f"{sums}: damaged; {remedy}")
            if left["outcome"] != json_digest(self.outcome(stage)):
                raise StorageError(f"{sums.with_suffix('.json')}: changed since stage {stage} finished; {remedy}")
            for name, digest in left["files"].items():
                path = self.path / "stages" / stage / name
                if not path.is_file() or file_digest(path) != digest:
                    raise StorageError(
                        f"{path}: {'changed' if path.exists() else 'lost'} since stage {stage} finished; {remedy}"
                    )
            found = self.metrics.digest(stage)
            if found != left["metrics"]:
                warnings.append(changed_rows(self.metrics.path, stage, found["rows"], left["metrics"]["rows"]))
        self._require_order(stages, ended)
        return warnings

    def _require_order(self, stages: Sequence[str], ended: Sequence[str]) -> None:
        """A stage without an outcome must be the last one that started: otherwise its outcome was lost, and running it
        again would truncate the record. One that --steps extends has its outcome set aside, sums included.
        """
        first = next((stage for stage in stages if stage not in ended), None)
        if not (self.path / "stages" / f"{first}.sums").exists() and any(
            (self.path / ASIDE).glob(f"*/stages/{first}.json")
        ):
            return
        for later in stages[stages.index(first) + 1 :] if first else ():
            traces = (
                self.path / "stages" / f"{later}.json",
                self.path / "stages" / later,
                self.path / "checkpoints" / later,
            )
            if any(path.exists() for path in traces):
                raise StorageError(
                    f"{self.path / 'stages' / f'{first}.json'}: lost, although stage {later} started after it; restore "
                    f"it from a backup, or add --back-to {first} to the same command"
                )

    def write_rollouts(self, stage: str, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Keep a step's sample of trajectories for the report and for replay."""
        self.guard()
        rows = list(rows)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(self.path / "rollouts" / f"{stage}-{step:06d}.jsonl", text)
        for sink in self.sinks:
            sink.show(f"rollouts/{stage}", step, rollout_table(rows))

    def write_result(self, name: str, table: dict[str, Any]) -> None:
        """Write an evaluation table."""
        self.guard()
        write_json(self.path / "results" / f"{name}.json", table)
        for sink in self.sinks:
            sink.show(f"results/{name}", 0, result_table(table))


def _files_of(run: Path, stage: str) -> dict[str, str]:
    """Digests of the files in a stage's folder. Shards have checksums of their own, and a journal changes."""
    folder = run / "stages" / stage
    files = [
        p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".tar", ".index") and p.name != "dataset.json"
    ]
    own = [p for p in files if p.relative_to(folder).parts[0] not in ("journal", "sampler")]
    return {str(p.relative_to(folder)): file_digest(p) for p in sorted(own)}


def changed_rows(path: Path, stage: str, found: int, written: int) -> str:
    """A warning that the record no longer holds the rows that were written."""
    what = f"{written - found} of the {written} rows are lost" if found < written else "rows were changed"
    return (
        f"{path}: {what} that stage {stage} wrote; restore it from a backup, or the report will show what it holds now"
    )


def create(path: Path, config: Any, wait_s: float = 0.0) -> tuple[Run, leases.Lease]:
    """Open a run directory for writing. A new one is set up; one in which a stage has started must have the same
    settings (see schema.differences).
    """
    require_ours(path)
    make_folder(path)
    with storage_errors(path):
        probe = path / f".writable.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    lease = leases.Lease.acquire(path, wait_s)
    try:
        for name in FOLDERS:
            make_folder(path / name)
        text = f"{DIGEST_LINE}{schema.digest(config)}\n{schema.dump(config)}"
        stored = path / "config.yaml"
        if not has_begun(path):  # nothing depends on the earlier settings, which may have been wrong
            (path / ROWS).unlink(missing_ok=True)
            write_atomic(stored, text)
        elif not stored.exists():
            write_atomic(stored, text)
        elif stored.read_bytes() != text.encode():
            _require_equal(stored, config)
        write_json(path / "environment.json", describe())
    except BaseException:  # in a notebook the process survives, and may try again
        lease.release()
        raise
    return Run(path, lease.token), lease


def has_begun(path: Path) -> bool:
    """Whether any stage has written something, so that settings and files must not change any more."""
    left = [*(path / name for name in ("metrics.jsonl", ASIDE)), *(path / name for name in FOLDERS if name != "logs")]
    return any(any(place.iterdir()) if place.is_dir() else place.exists() for place in left)


def require_ours(path: Path) -> None:
    """Refuse a folder with foreign files: a run would write among them."""
    config = path / "config.yaml"
    if (path / "lease.json").exists():
        return
    with storage_errors(path):
        if config.is_file():
            with open(config, "rb") as stream:
                if not stream.read(len(DIGEST_LINE)).startswith(DIGEST_LINE.encode()):
                    raise ConfigError(f"{config}: was not written by terrella; choose another --run folder")
            return
        names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    foreign = sorted(name for name in names - BEFORE_CONFIG if not name.startswith((".", "lease.")))
    if foreign:
        more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise ConfigError(
            f"{path}: is not empty and not a run directory (it holds {', '.join(foreign[:SHOWN])}{more}, and no "
            "config.yaml); choose another --run folder"
        )


def set_aside(run: Path, paths: Iterable[Path]) -> Path | None:
    """Move those of `paths` that exist to a new folder under RUN/set-aside; returns it, or None if none existed."""
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    aside = next(folder for i in count(1) if not (folder := run / ASIDE / f"{i:03d}").exists())
    for path in found:
        with storage_errors(path):
            os.rename(path, make_folder((aside / path.relative_to(run)).parent) / path.name)
    return aside


def attach(path: Path, sinks: Sequence[Sink] = ()) -> Run:
    """Open the run in a worker process; its owner passes the lease on through the environment."""
    token = os.environ.get(LEASE_VARIABLE)
    if not token:
        raise ConfigError(f"{path}: workers are started by 'terrella train'; {LEASE_VARIABLE} is not set")
    return Run(path, token, tuple(sinks))


def require_same_settings(path: Path, config: Any) -> None:
    """Refuse a folder in which a run with other settings has started, as `create` would."""
    if has_begun(path) and (path / "config.yaml").exists():
        _require_equal(path / "config.yaml", config)


def _require_equal(stored: Path, config: Any) -> None:
    """Refuse other settings than the stored ones. The stored file stays as it is; keys it lacks have defaults."""
    try:
        plain = yaml.safe_load(stored.read_bytes())
        if not isinstance(plain, dict):
            raise ValueError("it holds no settings")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{stored}: cannot be read ({str(error).splitlines()[0]}); choose another --run folder"
        ) from error
    differences = schema.differences(plain, config)
    if differences:
        changes = "; ".join(f"{key}: {old!r} then, {new!r} now" for key, old, new in differences[:SHOWN])
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ConfigError(
            f"{stored}: this run was started with other settings ({changes}{more}); "
            "choose another --run folder, or give the old settings to resume it"
        )
