"""Settings of text games as an environment. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..language_config import QuestionSettings


@dataclass(frozen=True, kw_only=True)
class TextGameEnvironment(QuestionSettings):
    """A world model of text games: state and action in, the difference to the next state out."""

    kind: Literal["text-game"]
    games: list[str] = field(default_factory=list)
    unseen_games: list[str] = field(default_factory=list)  # never trained on, evaluated on their own
    seeds: int = 4  # start states of each game
    heldout_per_verb: int = 5  # of each game and verb: so many changed and so many unchanged rows
    # at most so many training rows of each game and verb, changed and unchanged ones each, as rows are held out. 0: all
    rows_per_kind: int = 0
    # so many training rows, gold and others by non_gold_ratio, and nothing else: lessons whose answers begin with a
    # thought, which the simulator's truth is put in words for. 0: all rows with bare answers
    thoughts: int = 0
    reward: Literal["binary", "task_specific"] = "binary"
    drift_steps: int = 0  # evaluations: so many steps are imagined one after the other, beside the true game
    drift_episodes: int = 64
    tasks: ClassVar[str] = "text_games.tasks:TextGameTasks"
    making: ClassVar[tuple[str, ...]] = (
        *QuestionSettings.making,
        *("games", "unseen_games", "seeds", "heldout_per_verb", "rows_per_kind", "thoughts"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_shards == bool(self.games):
            raise ValueError("games: name games to play, or train and test for folders of shards; one of both")
        if min(self.seeds, self.heldout_per_verb) <= 0:
            raise ValueError(f"seeds: {self.seeds} and heldout_per_verb: {self.heldout_per_verb} must be above 0")
        if both := set(self.games) & set(self.unseen_games):
            raise ValueError(f"unseen_games: '{sorted(both)[0]}' is also trained on")
        if self.rows_per_kind < 0 or (self.rows_per_kind and self.in_shards):
            raise ValueError("rows_per_kind: 0 or more rows of games; shards are trained on as they are")
        if self.thoughts < 0 or (self.thoughts and self.in_shards):
            raise ValueError("thoughts: 0 or more rows of games; shards bring reasoned answers of their own")
        if self.drift_steps < 0 or self.drift_episodes <= 0:
            raise ValueError("drift_steps: 0 or more, and drift_episodes above 0")
