"""Rewards of text-game world models: a predicted state difference is merged into the state and compared with the true
next state.

*faithful* repeats the public judge, with its blind spots (text_game_release.py). *strict* closes them: created objects
count, leftover objects, extra properties, names and types too, and `true` is not 1. It reads the first mapping of the
answer, in JSON or Python's way of writing, and rejects with a reason: comments, tuples, a mapping in the prose before
the answer, no `modified` or `removed`, and objects without a uuid; reasoning before `</think>` is passed over,
`\\boxed{}`, prose after the answer, missing closers and a missing `score` (no change) are read. The two are never mixed
in one table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from .loose_json import Unreadable, read_mapping
from .text_game_release import repaired, tally
from .text_game_transition import Objects, Transition, sorted_contents

Mode = Literal["faithful", "strict"]
Kind = Literal["binary", "task_specific"]
MARKERS = tuple(f"{the} final {what} is:" for what in ("answer", "state", "game state") for the in ("The", "the"))
FENCE = "```json"
THINK_END = "</think>"
SCORE_KEYS = ("score", "gameOver", "gameWon")
_BOXED = re.compile(r"\\boxed\s*\{\s*(?=\{)")  # how models that were trained on mathematics give an answer


@dataclass(frozen=True)
class Verdict:
    """One judgement. `reason` is empty for a readable answer; otherwise it says why the reward is 0."""

    reward: float
    right: bool
    items: float = 0.0
    score: float = 0.0
    changed: float | None = None
    reason: str = ""


def state_difference(step: Transition) -> dict[str, Any]:
    """The expected answer: whole objects that changed or appeared, uuids that are gone, the score when it changed."""
    modified = [o for o in step.target if step.before.get(o["uuid"]) != o]
    removed = [uuid for uuid in step.before if uuid not in step.after]
    return {
        "modified": modified,
        "removed": removed,
        "score": {} if step.current_score == step.target_score else step.target_score,
    }


def extract_answer(text: str) -> str:
    """What follows the last occurrence of the first marker found; else the last json fence of ten characters or
    more; else all of it.
    """
    for marker in MARKERS:
        at = text.rfind(marker)
        if at >= 0:
            return text[at + len(marker) :].strip()
    block, start = "", text.find(FENCE)
    while start >= 0 and (end := text.find("```", start + len(FENCE))) >= 0:
        block, start = text[start + len(FENCE) : end].strip(), text.find(FENCE, end + 3)
    return block if len(block) >= 10 else text


def read_difference(text: str) -> dict[str, Any]:
    """The answer of a response as a mapping with `modified` and `removed`, read strictly; raises Unreadable
    otherwise.
    """
    said = text.rpartition(THINK_END)[2]  # all of it where nothing was thought
    found = read_mapping(_BOXED.sub("", extract_answer(said), count=1))
    missing = [key for key in ("modified", "removed") if key not in found]
    if missing:
        raise Unreadable(f"no key {' or '.join(missing)}")
    if not isinstance(found["modified"], list) or not all(
        isinstance(o, dict) and _plain(o.get("uuid")) for o in found["modified"]
    ):
        raise Unreadable("modified is not a list of objects with a uuid")
    return found


def _plain(uuid: Any) -> bool:
    return isinstance(uuid, int | str | float)


def merge(step: Transition, difference: dict[str, Any]) -> tuple[Objects, dict[str, Any]]:
    """The state that the difference makes of the current one, created objects included, and its score."""
    removed = difference["removed"] if isinstance(difference["removed"], list) else [difference["removed"]]
    modified = {o["uuid"]: o for o in difference["modified"]}
    objects = {uuid: modified.get(uuid, old) for uuid, old in step.before.items() if uuid not in removed}
    objects.update({uuid: o for uuid, o in modified.items() if uuid not in step.before})
    return objects, difference.get("score") or step.current_score


def _same(a: Any, b: Any) -> bool:
    """Equality of values that tells true from 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _item_right(guess: dict[str, Any] | None, true: dict[str, Any], name: str | None) -> bool:
    if guess is None:
        return False
    if name is None:
        return sorted_contents(guess.get("contains")) == sorted_contents(true.get("contains"))
    properties = guess.get("properties")
    return isinstance(properties, dict) and name in properties and _same(properties[name], true["properties"][name])


def _count(objects: Objects, step: Transition) -> tuple[int, int]:
    """(right, wrong) items over all objects that should be there and those that should not."""
    right, wrong = 0, sum(uuid not in step.after for uuid in objects)
    for uuid, true in step.after.items():
        guess = objects.get(uuid)
        if guess is true:
            right += len(true["properties"]) + 3
            continue
        if guess is None or not isinstance(guess.get("properties"), dict):
            wrong += 1
            continue
        names = [*true["properties"], None]
        good = sum(_item_right(guess, true, name) for name in names) + sum(
            guess.get(key) == true.get(key) for key in ("name", "type")
        )
        right, wrong = (
            right + good,
            wrong + len(names) + 2 - good + sum(name not in true["properties"] for name in guess["properties"]),
        )
    return right, wrong


def _changed_share(objects: Objects, step: Transition) -> float | None:
    """Share right among what changes, each created and each removed object being one more item. None when nothing
    changes.
    """
    results = [_item_right(objects.get(uuid), step.after[uuid], name) for uuid, name in step.changed_items]
    for uuid, true in step.after.items():
        if uuid not in step.before:
            guess = objects.get(uuid)
            results.append(
                guess is not None and all(_item_right(guess, true, name) for name in [*true["properties"], None])
            )
    results += [uuid not in objects for uuid in step.before if uuid not in step.after]
    return sum(results) / len(results) if results else None


def judge_difference(difference: Any, step: Transition, kind: Kind = "binary", mode: Mode = "faithful") -> Verdict:
    """Judge an answer that has been read: a mapping in strict mode, whatever the repair made of it in faithful mode."""
    if mode == "faithful":
        said = tally(difference, step)
        correct, items, scored, changed = said.right, said.items, said.score, said.changed
        if kind == "task_specific" and said.stray:
            return Verdict(0.0, correct, items, scored, changed, "a property that the true object lacks")
    else:
        objects, score = merge(step, difference)
        right, wrong = _count(objects, step)
        good = sum(
            isinstance(score, dict) and key in score and _same(score[key], step.target_score[key]) for key in SCORE_KEYS
        )
        correct, items, scored = (
            wrong == 0 and good == len(SCORE_KEYS),
            right / max(1, right + wrong),
            good / len(SCORE_KEYS),
        )
        changed = _changed_share(objects, step)
    reward = float(correct) if kind == "binary" else 0.09 * items + 0.01 * scored + 0.2 * correct + (changed or 0.0)
    return Verdict(reward, correct, items, scored, changed)


def judge(response: str, step: Transition, kind: Kind = "binary", mode: Mode = "faithful") -> Verdict:
    """Judge a whole response. A malformed answer is a zero with a reason; nothing a model writes raises or hangs."""
    try:
        found = repaired(extract_answer(response)) if mode == "faithful" else read_difference(response)
        return judge_difference(found, step, kind, mode)
    except (
        Unreadable,
        RecursionError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        IndexError,
    ) as error:
        return Verdict(0.0, False, reason=f"{type(error).__name__}: {str(error)[:200]}")
