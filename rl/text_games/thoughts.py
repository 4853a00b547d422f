"""A teacher that knows the simulator: a thought of a few sentences before the true answer, from what the action did,
what time then did, and why an action did nothing.
"""

from __future__ import annotations

from typing import Any

from .rows import action_of, verb_of

Thing = dict[str, Any]
Things = dict[int, Thing]


def thought(row: dict[str, Any]) -> str:
    """What happens in a transition, in words that can be checked against the state and the rules of the question."""
    before, acted, after = (_things(row[key]) for key in ("current_state", "action_state", "tick_state"))
    done, ticked = _changes(before, acted), _changes(acted, after)
    action = action_of(row)
    first = f"{action}: {done}." if done else f"{action}: {_why_not(action, before)}, so it changes nothing."
    then = f"Then time passes: {ticked}." if ticked else "Then time passes, which changes nothing."
    return f"{first} {then} {_score(row['current_score_state'], row['next_score_state'])}"


def _things(state: dict[str, Any]) -> Things:
    return {thing["uuid"]: thing for thing in state["objects"]}


def _changes(before: Things, after: Things) -> str:
    """All differences of two states, one after the other."""
    said = list[str]()
    for uuid, new in after.items():
        old = before.get(uuid)
        if old is None:
            said.append(f"{new['name']} comes into being")
            continue
        names = [*old["properties"], *(key for key in new["properties"] if key not in old["properties"])]
        values = [(key, old["properties"].get(key), new["properties"].get(key)) for key in names]
        said += [f"{new['name']} {key} {one!r} -> {other!r}" for key, one, other in values if one != other]
        gained = [name for name in new["contains"] if name not in old["contains"]]
        lost = [name for name in old["contains"] if name not in new["contains"]]
        said += [f"{new['name']} now contains {', '.join(gained)}"] if gained else []
        said += [f"{new['name']} no longer contains {', '.join(lost)}"] if lost else []
    said += [f"{old['name']} is gone" for uuid, old in before.items() if uuid not in after]
    return "; ".join(said)


def _score(before: dict[str, Any], after: dict[str, Any]) -> str:
    if before == after:
        return "The score stays."
    end = (", and the game is won" if after["gameWon"] else ", and the game is lost") if after["gameOver"] else ""
    return f"The score becomes {after['score']}{end}."


def _why_not(action: str, things: Things) -> str:
    """Which condition of an action's rule is not met; the verbs that every game has are told one by one."""
    verb = verb_of(action)
    if verb in ("look", "inventory", "examine"):
        return "it only looks"
    named = sorted((t for t in things.values() if t["name"] in action), key=lambda t: action.index(t["name"]))
    held = next(t["contains"] for t in things.values() if t["type"] == "Agent")
    if not named:
        return "nothing of that name is there"
    first, last = named[0], named[-1]
    name, has, to = first["name"], first["properties"].get, last["properties"].get
    conditions = {
        "take": [(has("isMoveable"), f"{name} is not moveable"), (name not in held, f"{name} is held already")],
        "put": [
            (name in held, f"the agent does not hold {name}"),
            (to("isContainer"), f"{last['name']} is no container"),
            (to("isOpen"), f"{last['name']} is closed"),
        ],
        "open": [(has("isOpenable"), f"{name} is not openable"), (not has("isOpen"), f"{name} is open already")],
        "close": [(has("isOpenable"), f"{name} is not openable"), (has("isOpen"), f"{name} is closed already")],
        "turn on": [(has("isActivatable"), f"{name} is not activatable"), (not has("isOn"), f"{name} is on already")],
        "turn off": [(has("isActivatable"), f"{name} is not activatable"), (has("isOn"), f"{name} is off already")],
    }
    return next((why for met, why in conditions.get(verb, []) if not met), "its rule has no effect here")
