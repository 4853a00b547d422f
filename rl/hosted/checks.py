"""Checks what user code returns: scores and prompts. Anything else becomes Invalid, and the reason quotes it."""

from __future__ import annotations

import math
import numbers
from typing import Any

from ...data.trajectory import Invalid
from .wire import show

_ASKED = "a score is a finite number, a dict of numbers with 'reward', or Invalid(reason)"


class Fault(Exception):
    """What user code did wrong, worded for its author."""


def number(value: Any) -> float:
    """A returned value as a finite float, also from numpy or torch; Fault for anything else."""
    scalar = getattr(value, "shape", None) == () and hasattr(value, "__float__")
    if not isinstance(value, numbers.Real) and not scalar:
        raise Fault(f"{show(value)} ({type(value).__name__})")
    try:
        plain = float(value)  # type: ignore[arg-type]
    except Exception as error:
        raise Fault(f"{show(value)}, which float() refuses: {error}") from error
    if not math.isfinite(plain):
        raise Fault(str(plain))
    return plain


def normal_score(value: Any) -> tuple[float, dict[str, float]] | Invalid:
    """(reward, other numbers by name), or the user's own Invalid; Fault for anything else."""
    if isinstance(value, dict) and isinstance(value.get("reward"), Invalid):
        return value["reward"]
    if isinstance(value, Invalid):
        return value
    parts = {}
    try:
        if not isinstance(value, dict):
            return number(value), {}
        if "reward" not in value:
            raise Fault(f"a dict without 'reward': {show(value)}")
        for name, part in value.items():
            if not isinstance(name, str):
                raise Fault(f"a dict with the key {show(name)}, which is no str")
            if not name.isprintable():  # a metric of that name could not be written or shown
                raise Fault(f"a dict with the key {show(name)}, which cannot be shown")
            try:
                parts[name] = number(part)
            except Fault as error:
                raise Fault(f"a dict with {name!r}: {error}") from error
    except Fault as error:
        raise Fault(f"gave {error}; {_ASKED}") from error
    return parts.pop("reward"), parts


def check_prompt(said: Any, first: bool) -> Any:
    """What is said to the model as it came, if it is a str or, in the first turn, a list of messages; else Fault."""
    if isinstance(said, str):
        texts = [said]
    elif first and _messages(said):
        texts = [text for message in said for text in message.values()]
    else:
        asked = 'a str, or a list of {"role": str, "content": str}' if first else "a str after the first turn"
        raise Fault(f"yielded {show(said)} ({type(said).__name__}); a prompt is {asked}")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Fault(f"yielded a text that is no valid Unicode ({error.reason}): {show(text)}") from error
    return said


def _messages(said: Any) -> bool:
    return (
        isinstance(said, list)
        and len(said) > 0
        and all(isinstance(m, dict) and set(m) == {"role", "content"} for m in said)
        and all(isinstance(text, str) for message in said for text in message.values())
    )
