"""The public judge of text-game answers, repeated with its blind spots: what RLVR-World's published figures were judged
by.

An answer is repaired by `json_repair`, as in the release: prose, comments, tuples, `\\boxed{}` and missing closers are
read. Objects are then merged, counted and compared in the release's order, because an error anywhere in it makes the
reward 0: created objects are never appended, leftover objects, names and types never looked at, and an answer without
the key `score` has no score right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from .loose_json import MAX_CHARS, Unreadable
from .text_game_transition import Objects, Transition

SHORT = 1000  # characters, which are repaired in a tenth of a second whatever they are
# looks at a character: a real answer takes a few tens of thousands, junk of the same length millions
REPAIR_STEPS = 300_000
ESCAPE_WORK = 10_000_000  # escapes times characters, whose product the repair's time follows too
_LITERALS = re.compile("True|False|None")
_JSON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class _TooLong(Exception):
    """The repair was given up."""


class _Metered(str):
    """Text that may be looked at a limited number of times, so that junk is given up after the same work on every
    machine.
    """

    looks: list[int]

    def __new__(cls, text: str, looks: list[int]) -> _Metered:
        made = super().__new__(cls, text)
        made.looks = looks
        return made

    def __getitem__(self, at: Any) -> str:
        self.looks[0] += 1
        if self.looks[0] > REPAIR_STEPS:
            raise _TooLong
        found = str.__getitem__(self, at)
        return _Metered(found, self.looks) if isinstance(at, slice) and at.start is None else found

    # the repair may insert into the text and go on with what it made: text[:at] + more
    def __add__(self, other: str) -> str:
        return _Metered(str.__add__(self, other), self.looks)


def repaired(answer: str) -> Any:
    """The value that an answer is taken for; the release rewrites Python's literals wherever they are, inside
    strings too.
    """
    text = _LITERALS.sub(lambda found: _JSON_LITERALS[found.group()], answer)
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        from json_repair import repair_json
    except ImportError as error:
        raise ConfigError(
            "the faithful text-game judge reads answers with json-repair: pip install json-repair"
        ) from error
    if text.count("\\") * len(text) > ESCAPE_WORK:
        raise Unreadable("too many escapes to repair")
    try:
        return repair_json(
            _Metered(text, [0]) if len(text) > SHORT else text, skip_json_loads=True, return_objects=True
        )
    except _TooLong:
        raise Unreadable(f"not repaired within {REPAIR_STEPS} steps") from None


@dataclass(frozen=True)
class Tally:
    """What the release counts in an answer."""

    items: float
    score: float
    right: bool
    changed: float | None  # None: nothing to count
    stray: bool  # a property that neither the true object nor the current one has


def tally(found: Any, step: Transition) -> Tally:
    """Judge a repaired answer; raises where the release's judge does, which makes the reward 0."""
    if "modified" not in found or "removed" not in found:
        raise Unreadable("no key modified or no key removed")
    objects, score = _indexed(_merged(found if isinstance(found, dict) else {}, step))
    right, wrong = _count(objects, step)
    scored = [key in score and score[key] == true for key, true in step.target_score.items()]
    changed, stray = _changed_share(objects, step)
    return Tally(right / (right + wrong), sum(scored) / len(scored), wrong == 0 and all(scored), changed, stray)


def _merged(difference: dict[str, Any], step: Transition) -> list[Any]:
    """Current objects, without the removed and with the modified ones; then the score, if the answer has one."""
    modified: dict[Any, Any] = {}
    changed = difference.get("modified")
    for thing in changed if isinstance(changed, Iterable) else ():
        try:
            modified[thing["uuid"]] = thing
        except (TypeError, KeyError):
            continue
    states = [
        modified.get(uuid, thing) for uuid, thing in step.before.items() if not _among(uuid, difference.get("removed"))
    ]
    if "score" in difference:
        said = difference["score"]
        states.append(said if hasattr(said, "__len__") and len(said) > 0 else step.current_score)
    return states


def _among(uuid: Any, removed: Any) -> bool:
    try:
        return uuid in removed
    except TypeError:  # a bare number or text removes nothing
        return False


def _indexed(states: list[Any]) -> tuple[Objects, Any]:
    objects, score = {}, {}
    for state in states:
        if "uuid" in state:
            objects[state["uuid"]] = state
        elif "score" in state:
            score = state
    return objects, score


def _count(objects: Objects, step: Transition) -> tuple[int, int]:
    """(right, wrong) properties and contents of the objects that should be there; a missing object is one error."""
    results = []
    for uuid, true in step.after.items():
        guess = objects.get(uuid)
        if guess is true:
            results += [True] * (len(true["properties"]) + 1)
            continue
        if guess is None:
            results.append(False)
            continue
        if "properties" in guess:
            said = guess["properties"]
            results += [name in said and said[name] == value for name, value in true["properties"].items()]
        else:
            results.append(False)
        results.append("contains" in guess and sorted(true["contains"]) == sorted(guess["contains"]))
    return sum(results), len(results) - sum(results)


def _changed_share(objects: Objects, step: Transition) -> tuple[float | None, bool]:
    """Share right among what changes in the objects that the answer keeps, and whether it has a stray property."""
    results, stray = [], False
    try:
        for uuid, true in step.after.items():
            if uuid not in objects:
                continue
            guess, old = objects[uuid], step.before.get(uuid)
            said, now = guess["properties"], true["properties"]
            was = {} if old is None else old["properties"]
            for name, value in now.items():
                right = name in said and said[name] == value
                if old is not None and not (name in was and was[name] == value):
                    results.append(right)
            for name in said:
                if name not in now:
                    results.append(False)
                    stray = stray or name not in was
            held = sorted(true.get("contains", []))
            right = held == sorted(guess.get("contains", []))
            if old is None or sorted(old.get("contains", [])) != held:
                results.append(right)
    except (KeyError, TypeError, AttributeError):
        return None, False
    return (sum(results) / len(results) if results else None), stray
