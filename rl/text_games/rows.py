"""Rows of text games: one row is one transition, in the schema of the public state-prediction data."""

from __future__ import annotations

from typing import Any

from ...data.schema import violations

_STRING, _INTEGER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_OBJECT = {
    "type": "object",
    "required": ["name", "uuid", "type", "properties", "contains"],
    "properties": {
        "name": _STRING,
        "uuid": _INTEGER,
        "type": _STRING,
        "properties": {"type": "object"},
        "contains": {"type": "array", "items": _STRING},
    },
    "additionalProperties": False,
}
_STATE = {
    "type": "object",
    "required": ["observation", "look", "inventory", "taskDesc", "lastAction", "objects", "max_UUID"],
    "properties": {
        **{name: _STRING for name in ("observation", "look", "inventory", "taskDesc", "lastAction")},
        "objects": {"type": "array", "minItems": 1, "items": _OBJECT},
        "max_UUID": {"type": "integer", "minimum": 0},
    },
}
_SCORE = {
    "type": "object",
    "required": ["score", "gameOver", "gameWon"],
    "properties": {"score": {"type": "number"}, "gameOver": _FLAG, "gameWon": _FLAG},
}
ROW = {
    "type": "object",
    "required": [
        "game",
        "state_id",
        "current_state",
        "action_state",
        "tick_state",
        "current_score_state",
        "next_score_state",
    ],
    "properties": {
        "game": _STRING,
        "state_id": {"type": "integer", "minimum": 0},
        **{name: _STATE for name in ("current_state", "action_state", "tick_state")},
        **{name: _SCORE for name in ("current_score_state", "next_score_state")},
    },
}
STATES = ("current_state", "action_state", "tick_state")


def row_faults(row: Any) -> list[str]:
    """Everything that makes a row no transition, empty for a good one: the schema, uuids that appear twice or are
    not below `max_UUID`.
    """
    found = violations(row, ROW)
    if found:
        return found
    for key in STATES:
        uuids = [o["uuid"] for o in row[key]["objects"]]
        if len(set(uuids)) != len(uuids):
            found.append(f"{key}: a uuid appears twice")
        if max(uuids) >= row[key]["max_UUID"]:
            found.append(f"{key}: uuid {max(uuids)} is not below max_UUID {row[key]['max_UUID']}")
    return found


def loose_names(row: dict[str, Any]) -> list[str]:
    """Names in `contains` that no object of the same state has, and objects that two others contain."""
    found = []
    for key in STATES:
        objects = row[key]["objects"]
        names = {o["name"] for o in objects}
        held = [name for o in objects for name in o["contains"]]
        found += [f"{key}: contains {name!r}, which is no object" for name in held if name not in names]
        if len(set(held)) != len(held):
            found.append(f"{key}: an object lies in two places")
    return found


def action_of(row: dict[str, Any]) -> str:
    """The action of a transition."""
    return row["tick_state"]["lastAction"]


def verb_of(action: str) -> str:
    """The verb of an action: its words before the first object, with `on` and `off` of devices."""
    words = action.split()
    if not words:
        return ""
    return " ".join(words[:2]) if words[0] == "turn" and len(words) > 1 and words[1] in ("on", "off") else words[0]


def changed_by_action(row: dict[str, Any]) -> bool:
    """Whether the action itself changed an object (the order of its contents aside): what the split of test rows is
    balanced on.
    """
    before, after = (
        {o["uuid"]: {**o, "contains": sorted(o["contains"])} for o in row[key]["objects"]}
        for key in ("current_state", "action_state")
    )
    return before != after
