"""What makes a row of a text game no transition: its schema, its uuids, its containers."""

from typing import Any

from terrella.data.schema import violations

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
