"""Kinds of samples: which members each has, and a JSON Schema for every JSON member. A small validator, no dependency.

A kind is named "name/version". A change that an old reader would misread gets a new version; both stay listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ShardError

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
OBJECT = {"type": "object"}
_META = {"type": "object", "required": ["schema"]}


def _meta(kind: str, properties: dict[str, Any] | None = None, required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {**_META, "required": ["schema", *required], "properties": {"schema": {"const": kind}, **(properties or {})}}


@dataclass(frozen=True)
class Member:
    """One field of a kind. `*` in its name stands for digits (the frames of a video)."""

    required: bool = True
    schema: dict[str, Any] | None = None  # of a .json member
    dtype: tuple[str, ...] = ()  # allowed kinds or names of a .npy member's dtype
    ndim: int | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of sample and its members."""

    name: str
    members: dict[str, Member]
    one_of: tuple[str, ...] = ()  # at least one of these fields (or patterns) must be there

    @property
    def required(self) -> list[str]:
        return [name for name, m in self.members.items() if m.required]

    def member(self, field: str) -> Member | None:
        found = self.members.get(field)
        if found is None:
            found = self.members.get(re.sub(r"\d+", "*", field))
        return found

    def describe(self) -> dict[str, Any]:
        """The kind as JSON, for the dataset's card."""
        described = {}
        for name, m in self.members.items():
            described[name] = {
                "required": m.required,
                **({"schema": m.schema} if m.schema else {}),
                **({"dtype": list(m.dtype)} if m.dtype else {}),
            }
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "kind": self.name,
            "members": described,
            "one_of": list(self.one_of),
        }


_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": STRING,
            "learn": {"type": "boolean"},
        },
    },
}
_TOKENS = {
    "tokens.npy": Member(required=False, dtype=("i4", "i8", "u2", "u4"), ndim=1),
    "roles.npy": Member(required=False, dtype=("i1", "u1"), ndim=1),
}

TEXT = "text_trajectory/1"
PAIR = "world_pair/1"
TRANSITION = "transition/1"
VIDEO = "video_episode/1"
VIDEO_TOKENS = "video_tokens/1"
TASK = "web_task/1"

KINDS: dict[str, Kind] = {
    TEXT: Kind(
        TEXT,
        {
            "messages.json": Member(schema=_MESSAGES),
            "states.json": Member(
                required=False, schema={"type": "array", "items": {"type": ["object", "array", "string", "null"]}}
            ),
            "meta.json": Member(schema=_meta(TEXT, {"reward": {"type": ["number", "null"]}, "task": STRING})),
            **_TOKENS,
        },
    ),
    PAIR: Kind(
        PAIR,
        {
            "prompt.json": Member(schema=_MESSAGES),
            "target.json": Member(schema={"type": ["object", "array", "string"]}),
            "extra.json": Member(schema=_meta(PAIR)),
            **_TOKENS,
        },
    ),
    # small worlds: tens of thousands of these, so one member each
    TRANSITION: Kind(
        TRANSITION,
        {
            "transition.json": Member(
                schema={
                    "type": "object",
                    "required": ["schema", "state", "action", "next_state"],
                    "properties": {
                        "schema": {"const": TRANSITION},
                        "reward": {"type": ["number", "null"]},
                        "done": {"type": "boolean"},
                    },
                }
            ),
            **_TOKENS,
        },
    ),
    VIDEO: Kind(
        VIDEO,
        {
            "meta.json": Member(
                schema=_meta(
                    VIDEO,
                    {
                        "frames": {"type": "integer", "minimum": 1},
                        "shape": {"type": "array", "items": INTEGER, "minItems": 3},
                        "dtype": STRING,
                        "views": {"type": "array", "items": STRING},
                        "source": STRING,
                    },
                    ("frames", "shape", "dtype", "views"),
                )
            ),
            "frames.*.png": Member(required=False),
            "frames.*.jpg": Member(required=False),
            "frames.*.webp": Member(required=False),
            "frames.mp4": Member(required=False),
            "actions.npy": Member(required=False, dtype=("f4", "f8"), ndim=2),
            "instruction.txt": Member(required=False),
        },
        one_of=("frames.*.png", "frames.*.jpg", "frames.*.webp", "frames.mp4"),
    ),
    VIDEO_TOKENS: Kind(
        VIDEO_TOKENS,
        {
            "tokens.npy": Member(dtype=("u2",)),
            "actions.npy": Member(required=False, dtype=("f4", "f8", "u1", "u2"), ndim=2),
            "meta.json": Member(
                schema=_meta(
                    VIDEO_TOKENS,
                    {
                        "layout": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "required": ["name", "tokens"],
                                "properties": {"name": STRING, "tokens": {"type": "integer", "minimum": 1}},
                            },
                        },
                        "codebook": INTEGER,
                        "tokenizer": STRING,
                    },
                    ("layout",),
                )
            ),
        },
    ),
    TASK: Kind(
        TASK,
        {
            "task.json": Member(
                schema={
                    "type": "object",
                    "required": ["sites", "task_id", "start_url", "intent", "eval"],
                    "properties": {
                        "sites": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"enum": ["shopping_admin", "map", "shopping", "reddit", "gitlab", "wikipedia"]},
                        },
                        "task_id": {"type": "integer", "minimum": 0},
                        "require_login": {"type": "boolean"},
                        "storage_state": {"type": ["string", "null"]},
                        "start_url": STRING,
                        "geolocation": {"type": ["object", "null"]},
                        "intent_template": STRING,
                        "instantiation_dict": OBJECT,
                        "intent": STRING,
                        "require_reset": {"type": "boolean"},
                        "intent_template_id": INTEGER,
                        "eval": {
                            "type": "object",
                            "required": ["eval_types", "reference_answers"],
                            "properties": {
                                "eval_types": {
                                    "type": "array",
                                    "minItems": 1,
                                    "items": {"enum": ["string_match", "url_match", "program_html"]},
                                },
                                "reference_answers": {"type": ["object", "null"]},
                                "reference_url": {"type": ["string", "null"]},
                                "program_html": {
                                    "type": ["array", "null"],
                                    "items": {
                                        "type": "object",
                                        "required": ["url", "locator", "required_contents"],
                                        "properties": {"url": STRING, "locator": STRING, "required_contents": OBJECT},
                                    },
                                },
                            },
                        },
                    },
                }
            ),
            "meta.json": Member(schema=_meta(TASK)),
        },
    ),
}

