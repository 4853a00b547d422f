"""What the language stages share: the questions of a data stage, its tokenizer, sequences to train on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...core.errors import ConfigError
from ...core.rng import permutation
from ...data.packing import TrainSequence, role_weight
from ...data.shards import ShardSet
from ...data.tokenizers import Tokenizer, load_tokenizer
from ...data.trajectory import Role, TokenSequence
from ...rl.language import Question, answer_sequence, read_pair
from ...rl.rollout.config import Validation
from ...rl.text_games.splits import RatioSampler
from ..job import Job
from ..settings.language import LanguageData, TextGameData, WebPageData
from ..settings.verbs import Start
from .common import TOKENIZER, split_cut
from .verbs import tokenizer_of as verb_tokenizer

CUT = 0x637574  # the key of the draw
KEPT, SHORT = 8192, 1024  # lessons that are kept, and their tokens at most
TRAIN, TEST, UNSEEN = "train", "test", "unseen"


@dataclass
class Questions:
    """The questions that a data stage left."""

    job: Job
    data: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        start = start_of(self.job)
        found = load_tokenizer(self.job.stage_folder(start.name if start else self.data) / TOKENIZER)
        if found.vocab_size > self.job.model.vocab:
            raise ConfigError(f"model.vocab = {self.job.model.vocab} is below the tokenizer's {found.vocab_size}")
        return found

    @property
    def multiple(self) -> int:
        """What prompts are padded to."""
        return self.job.outcome(self.data)["pad_prompts_to"]

    def folder(self, part: str) -> Path | None:
        """Where the shards of a part lie, None where there is no such part."""
        stage = next(s for s in self.job.recipe.stages if s.name == self.data)
        if isinstance(stage, LanguageData):
            told = getattr(stage, part)
            return Path(told) if told else None
        made = self.job.stage_folder(self.data) / part
        return made if made.exists() else None

    @cached_property
    def train(self) -> ShardSet:
        return self._train()

    def _train(self, fields: list[str] | None = None) -> ShardSet:
        folder = self.folder(TRAIN)
        if folder is None:
            raise ConfigError(f"stages: '{self.data}' has no questions to train on; name their shards with train: FOLDER")
        return ShardSet(folder, fields=fields)

    def some(self, part: str, n: int) -> list[Question]:
        """At most n questions of a part, spread over it; none where the part was not made."""
        folder = self.folder(part)
        if folder is None:
            return []
        shards = ShardSet(folder)
        chosen = np.linspace(0, len(shards) - 1, min(n, len(shards))).round().astype(int)
        return [read_pair(shards[int(i)]) for i in chosen]

    def stream(self, ratio: float | None, without: Collection[int] = ()) -> RatioSampler:
        """Which training question stands at which place of an endless stream; those of `without` never come."""
        if ratio is None:
            return RatioSampler([True] * len(self.train), 0, seed=self.job.recipe.seed, without=frozenset(without))
        flags = self._train(["extra.json"])
        told = [flags[i]["extra.json"].get("gold") for i in range(len(flags))]
        gold = [self.at(i).gold if flag is None else flag for i, flag in enumerate(told)]  # public rows do not say
        return RatioSampler(gold, ratio=ratio, seed=self.job.recipe.seed, without=frozenset(without))

    def cut(self, validation: Validation, stage: str) -> list[int]:
        """Training questions that a stage holds back to validate on, drawn from all of them."""
        return split_cut(permutation(len(self.train), self.job.recipe.seed, CUT), validation, stage)[1]

    def at(self, index: int) -> Question:
        return read_pair(self.train[index])

    def lesson(self, index: int) -> TokenSequence:
        """A question of train with the answer to imitate; short ones of small data are kept, for the epochs to come."""
        if index in self._lessons:
            return self._lessons[index]
        made = answer_sequence(self.tokenizer, self.at(index), self.multiple)
        if len(made.ids) <= SHORT and len(self._lessons) < KEPT:
            self._lessons[index] = made
        return made

    @cached_property
    def _lessons(self) -> dict[int, TokenSequence]:
        return {}


def answer_tokens(lesson: TokenSequence) -> int:
    """How many tokens are learnt from."""
    return lesson.roles.count(Role.STATE)


def weighted(lessons: Sequence[TokenSequence], total: int, question: float, pad_id: int) -> list[TrainSequence]:
    """Answers to imitate; the loss is the mean over `total` answer tokens of the whole step, and `question` times the sum over those of
    the questions divided by the same total. What pads a question is not learnt."""
    made = []
    for lesson in lessons:
        weight = role_weight(lesson, Role.STATE, 1.0 / total)
        if question:
            weight = weight + role_weight(lesson, Role.PROMPT, question / total) * (np.asarray(lesson.ids) != pad_id)
        made.append(TrainSequence.of(lesson, ce=weight.astype(np.float32)))
    return made


def start_of(job: Job) -> Start | None:
    """The recipe's start; without one a tokenizer is learnt from the data, and the first stage trains from scratch."""
    return next((s for s in job.recipe.stages if isinstance(s, Start)), None)


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of a language recipe: that of its start, or of its data stage."""
    stage = next((s for s in job.recipe.stages if isinstance(s, TextGameData | WebPageData | LanguageData)), None)
    if stage is None:
        return verb_tokenizer(job)
    return Questions(job, stage.name).tokenizer
