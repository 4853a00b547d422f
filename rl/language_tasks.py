"""Questions to a world model as tasks: read from shards of an earlier stage, answered in one turn, judged by a rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigError
from ..data.shards import ShardSet
from ..data.tokenizers import Tokenizer
from ..data.trajectory import Invalid, TokenSequence, Trajectory
from .environment import Split
from .evaluation import TEST, Evaluation, Results, heat, spread
from .language import AnswerEpisode, Domain, Question, RewardKind, prompt_ids, read_pair
from .language_config import QuestionSettings
from .rollout.episodes import rollout
from .rollout.sampler import Sampler, SamplingParams
from .statistics import Estimate
from .tasks import Gather, Tasks
from .text_games.splits import RatioSampler

UNSEEN = "unseen"
PARTS = ("train", TEST, UNSEEN)
Line = tuple[str, str, Sequence[Any]]  # of a table: a model's name, its kind in the report, and the judgements
TITLES = {TEST: "Held-out transitions", UNSEEN: "Transitions of worlds never seen in training"}


@dataclass(frozen=True)
class Made:
    """What a stage makes for an environment: its folder, its settings, whether it has finished, and what it was made
    of.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    finished: bool = True
    uses: dict[str, Made] = field(default_factory=dict)  # by its settings that name a stage: what that one made
    seed: int = 0  # of the run
    vocab: int | None = None  # of a tokenizer to learn from it; None where the recipe has one
    env: Any = None  # settings of the recipe's own environment


class Pairs(Sequence[Question]):
    """The questions of a folder of shards, read when they are asked for."""

    def __init__(self, folder: Path, domain: Domain) -> None:
        self.folder, self.domain, self.shards = folder, domain, ShardSet(folder)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        sample = self.shards[index]  # its IndexError ends an iteration
        try:
            question = read_pair(sample)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"env: sample {index} of {self.folder} is no pair of question and answer ({error!r})"
            ) from error
        if question.domain != self.domain:
            raise ConfigError(f"env: {self.folder} holds questions of the kind {question.domain}, not {self.domain}")
        return question

    def gold(self) -> list[bool]:
        """Of each question, whether something changes; public rows do not say, so that their answer is looked at."""
        flags = ShardSet(self.folder, fields=["extra.json"])
        noted = [flags[i]["extra.json"].get("gold") for i in range(len(flags))]
        return [self[i].gold if flag is None else flag for i, flag in enumerate(noted)]