_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_KEYWORDS = {"type", "required", "properties", "items", "enum", "const", "minimum", "minItems", "additionalProperties"}


def violations(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Every place where a value breaks a schema (the part of JSON Schema named in _KEYWORDS), as "path: what is
    wrong".
    """
    unknown = set(schema) - _KEYWORDS
    if unknown:
        raise ValueError(f"schema keyword {sorted(unknown)[0]!r} is not supported")
    here = path or "(top)"
    found: list[str] = []
    if "type" in schema:
        allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is(value, t) for t in allowed):
            return [f"{here}: expected {' or '.join(allowed)}, found {type(value).__name__}"]
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        found.append(f"{here}: expected {schema['const']!r}, found {_short(value)}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{here}: {_short(value)} is not one of {schema['enum']}")
    if "minimum" in schema and isinstance(value, int | float) and value < schema["minimum"]:
        found.append(f"{here}: {value} is below {schema['minimum']}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{here}: {name!r} is missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            if name in properties:
                found += violations(item, properties[name], f"{path}.{name}" if path else str(name))
            elif schema.get("additionalProperties", True) is False:
                found.append(f"{here}: {name!r} is not known here")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{here}: {len(value)} items, at least {schema['minItems']} wanted")
        if "items" in schema:
            for i, item in enumerate(value):
                found += violations(item, schema["items"], f"{path}[{i}]")
    return found


def check_sample(kind: Kind, sample: dict[str, Any], *, shard: str, key: str) -> None:
    """Raise a ShardError naming shard, sample and field unless the sample is a whole one of its kind."""

    def wrong(field: str, reason: str) -> ShardError:
        return ShardError(reason, shard=shard, sample=key, field=field)

    for field in kind.required:
        if field not in sample:
            raise wrong(field, f"missing; {kind.name} needs it")
    fields = [f for f in sample if not f.startswith("__")]
    if kind.one_of and not any(re.sub(r"\d+", "*", f) in kind.one_of for f in fields):
        raise wrong(kind.one_of[0], f"missing; {kind.name} needs one of {', '.join(kind.one_of)}")
    for field in fields:
        member = kind.member(field)
        if member is None:
            raise wrong(field, f"unknown in {kind.name}, which has {', '.join(kind.members)}")
        value = sample[field]
        if member.schema is not None:
            broken = violations(value, member.schema)
            if broken:
                raise wrong(field, "; ".join(broken[:3]))
        if isinstance(value, np.ndarray):
            if member.dtype and value.dtype.str[1:] not in member.dtype:
                raise wrong(field, f"dtype {value.dtype}, expected one of {', '.join(member.dtype)}")
            if member.ndim is not None and value.ndim != member.ndim:
                raise wrong(field, f"{value.ndim} dimensions, expected {member.ndim}")
    _check_together(kind, sample, wrong)


def _check_together(kind: Kind, sample: dict[str, Any], wrong: Any) -> None:
    """What no single member can tell."""
    tokens, roles = sample.get("tokens.npy"), sample.get("roles.npy")
    if tokens is not None and roles is not None and len(tokens) != len(roles):
        raise wrong("roles.npy", f"{len(roles)} roles for {len(tokens)} tokens")
    if roles is not None and tokens is None:
        raise wrong("tokens.npy", "missing; there are roles")
    if kind.name == VIDEO_TOKENS and tokens is not None:
        expected = sum(part["tokens"] for part in sample["meta.json"]["layout"])
        if tokens.shape[-1] != expected:
            raise wrong("tokens.npy", f"{tokens.shape[-1]} tokens a row, the layout in meta.json says {expected}")
    if kind.name == VIDEO and "frames.mp4" not in sample:
        meta = sample["meta.json"]
        pictures = sum(1 for f in sample if f.endswith((".png", ".jpg", ".webp")))
        if pictures != meta["frames"] * len(meta["views"]):
            raise wrong(
                "meta.json",
                f"{meta['frames']} frames of {len(meta['views'])} views are stated, the sample has {pictures} pictures",
            )


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
