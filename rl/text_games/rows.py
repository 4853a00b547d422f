"""Rows of text games: one row is one transition, in the schema of the public state-prediction data."""

from __future__ import annotations

from typing import Any


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
