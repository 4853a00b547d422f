"""A true step of a text game, and what changes in it: what both judges of a predicted state difference compare with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

Objects = dict[Any, dict[str, Any]]  # uuid -> object


@dataclass(frozen=True)
class Transition:
    """One true step: objects and score before and after."""

    current: list[dict[str, Any]]
    current_score: dict[str, Any]
    target: list[dict[str, Any]]
    target_score: dict[str, Any]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Transition:
        """From a row of the public data: the step with the action and the passing of time together."""
        return cls(
            row["current_state"]["objects"],
            row["current_score_state"],
            row["tick_state"]["objects"],
            row["next_score_state"],
        )

    @cached_property
    def before(self) -> Objects:
        return {o["uuid"]: o for o in self.current}

    @cached_property
    def after(self) -> Objects:
        return {o["uuid"]: o for o in self.target}

    @cached_property
    def changed_items(self) -> tuple[tuple[Any, str | None], ...]:
        """(uuid, property) pairs that change in objects present before and after; the property None stands for
        `contains`.
        """
        pairs: list[tuple[Any, str | None]] = []
        for uuid, after in self.after.items():
            before = self.before.get(uuid)
            if before is None:
                continue
            old, new = before["properties"], after["properties"]
            pairs += [(uuid, name) for name in new if name not in old or old[name] != new[name]]
            if sorted_contents(before.get("contains")) != sorted_contents(after.get("contains")):
                pairs.append((uuid, None))
        return tuple(pairs)

    @property
    def changed(self) -> bool:
        """Whether any object (the order of its contents aside) or the score differs: the split of the published
        tables.
        """
        if self.before.keys() != self.after.keys() or self.current_score != self.target_score:
            return True
        return any(_unordered(o) != _unordered(self.after[uuid]) for uuid, o in self.before.items())

    @property
    def gold(self) -> bool:
        """Whether an object present before and after has a property or its contents changed: the sampling class of
        the public release.
        """
        return bool(self.changed_items)


def sorted_contents(contains: Any) -> list[str] | None:
    """The names in an object's `contains`, whose order means nothing; None where it has none."""
    return sorted(map(str, contains)) if isinstance(contains, list | tuple) else None


def _unordered(thing: dict[str, Any]) -> dict[str, Any]:
    return {**thing, "contains": sorted_contents(thing.get("contains"))}