class QuestionTasks(Tasks):
    """Questions of one domain. A subclass judges answers and makes the tables of them."""

    domain: ClassVar[Domain]
    reward: RewardKind
    columns: ClassVar[list[str]]  # of the tables
    several: ClassVar[bool] = False  # whether an evaluation can ask a question more than once

    def __init__(self, settings: QuestionSettings, made: Made, tokenizer: Tokenizer, max_length: int | None) -> None:
        self.settings, self.made = settings, made
        self.multiple = settings.pad_prompts_to
        self.part = cache(self._part)
        super().__init__(tokenizer, max_length)

    # What a subclass says.

    @abstractmethod
    def example(self) -> Question:
        """A question such as the data stage will make, for checks before it has run."""

    @abstractmethod
    def judge(self, asked: Sequence[Question], answers: Sequence[str | Invalid]) -> list[Any]:
        """Judge answers; a fault of the sampler stays Invalid."""

    @abstractmethod
    def estimates(self, asked: Sequence[Question], judged: Sequence[Any]) -> list[Estimate]:
        """Scores by the columns of the tables."""

    @abstractmethod
    def gains(self, asked: Sequence[Question], after: Sequence[Any], before: Sequence[Any]) -> list[Estimate]:
        """Paired differences by the columns of the tables."""

    @abstractmethod
    def table_of(self, asked: Sequence[Question], models: Sequence[Line], title: str) -> dict[str, Any]:
        """The table of models beside the trivial and the true answer."""

    @abstractmethod
    def summary(self, evaluation: Evaluation) -> dict[str, Any]:
        """What happened, in plain words."""

    # Tasks.

    def _part(self, name: str) -> Sequence[Question]:
        if self.settings.in_shards:
            folder = getattr(self.settings, name)
            return Pairs(Path(folder), self.domain) if folder else []
        return Pairs(self.made.folder / name, self.domain) if (self.made.folder / name).exists() else []

    def of(self, split: Split) -> Sequence[Question]:
        if not self.made.finished and not self.settings.in_shards:
            return [self.example()]  # what a killed stage has written so far is not looked at
        return self.part(split)

    def require_source(self) -> None:
        if self.made.settings.get("prompts") is not None:
            raise ConfigError(f"stages: {self.made.name}.prompts: all of these questions are made; leave it out")
        if self.settings.in_shards:
            self._count()
        else:
            self.example()

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        return {"pad_prompts_to": self.multiple, **self._count()}

    def _count(self) -> dict[str, int]:
        """The questions of every part that lies in shards; the first of each is read."""
        parts = {name: self.part(name) for name in PARTS if getattr(self.settings, name)}
        for name, questions in parts.items():
            if not questions[:1]:
                raise ConfigError(f"env.{name}: {getattr(self.settings, name)} holds no sample")
        return {f"{name}_rows": len(questions) for name, questions in parts.items()}

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        train, ratio = self.of("train"), self.settings.non_gold_ratio
        if ratio is None or not isinstance(train, Pairs):
            return RatioSampler([True] * len(train), 0.0, seed=seed, without=frozenset(without)).__getitem__
        return RatioSampler(train.gold(), ratio, seed=seed, without=frozenset(without)).__getitem__

    def episode(self, task: Any, prompt_id: int, sample_index: int) -> Any:
        rules: dict[str, Any] = {"kind": self.reward, "mode": self.settings.mode, "multiple": self.multiple}
        return AnswerEpisode(task, prompt_id, sample_index, self.tokenizer, **rules)

    def play(self, sampler: Sampler, episodes: Sequence[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        return rollout(sampler, episodes, params, seed)

    def demonstration(self, task: Question) -> list[str] | None:
        return [task.lesson]

    def lessons(self, tasks: Sequence[Question], where: str) -> list[list[TokenSequence]]:
        contexts = [prompt_ids(self.tokenizer, task.prompt, self.multiple) for task in tasks]
        pairs = zip(contexts, tasks, strict=True)
        return [[self.answer_ids(context, task.lesson, f"{where}: {self.made.name}")] for context, task in pairs]

    def measures(self, trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, float]:
        return {"reward/unreadable": sum(gather(sum(bool(t.info.get("reason")) for t in trajectories)))}

    def shown(self, episode: AnswerEpisode) -> list[dict[str, Any]]:
        question = episode.question
        return [
            {
                "prompt": question.prompt,
                "action": question.row.get("tick_state", {}).get("lastAction", ""),
                "prediction": episode.response or "",
                "truth": question.answer,
                "exact": episode.response == question.answer,
            }
        ]

    # Evaluation.

    def parts(self, n: int) -> dict[str, list[Any]]:
        unseen = spread(self.part(UNSEEN), self.settings.unseen_n)
        return {TEST: spread(self.part(TEST), n)} | ({UNSEEN: unseen} if unseen else {})

    def shown_as(self, model: str, temperature: float, part: str) -> str | None:
        return None  # RL shows answers, and these are very many

    def judgements(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[Any]:
        if not self.several and any(episode.sample_index for episode in episodes):
            raise ConfigError("samples: every question is answered once; leave samples out")
        pairs = list(zip(episodes, played, strict=True))
        answers = [t.reward if isinstance(t.reward, Invalid) else e.response or "" for e, t in pairs]
        return self.judge([episode.question for episode in episodes], answers)

    def results(self, evaluation: Evaluation) -> Results:
        tables: dict[str, dict[str, Any]] = {}
        outcome: dict[str, Any] = {}
        parts = {part: asked for part, asked in evaluation.tasks.items() if part in TITLES}
        for part, asked in parts.items():
            for temperature in evaluation.temperatures:
                judged = evaluation.firsts(part, temperature)
                models = [(name, evaluation.kind_of(name), scores) for name, scores in judged.items()]
                name = part + ending(evaluation, temperature)
                tables[name] = self.table_of(asked, models, f"{TITLES[part]}, {heat(temperature)}")
        scores = {part: evaluation.firsts(part) for part in parts}
        for name in evaluation.models:
            for part, asked in parts.items():
                values = zip(self.columns, self.estimates(asked, scores[part][name]), strict=True)
                outcome |= {f"{name}/{part}/{column}": value.value for column, value in values}
        for one, other in evaluation.compared():
            change = self.gains(parts[TEST], scores[TEST][one], scores[TEST][other])
            pairs = zip(self.columns, change, strict=True)
            outcome |= {f"{one} minus {other}/{column}": value.to_cell() for column, value in pairs}
        both = evaluation.before and evaluation.after
        return Results(tables, outcome, self.summary(evaluation) if both else None)


def ending(evaluation: Evaluation, temperature: float) -> str:
    """What the name of a table ends with: the last temperature is the table's own."""
    if temperature == evaluation.temperatures[-1]:
        return ""
    return "-greedy" if temperature == 0 else f"-t{temperature:g}"
