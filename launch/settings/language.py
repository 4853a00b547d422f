"""Settings of the stages of a language world model: data, imitation, RL, evaluation. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Comparison, Lora, OnPolicy, Supervision, positive


@dataclass(frozen=True)
class TextGameData:
    """Transitions of our own text games as shards of questions and answers, with held-out rows and held-out games; and a tokenizer."""

    kind: Literal["text-game-data"]
    name: str
    games: list[str]
    unseen_games: list[str] = field(default_factory=list)  # never trained on, evaluated on their own
    seeds: int = 4  # start states of each game
    heldout_per_verb: int = 5  # of each game and verb: so many changed and so many unchanged rows
    prompt: Literal["bare", "full"] = "bare"  # full adds rules and two worked examples, for models that read
    pad_prompts_to: int = 32  # prompts are padded in front to a multiple of this, so that many are decoded together
    samples_per_shard: int = 4096

    def __post_init__(self) -> None:
        positive(self, "seeds", "heldout_per_verb", "pad_prompts_to", "samples_per_shard")
        if not self.games:
            raise ValueError("games: at least one is needed")
        if both := set(self.games) & set(self.unseen_games):
            raise ValueError(f"unseen_games: '{sorted(both)[0]}' is also trained on")


@dataclass(frozen=True)
class WebPageData:
    """Recorded page transitions as shards of questions and change lists, with held-out episodes and held-out pages; and a tokenizer."""

    kind: Literal["web-page-data"]
    name: str
    transitions: str | None = None  # a JSONL file of recorded transitions; without one those that ship are taken
    unseen_pages: list[str] = field(default_factory=list)  # urls never trained on, evaluated on their own
    heldout_every: int = 5  # every so many-th episode is held out
    prompt: Literal["bare", "full"] = "bare"  # full adds the instructions
    pad_prompts_to: int = 32

    def __post_init__(self) -> None:
        positive(self, "pad_prompts_to")
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")


@dataclass(frozen=True)
class LanguageData:
    """Questions that lie in shards of pairs already, such as converted public data or the reasoned answers of a teacher."""

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


@dataclass(frozen=True, kw_only=True)
class LanguageSupervised(Supervision):
    """Cross-entropy on the true answers of a data stage: supervised fine-tuning, or the control arm of an RL stage."""

    kind: Literal["language-sft"]
    lora: Lora | None = None
    non_gold_ratio: float | None = 0.4  # rows without a changed object, for each with one; null takes all rows as they are
    question_weight: float = 0.0  # of the questions' own tokens, beside 1 of the answers': models from scratch learn to copy from them
    microbatch_tokens: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "microbatch_tokens")
        if self.question_weight < 0:
            raise ValueError(f"question_weight: {self.question_weight} must not be negative")


@dataclass(frozen=True, kw_only=True)
class LanguageReinforce(OnPolicy):
    """RL on the questions of a data stage: one answer is one episode, a rule is its judge."""

    kind: Literal["language-rlvr"]
    data: str
    reward: Literal["binary", "task_specific", "f1"]
    max_new_tokens: int
    mode: Literal["faithful", "strict"] = "strict"
    non_gold_ratio: float | None = 0.4  # as in imitation
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    uses: ClassVar[tuple[str, ...]] = ("init", "data")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_new_tokens", "microbatch_tokens")


@dataclass(frozen=True, kw_only=True)
class LanguageEvaluate(Comparison):
    """Held-out questions for several stages' models, beside the answer that nothing changes and the true answer."""

    kind: Literal["language-eval"]
    data: str
    max_new_tokens: int
    mode: Literal["faithful", "strict"] = "strict"
    n: int = 512  # held-out rows at most
    unseen_n: int = 256  # rows of unseen games or pages at most
    temperature: float = 0.0
    greedy: bool = False  # tables of the likeliest answers as well
    drift_steps: int = 0  # text games: so many steps are imagined one after the other beside the true game, by the same actions
    drift_episodes: int = 64
    uses: ClassVar[tuple[str, ...]] = ("models", "data")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "n", "unseen_n", "max_new_tokens", "drift_episodes")


LanguageStage = TextGameData | WebPageData | LanguageData | LanguageSupervised | LanguageReinforce | LanguageEvaluate
