"""Web tasks in WebArena's file format: reading, checking, and putting addresses in the place of placeholders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError

EVAL_TYPES = ("string_match", "url_match", "program_html")
MATCHES = {"exact_match", "must_include", "fuzzy_match", "must_exclude", "one_of", "required_values"}
URL_NOTES = ("EXACT", "GOLD in PRED")
SEVERAL = " |AND| "
REAL_PLACEHOLDERS = (
    "__SHOPPING__",
    "__SHOPPING_ADMIN__",
    "__REDDIT__",
    "__GITLAB__",
    "__MAP__",
    "__WIKIPEDIA__",
    "__HOMEPAGE__",
)


@dataclass(frozen=True)
class Target:
    """One thing program_html looks at."""

    url: str
    locator: str
    required: Mapping[str, Any]
    prepare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What makes a task solved."""

    types: tuple[str, ...]
    answers: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    url_note: str = ""
    targets: tuple[Target, ...] = ()
    string_note: str = ""

    @property
    def checkable(self) -> bool:
        """Whether an answer can be right or wrong. WebRL's template for instructions without ground truth asks for
        the answer N/A.
        """
        return self.types != ("string_match",) or dict(self.answers) != {"exact_match": "N/A"}


@dataclass(frozen=True)
class WebTask:
    """One task. `raw` is the record as it was read, for files that other tools read."""

    task_id: str
    sites: tuple[str, ...]
    intent: str
    start_urls: tuple[str, ...]
    evaluation: Evaluation
    require_login: bool = False
    storage_state: str = ""
    geolocation: tuple[float, float] | None = None
    template: str = ""
    template_id: int = -1
    viewport: tuple[int, int] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


def expand(value: Any, addresses: Mapping[str, str]) -> Any:
    """A record with every placeholder replaced by its address."""
    if isinstance(value, str):
        for name, address in addresses.items():
            value = value.replace(name, address.rstrip("/"))
        return value
    if isinstance(value, dict):
        return {key: expand(inner, addresses) for key, inner in value.items()}
    if isinstance(value, list):
        return [expand(inner, addresses) for inner in value]
    return value


def parse_task(record: Mapping[str, Any], where: str = "task") -> WebTask:
    """A task of a record; a fault names the place and the key."""

    def need(key: str, kind: type | tuple[type, ...], held: Mapping[str, Any] = record, prefix: str = "") -> Any:
        if key not in held or not isinstance(held[key], kind):
            raise ConfigError(
                f"{where}: {prefix}{key} must be {getattr(kind, '__name__', 'of another type')}, not "
                f"{held.get(key)!r:.60}"
            )
        return held[key]

    evaluation = need("eval", dict)
    types = tuple(need("eval_types", list, evaluation, "eval."))
    unknown = [t for t in types if t not in EVAL_TYPES]
    if unknown or not types:
        raise ConfigError(f"{where}: eval.eval_types = {list(types)} must be some of {', '.join(EVAL_TYPES)}")
    answers = evaluation.get("reference_answers") or {}
    if not isinstance(answers, dict) or set(answers) - MATCHES:
        raise ConfigError(
            f"{where}: eval.reference_answers has the keys {sorted(answers)}; known are {', '.join(sorted(MATCHES))}"
        )
    if "string_match" in types and not answers:
        raise ConfigError(f"{where}: eval.reference_answers is empty, but string_match is asked for")
    if "url_match" in types and not evaluation.get("reference_url"):
        raise ConfigError(f"{where}: eval.reference_url is empty, but url_match is asked for")
    note = evaluation.get("url_note") or ""
    if note and note not in URL_NOTES:
        raise ConfigError(f"{where}: eval.url_note = {note!r} must be one of {', '.join(URL_NOTES)}")
    targets = tuple(
        _target(t, f"{where}: eval.program_html[{i}]")
        for i, t in enumerate(evaluation.get("program_html") or [])
        if not isinstance(t, dict) or "locator" in t
    )
    if "program_html" in types and not targets:
        raise ConfigError(f"{where}: eval.program_html is empty, but program_html is asked for")
    place = _pair(record, "geolocation", ("latitude", "longitude"), where)
    size = _pair(record, "viewport_size", ("width", "height"), where)
    sites = tuple(need("sites", list))
    if not sites or not all(isinstance(site, str) for site in sites):
        raise ConfigError(f"{where}: sites = {list(sites)} must be some texts")
    return WebTask(
        task_id=str(need("task_id", (int, str))),
        sites=sites,
        intent=need("intent", str),
        start_urls=tuple(need("start_url", str).split(SEVERAL)),
        evaluation=Evaluation(
            types, answers, evaluation.get("reference_url") or "", note, targets, evaluation.get("string_note") or ""
        ),
        require_login=bool(record.get("require_login")),
        storage_state=need("storage_state", str) if record.get("storage_state") else "",
        geolocation=place,
        template=str(record.get("intent_template") or ""),
        template_id=-1 if record.get("intent_template_id") is None else need("intent_template_id", int),
        viewport=(int(size[0]), int(size[1])) if size else None,
        raw=record,
    )


def _pair(record: Mapping[str, Any], key: str, names: tuple[str, str], where: str) -> tuple[float, float] | None:
    """Two numbers of a record's section; None where it has none."""
    held = record.get(key)
    if not held:
        return None
    if not isinstance(held, dict) or not all(isinstance(held.get(name), int | float) for name in names):
        raise ConfigError(f"{where}: {key} must have the numbers {' and '.join(names)}, not {held!r:.60}")
    return float(held[names[0]]), float(held[names[1]])


def _target(target: Any, where: str) -> Target:
    if not isinstance(target, dict):
        raise ConfigError(f"{where} must be a record, not {target!r:.60}")
    required, prepare = target.get("required_contents"), target.get("prep_actions") or []
    if not isinstance(required, dict) or set(required) - MATCHES or not required:
        raise ConfigError(f"{where}.required_contents must have some of the keys {', '.join(sorted(MATCHES))}")
    if not isinstance(target.get("url"), str) or not isinstance(target["locator"], str):
        raise ConfigError(f"{where}: url and locator must be texts")
    if not isinstance(prepare, list):
        raise ConfigError(f"{where}.prep_actions must be a list")
    return Target(target["url"], target["locator"], required, tuple(prepare))


def load_web_tasks(path: str | Path, addresses: Mapping[str, str] | None = None) -> list[WebTask]:
    """The tasks of a list file, or of a folder with one file a task; placeholders without an address are refused."""
    place = Path(path)
    try:
        files = sorted(place.glob("*.json"), key=lambda p: (len(p.stem), p.stem)) if place.is_dir() else [place]
        held = [json.loads(f.read_text(encoding="utf-8")) for f in files]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the tasks: {error}") from error
    records = [r for item in held for r in (item if isinstance(item, list) else [item])]
    if not records:
        raise ConfigError(f"{path}: holds no tasks")
    tasks = []
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}[{index}]: a task is a record")
        task = parse_task(expand(record, addresses or {}), f"{path}[{index}]")
        if addresses is not None:
            missing = next((p for p in REAL_PLACEHOLDERS if p in json.dumps(task.raw)), None)
            if missing:
                raise ConfigError(f"{path}[{index}]: there is no address for {missing}; set it in `addresses`")
        tasks.append(task)
    return tasks
