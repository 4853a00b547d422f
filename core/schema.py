"""YAML into frozen dataclasses, keeping line numbers so that an error names file, line and the nearest valid key.

A dataclass is the schema. Field types: bool, int, float, str, `X | None`, Literal, list[X], tuple[X, ...], tuple[X, Y],
dict[str, X], nested dataclasses, and unions of dataclasses that each have a field `kind: Literal[...]`. What a user
brings (core/by_path.py) is a `ByPath`, written as text, or a section of such a union whose kind holds a colon; its file
is hashed here, where an error knows its line. No number may be NaN or infinite, and none negative but those that a
dataclass names in `signed: ClassVar[tuple[str, ...]]`. Other range rules live in its `__post_init__`, which raises
ValueError("key: what is wrong"). `earlier_defaults: ClassVar[dict]` holds defaults of earlier releases: a removed
setting is ignored at that value, and a run that was started with a changed default can be resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from . import by_path
from .errors import ConfigError, did_you_mean

T = TypeVar("T")
_hints = functools.cache(typing.get_type_hints)  # compiles every annotation: most of the time that a recipe took
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MOST_CHARACTERS, MOST_VALUES, DEEPEST = 1_000_000, 50_000, 64  # of a YAML file


@dataclasses.dataclass
class Located:
    """A YAML value and its position in the file."""

    value: Any  # scalar, list[Located] or dict[str, Located]
    where: str
    folder: Path = Path()  # of the file (for an override: the current one); a user's own files are relative to it


def plain(tree: Located) -> Any:
    """A tree as plain dicts, lists and scalars."""
    if isinstance(tree.value, dict):
        return {key: plain(item) for key, item in tree.value.items()}
    return [plain(item) for item in tree.value] if isinstance(tree.value, list) else tree.value


class _Reader:
    """Builds located values from YAML nodes, with limits: a few aliases can expand to more values than memory holds."""

    def __init__(self, loader: yaml.SafeLoader, source: str, folder: Path) -> None:
        self.loader, self.source, self.folder, self.left = loader, source, folder, MOST_VALUES

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, depth: int = 0) -> Located:
        where = self.where(node)
        self.left -= 1
        if self.left < 0 or depth > DEEPEST:
            raise ConfigError(
                f"{where}: more than {MOST_VALUES} values or {DEEPEST} levels, aliases written out; no recipe needs "
                "that"
            )
        if isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN_TAGS:
            raise ConfigError(f"{where}: the tag {_short(node.tag)} is not allowed")
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Located] = {}
            for key_node, value_node in node.value:
                at = self.where(key_node)
                key = self.scalar(key_node)
                if not isinstance(key, str):
                    raise ConfigError(f"{at}: key {key!r} must be text")
                if key in out:
                    raise ConfigError(f"{at}: key '{key}' is given twice")
                item = self.read(value_node, depth + 1)
                item.where = at
                out[key] = item
            return Located(out, where, self.folder)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.read(child, depth + 1) for child in node.value], where, self.folder)
        return Located(self.scalar(node), where, self.folder)

    def scalar(self, node: yaml.Node) -> Any:
        """A plain value; an invalid date or number, or an unusable one, is an error."""
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self.where(node)}: a key must be text, not a list or a section")
        try:
            value = self.loader.construct_object(node)
        except (ValueError, ArithmeticError, AttributeError) as error:
            raise ConfigError(
                f"{self.where(node)}: cannot be read as the number or date that it looks like: {_short(node.value)}"
            ) from error
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ConfigError(f"{self.where(node)}: {_short(node.value)} is too large a number")
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{self.where(node)}: {_short(value)!r} holds a null character")
        return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} characters)"


def parse_yaml(text: str, source: str, folder: Path = Path()) -> Located:
    """Parse YAML text into values that know their line; `source` is the file name used in messages, `folder` the one
    it lies in.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{source}: {len(text)} characters; a recipe has at most {MOST_CHARACTERS}")
    if (
        max(accumulate(1 if mark in "[{" else -1 for mark in re.findall(r"[][{}]", text)), default=0) > 2 * DEEPEST
    ):  # the parser is slow on deep nesting
        raise ConfigError(f"{source}: nested more than {DEEPEST} levels deep; no recipe needs that")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return Located({}, f"{source}:1") if node is None else _Reader(loader, source, folder).read(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ConfigError(f"{source}: nested more than {DEEPEST} levels deep; no recipe needs that") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from error


def apply_override(tree: Located, setting: str) -> None:
    """Write one `a.b.c=value` into the tree; the value is read as YAML. A null removes a named section of a list, as
    in a file with a base."""
    path, sep, raw = setting.partition("=")
    where = f"--set {setting}"
    if not sep or not path.strip():
        raise ConfigError(f"{where}: write it as key.subkey=value")
    node = tree
    *parents, last = path.strip().split(".")
    for part in parents:
        node = _child(node, part, where)
    if isinstance(node.value, list):
        index, value = _index(node, last, where), _relabel(parse_yaml(raw, where), where)
        if value.value is None and _name(node.value[index]) == last:
            del node.value[index]
        else:
            node.value[index] = value
    elif not isinstance(node.value, dict):
        raise ConfigError(f"{where}: '{last}' has no parent section ({node.where} holds a plain value)")
    else:
        node.value[last] = _relabel(parse_yaml(raw, where), where)


def merge(base: Located, over: Located) -> Located:
    """The base with the other's keys merged over it; every value keeps its position. Sections merge key by key. A list
    of named sections can be merged with a section whose keys are their names: null removes one, and `*` means all that
    have the key."""
    if isinstance(base.value, list) and isinstance(over.value, dict):
        return _merge_named(base, over)
    if not isinstance(base.value, dict) or not isinstance(over.value, dict) or _kind(over) not in (None, _kind(base)):
        return over
    merged = dict(base.value)
    for key, item in over.value.items():
        merged[key] = merge(merged[key], item) if key in merged else item
    return Located(merged, over.where)


def _kind(item: Located) -> Any:
    return item.value["kind"].value if "kind" in item.value else None


def _name(item: Located) -> str | None:
    """The name of a named section."""
    name = item.value["name"].value if isinstance(item.value, dict) and "name" in item.value else None
    return name if isinstance(name, str) else None


def _merge_named(base: Located, over: Located) -> Located:
    named = {name: c for c in base.value if (name := _name(c)) is not None}
    for name, change in over.value.items():
        if name == "*":
            if not isinstance(change.value, dict):
                raise ConfigError(f"{change.where}: '*' must be a section with keys, not {plain(change)!r}")
            for key, item in change.value.items():
                named = {n: merge(c, Located({key: item}, c.where)) if key in c.value else c for n, c in named.items()}
        elif name not in named:
            hint = did_you_mean(name, named, cutoff=0.5)
            raise ConfigError(f"{change.where}: '{name}' is none of those in the base ({', '.join(named)}){hint}")
        elif change.value is None:
            del named[name]
        else:
            named[name] = merge(named[name], change)
    return Located(list(named.values()), over.where)


def _child(node: Located, part: str, where: str) -> Located:
    if isinstance(node.value, list):
        return node.value[_index(node, part, where)]
    if not isinstance(node.value, dict):
        raise ConfigError(f"{where}: '{part}' has no parent section ({node.where} holds a plain value)")
    if part not in node.value or node.value[part].value is None:
        node.value[part] = Located({}, where)
    return node.value[part]


def _index(node: Located, part: str, where: str) -> int:
    """The index of a list item, given by number or, in a list of named sections, by name."""
    if part.isdecimal() and len(part) < 10 and int(part) < len(node.value):
        return int(part)
    names = [_name(c) for c in node.value]
    if part in names:
        return names.index(part)
    named = [name for name in names if name]
    kinds = f"no name ({', '.join(named)}) and no number" if named else "no number"
    hint = did_you_mean(part, named, cutoff=0.5)
    raise ConfigError(f"{where}: '{part}' is {kinds} (0 to {len(node.value) - 1}) of the list at {node.where}{hint}")


def _relabel(item: Located, where: str) -> Located:
    item.where = where
    children = (
        item.value.values() if isinstance(item.value, dict) else item.value if isinstance(item.value, list) else ()
    )
    for child in children:
        _relabel(child, where)
    return item


def located(value: Any, where: str) -> Located:
    """Plain values as a parsed tree would hold them, all with the same position."""
    if isinstance(value, dict):
        return Located({name: located(child, where) for name, child in value.items()}, where)
    return Located([located(child, where) for child in value] if isinstance(value, list) else value, where)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if kind in (by_path.OwnFile, by_path.OwnText):
        return "str"
    return getattr(kind, "__name__", str(kind)).replace("NoneType", "null")


def build(kind: type[T], item: Located, key: str = "") -> T:
    """Turn a parsed YAML tree into `kind`, or raise a ConfigError that names the place and the nearest valid key."""
    return _build(kind, item, key)


def _build(kind: Any, item: Located, key: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        options = typing.get_args(kind)
        if item.value is None and type(None) in options:
            return None
        choices = [option for option in options if option is not type(None)]
        own = [option for option in choices if _is_own(option)]
        # with a colon it is the user's own, without one a built-in name
        if own and len(choices) > 1 and isinstance(item.value, str):
            if item.value.endswith(".py"):
                raise ConfigError(
                    f"{item.where}: {key} = {item.value!r} names no function; write it as {item.value}:NAME"
                )
            choices = own if ":" in item.value else [option for option in choices if option not in own]
        if len(choices) == 1:
            return _build(choices[0], item, key)
        if all(dataclasses.is_dataclass(option) for option in choices):
            chosen = _by_kind(choices, item, key)
            return _build(chosen, _own_section(chosen, item, key) if _is_own(chosen) else item, key)
        for option in choices:
            try:
                return _build(option, item, key)
            except ConfigError:
                continue
        raise ConfigError(f"{item.where}: {key} = {plain(item)!r} must be {' or '.join(map(_type_name, options))}")
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, item, key)
    if origin is Literal:
        if item.value in typing.get_args(kind):
            return item.value
        hint = did_you_mean(str(plain(item)), map(str, typing.get_args(kind)))
        raise ConfigError(f"{item.where}: {key} = {plain(item)!r} must be {_type_name(kind)}{hint}")
    if origin in (list, tuple):
        if not isinstance(item.value, list):
            raise ConfigError(f"{item.where}: {key} must be a list, not {plain(item)!r}")
        kinds = typing.get_args(kind)
        if origin is list or kinds[1:] == (...,):
            kinds = kinds[:1] * len(item.value)
        if len(item.value) != len(kinds):
            raise ConfigError(f"{item.where}: {key} = {plain(item)!r} must be a list of {len(kinds)}")
        pairs = zip(kinds, item.value, strict=True)
        return origin(_build(one, child, f"{key}[{i}]") for i, (one, child) in enumerate(pairs))
    if origin is dict:
        if not isinstance(item.value, dict):
            raise ConfigError(f"{item.where}: {key} must be a section with keys, not {plain(item)!r}")
        return {name: _build(typing.get_args(kind)[1], child, f"{key}.{name}") for name, child in item.value.items()}
    if kind is Any:
        return _writable(item, key)
    value = item.value
    if kind in (by_path.OwnFile, by_path.OwnText) and isinstance(value, str):
        return _own_file(kind, value, item, key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            value = float(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{item.where}: {key} = {value} must be a finite number")
    if type(value) is not kind:
        raise ConfigError(f"{item.where}: {key} = {plain(item)!r} must be {_type_name(kind)}")
    return value


def _by_kind(choices: list[Any], item: Located, key: str) -> Any:
    """Choose the dataclass of a section by its `kind` key."""
    kinds = {typing.get_args(_hints(choice)["kind"])[0]: choice for choice in choices}
    if not isinstance(item.value, dict) or "kind" not in item.value:
        raise ConfigError(f"{item.where}: {key} needs a key 'kind': one of {', '.join(kinds)}")
    kind = item.value["kind"]
    if isinstance(kind.value, str) and ":" in kind.value and _is_own(kinds.get("path")):
        return kinds["path"]
    if not isinstance(kind.value, str) or kind.value not in kinds:
        hint = did_you_mean(str(plain(kind)), kinds, f"valid kinds: {', '.join(kinds)}")
        if str(kind.value).endswith(".py") and "path" in kinds:
            hint = f"; write it as {kind.value}:Name"
        raise ConfigError(f"{kind.where}: {key}.kind = {plain(kind)!r} is unknown{hint}")
    return kinds[kind.value]


def _is_own(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, by_path.ByPath)


_TEXT_FILE = re.compile(r"[^\s{}]+\.(jinja|jinja2|j2|txt|md)")  # a path, not a prompt text


def _own_file(kind: Any, value: str, item: Located, key: str) -> str:
    """A file's absolute path, or its text. A file that is not beside the recipe is looked for in the current folder."""
    path = by_path.existing(value, item.folder)
    if path is None and kind is by_path.OwnText and _TEXT_FILE.fullmatch(value):
        raise ConfigError(
            f"{item.where}: {key} = {value}: no such file, beside the recipe or in the current folder; correct the "
            "path, or end it with a blank where it is the text itself"
        )
    if path is None or (kind is by_path.OwnText and not path.is_file()):
        return value
    try:
        return str(path.resolve()) if kind is by_path.OwnFile else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{item.where}: {path} cannot be read as a text file: {error}") from error


def _own_section(kind: Any, item: Located, key: str) -> Located:
    """A section whose kind is `file.py:Name`: that becomes its path, and keys that are not fields become arguments."""
    path = item.value["kind"]
    if path.value == "path":
        return item
    for name in ("path", "digest"):
        if name in item.value:
            raise ConfigError(
                f"{item.value[name].where}: {key}.{name} is taken; an argument of that name goes under {key}.args"
            )
    names = {f.name for f in dataclasses.fields(kind)}
    further = {name: child for name, child in item.value.items() if name not in names}
    kept = {name: child for name, child in item.value.items() if name in names}
    target, meant = kind.named(path.value)
    clash = next((name for name in meant if name in further), None)
    if clash is not None:
        raise ConfigError(f"{further[clash].where}: {key}.{clash} is what kind names; leave it out")
    further |= {name: Located(value, path.where) for name, value in meant.items()}
    if further:
        kept["args"] = merge(kept.get("args", Located({}, item.where)), Located(further, item.where))
    return Located(
        {**kept, "kind": Located("path", path.where), "path": Located(target, path.where, path.folder)}, item.where
    )


def _build_dataclass(kind: Any, item: Located, key: str) -> Any:
    if _is_own(kind) and isinstance(item.value, str):
        section = issubclass(kind, by_path.KindByPath)
        item = (
            _own_section(kind, Located({"kind": item}, item.where), key)
            if section
            else Located({"path": item}, item.where)
        )
    if not isinstance(item.value, dict):
        raise ConfigError(f"{item.where}: {key or kind.__name__} must be a section with keys, not {plain(item)!r}")
    hints = _hints(kind)
    names = {f.name: f for f in dataclasses.fields(kind) if f.init}
    earlier_defaults: dict[str, Any] = getattr(kind, "earlier_defaults", {})
    values: dict[str, Any] = {}
    for name, child in item.value.items():
        dotted = f"{key}.{name}" if key else name
        if name in earlier_defaults and name not in names and plain(child) == earlier_defaults[name]:
            continue
        if name not in names:
            hint = did_you_mean(name, names, f"valid keys: {', '.join(names)}", cutoff=0.5)
            raise ConfigError(f"{child.where}: unknown key '{dotted}'{hint}")
        values[name] = _build(hints[name], child, dotted)
        if name not in getattr(kind, "signed", ()) and any(v < 0 for v in _numbers(values[name])):
            raise ConfigError(f"{child.where}: {dotted} = {plain(child)!r} must not be negative")
    for name, f in names.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{item.where}: key '{f'{key}.{name}' if key else name}' is missing")
    try:
        built = kind(**values)
        if not isinstance(built, by_path.ByPath) or built.digest:
            return built
        where, folder = item.value["path"].where, item.value["path"].folder
        try:
            path = by_path.absolute(built.path, folder)
            return dataclasses.replace(built, path=path, digest=by_path.file_digest(path, folder))
        except ConfigError as error:
            raise ConfigError(f"{where}: {key}: {error}") from error
    except (ValueError, ArithmeticError) as error:
        name = str(error).partition(":")[0]
        where = item.value[name].where if name in item.value else item.where
        raise ConfigError(f"{where}: {f'{key}.' if key else ''}{error}") from error


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []


def _writable(item: Located, key: str) -> Any:
    """Plain values of any shape; a value that config.yaml could not restore, such as a date, is an error."""
    if isinstance(item.value, dict):
        return {name: _writable(child, f"{key}.{name}") for name, child in item.value.items()}
    if isinstance(item.value, list):
        return [_writable(child, f"{key}[{i}]") for i, child in enumerate(item.value)]
    if not isinstance(item.value, str | int | float | None):
        raise ConfigError(f"{item.where}: {key} is read as a {type(item.value).__name__}; write it in quotes")
    return item.value


def read_yaml(path: Path, source: str | None = None) -> Located:
    """The tree of a YAML file; a file that cannot be read is an error of the settings."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file: {error}") from error
    return parse_yaml(text, source or str(path), path.parent)


def load(kind: type[T], path: Path, overrides: typing.Sequence[str] = (), source: str | None = None) -> T:
    """Read a YAML file as `kind`, with `a.b.c=value` overrides applied."""
    tree = read_yaml(path, source)
    for setting in overrides:
        apply_override(tree, setting)
    return build(kind, tree)


def ordered_fields(kind: Any) -> list[dataclasses.Field]:
    """Fields in reading order: `kind` and `name` first, even when the rest is inherited."""
    return sorted(dataclasses.fields(kind), key=lambda f: f.name not in ("kind", "name"))


def to_plain(config: Any) -> Any:
    """The config as plain dicts, lists and scalars, as it is written to YAML or hashed."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in ordered_fields(config) if f.init}
    if isinstance(config, dict):
        return {name: to_plain(value) for name, value in config.items()}
    return [to_plain(value) for value in config] if isinstance(config, list | tuple) else config


def dump(config: Any) -> str:
    """The resolved config as YAML, in the order of the dataclass fields."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def digest(config: Any) -> str:
    """A short hash of the resolved config: equal settings, equal hash, whatever file they came from."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()[:16]


class Note(str):
    """A remark that takes the place of a value in a difference."""

    def __repr__(self) -> str:
        return str(self)


ABSENT = Note("absent")  # this side does not have the key
THERE = Note("there")  # this side has a whole section that the other lacks


def differences(stored: Any, config: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Where a config differs from one stored as plain values: (key, stored value, current value).

    A key missing from the stored config is no difference while it has its default, so that a release may add settings.
    Neither is a setting at the value listed in its class's `earlier_defaults`."""
    if dataclasses.is_dataclass(config) and isinstance(stored, dict):
        earlier: dict[str, Any] = getattr(config, "earlier_defaults", {})
        given = {f.name for f in ordered_fields(config) if f.init and not _at_default(config, f)}
        silent = {name for name, value in earlier.items() if name not in given and stored.get(name, earlier) == value}
        stored = {name: value for name, value in stored.items() if name not in silent}
        kept = [f for f in ordered_fields(config) if f.init and (f.name in stored or not _at_default(config, f))]
        now: dict[Any, Any] = {f.name: getattr(config, f.name) for f in kept}
    elif isinstance(config, dict) and isinstance(stored, dict):
        now = config
    elif isinstance(config, list | tuple) and isinstance(stored, list) and (by_name := _by_name(stored, config)):
        stored, now = by_name
        both = [[name for name in half if name in other] for half, other in ((stored, now), (now, stored))]
        if both[0] != both[1]:
            return [(key, both[0], both[1])]
        for name in sorted(stored.keys() ^ now.keys()):  # whole stages: their presence says enough
            stored[name], now[name] = (THERE, ABSENT) if name in stored else (ABSENT, THERE)
    elif isinstance(config, list | tuple) and isinstance(stored, list) and len(config) == len(stored):
        now, stored = dict(enumerate(config)), dict(enumerate(stored))
    else:
        plain = to_plain(config)
        # 1 may have become 1.0
        number = isinstance(plain, int | float) and not isinstance(plain, bool) and not isinstance(stored, bool)
        return [] if repr(plain) == repr(stored) or (number and plain == stored) else [(key, stored, plain)]
    if (
        isinstance(config, by_path.ByPath)
        and config.path == stored.get("path")
        and config.digest != stored.get("digest", config.digest)
    ):
        file, old = config.path.rpartition(":")[0], str(stored["digest"])
        changed = (f"{key}, the file {file}", Note(f"sha256 {old[:12]}"), Note(f"sha256 {config.digest[:12]}"))
        return [changed, *differences(stored, {**now, "digest": old}, key)]
    names = dict.fromkeys([*now, *stored])
    return [
        found
        for name in names
        for found in differences(stored.get(name, ABSENT), now.get(name, ABSENT), f"{key}.{name}" if key else str(name))
    ]


def _by_name(stored: list[Any], config: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Both lists as mappings by name, if every item has a unique name, as stages have."""
    old = {name: item for item in stored if isinstance(item, dict) and isinstance(name := item.get("name"), str)}
    named = ((getattr(item, "name", None), item) for item in config if dataclasses.is_dataclass(item))
    new = {name: item for name, item in named if isinstance(name, str)}
    return (old, new) if len(old) == len(stored) and len(new) == len(config) else None


def _at_default(config: Any, field: dataclasses.Field) -> bool:
    value = getattr(config, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return value == field.default_factory()
    return field.default is not dataclasses.MISSING and value == field.default
