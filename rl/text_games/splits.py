"""Which rows are held out, and how changed and unchanged rows are mixed in training."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from ...core.rng import fold, permutation, uniform
from ...data.convert.text_game import is_gold
from .rows import action_of, changed_by_action, verb_of

Row = dict[str, Any]
LESSONS = 29  # key of the order in which lessons are drawn


@dataclass(frozen=True)
class Split:
    """Rows to learn from, held-out rows of the same games, and all rows of games that are held out whole."""

    train: list[Row]
    test: list[Row]
    unseen_games: list[Row]


def split_rows(rows: Sequence[Row], *, each: int = 5, unseen_games: Sequence[str] = (), seed: int = 0) -> Split:
    """The public rule: of every game and verb up to `each` rows changed by the action and `each` unchanged ones are
    held out.

    A held-out question that also stands among the training rows (crawls meet the same state twice) is dropped from
    training.
    """
    groups: dict[tuple[str, str, bool], list[Row]] = defaultdict(list)
    for row in rows:
        if row["game"] not in unseen_games:
            groups[row["game"], verb_of(action_of(row)), changed_by_action(row)].append(row)
    chosen: set[tuple[str, int]] = set()
    for key in sorted(groups):
        members = groups[key]
        picked = random.Random(f"{seed} {key}").sample(members, min(each, len(members)))
        chosen.update((row["game"], row["state_id"]) for row in picked)
    kept = [row for row in rows if row["game"] not in unseen_games]
    test = [row for row in kept if (row["game"], row["state_id"]) in chosen]
    asked = {question(row) for row in test}
    train = [row for row in kept if (row["game"], row["state_id"]) not in chosen and question(row) not in asked]
    return Split(train, test, [row for row in rows if row["game"] in unseen_games])


def drawn(rows: Sequence[Row], n: int, ratio: float | None, seed: int) -> list[Row]:
    """n different rows, or all where there are fewer; gold and others are mixed as in the training stream.

    The order is not the stream's: RL would begin with the very rows that were imitated, and find nothing to learn.
    """
    gold = [ratio is None or is_gold(row) for row in rows]
    stream = RatioSampler(gold, ratio or 0.0, seed=fold(seed, LESSONS))
    return [rows[i] for i in list(dict.fromkeys(stream[place] for place in range(len(stream))))[:n]]


def thinned(rows: Sequence[Row], most: int, seed: int = 0) -> list[Row]:
    """At most so many rows of every kind, in their order: some games have several times as many states as others."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        kinds[_kind(row)].append(i)
    kept = [
        i for kind, all_ in kinds.items() for i in random.Random(f"{seed} {kind}").sample(all_, min(most, len(all_)))
    ]
    return [rows[i] for i in sorted(kept)]


def not_learnt(split: Split) -> list[str]:
    """The kinds of held-out rows (game, verb, whether the action changed something) that no training row is of."""
    trained = {_kind(row) for row in split.train}
    return sorted({_kind(row) for row in split.test} - trained)


def _kind(row: Row) -> str:
    return f"{row['game']}: {verb_of(action_of(row))}, {'changed' if changed_by_action(row) else 'unchanged'}"


def question(row: Row) -> str:
    """What a world model is asked in this row; equal questions have equal answers."""
    state = row["current_state"]
    return repr((row["game"], state["objects"], row["current_score_state"], state["max_UUID"], action_of(row)))


class RatioSampler:
    """An endless stream of row numbers: every gold row once an epoch, and beside them non-gold rows drawn anew each
    time.

    The draw belongs to (seed, epoch, place) alone, so it does not depend on rank or resume.
    """

    def __init__(
        self,
        gold: Sequence[bool],
        ratio: float,  # of non-gold rows to gold ones
        *,
        seed: int = 0,
        without: Collection[int] = (),  # rows that never come
    ) -> None:
        kept = [i for i in range(len(gold)) if i not in without]
        self.gold = [i for i in kept if gold[i]]
        self.others = [i for i in kept if not gold[i]]
        self.drawn = round(ratio * len(self.gold))
        if not self.gold:
            raise ConfigError(
                "env.non_gold_ratio: no row to train on has a changed object, which it counts by; null takes all rows"
            )
        if self.drawn and not self.others:
            raise ConfigError(
                f"env.non_gold_ratio = {ratio:g}: every row to train on has a changed object, so none without one can "
                "be drawn; 0 or null takes all rows"
            )
        self.seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.gold) + self.drawn

    def __getitem__(self, place: int) -> int:
        """The row at this place of the stream; every epoch has its own order."""
        epoch, place = divmod(place, len(self))
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self), self.seed, epoch))
        item = self._order[1][place]
        if item < len(self.gold):
            return self.gold[item]
        return self.others[int(uniform(self.seed, epoch, item) * len(self.others))]
