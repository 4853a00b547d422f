"""Settings of the stages that make questions for a language world model. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import positive


@dataclass(frozen=True)
class TextGameData:
    """Transitions of our own text games as shards of questions and answers, with held-out rows and held-out games;
    and a tokenizer.
    """

    kind: Literal["text-game-data"]
    name: str
    games: list[str]
    unseen_games: list[str] = field(default_factory=list)  # never trained on, evaluated on their own
    seeds: int = 4  # start states of each game
    heldout_per_verb: int = 5  # of each game and verb: so many changed and so many unchanged rows
    prompt: Literal["bare", "full"] = "bare"  # full adds rules and two worked examples, for models that read
    pad_prompts_to: int = 32  # prompts are padded in front to a multiple of this, so that many are decoded together
    samples_per_shard: int = 4096
    # learn one even where the recipe has a start: its model of games then begins from fresh weights
    own_tokenizer: bool = False

    def __post_init__(self) -> None:
        positive(self, "seeds", "heldout_per_verb", "pad_prompts_to", "samples_per_shard")
        if not self.games:
            raise ValueError("games: at least one is needed")
        if both := set(self.games) & set(self.unseen_games):
            raise ValueError(f"unseen_games: '{sorted(both)[0]}' is also trained on")


@dataclass(frozen=True)
class WebPageData:
    """Recorded page transitions as shards of questions and change lists, with held-out episodes and held-out pages;
    and a tokenizer.
    """

    kind: Literal["web-page-data"]
    name: str
    transitions: str | None = None  # a JSONL file of recorded transitions; without one those that ship are taken
    unseen_pages: list[str] = field(default_factory=list)  # urls never trained on, evaluated on their own
    heldout_every: int = 5  # every so many-th episode is held out
    prompt: Literal["bare", "full"] = "bare"  # full adds the instructions
    pad_prompts_to: int = 32
    # learn one even where the recipe has a start: its model of pages then begins from fresh weights
    own_tokenizer: bool = False

    def __post_init__(self) -> None:
        positive(self, "pad_prompts_to")
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")


@dataclass(frozen=True)
class LanguageData:
    """Questions that lie in shards of pairs already, such as converted public data or the reasoned answers of a
    teacher.
    """

    kind: Literal["language-data"]
    name: str
    train: str | None = None  # folders of shards
    test: str | None = None
    unseen: str | None = None  # questions of worlds that are not in train, evaluated on their own
    pad_prompts_to: int = 1

    parts: ClassVar[tuple[str, ...]] = ("train", "test", "unseen")

    def __post_init__(self) -> None:
        positive(self, "pad_prompts_to")
        if not any(getattr(self, part) for part in self.parts):
            raise ValueError("train: name a folder of shards to train on, or test for one to evaluate on")


LanguageStage = TextGameData | WebPageData | LanguageData
