"""A user's own tasks: rows of data with a reward, or an environment by path, whose code runs in a process of its
own.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.by_path import ByPath
from ...core.errors import ConfigError, LengthError
from ...data.rows import demonstration, info_of, read_rows, render_prompt
from ...data.tokenizers import ByteTokenizer, Tokenizer
from ...data.trajectory import Invalid, TokenSequence
from ..agents.config import WorldsEnvironment
from ..conversation import Conversation, EpisodeHost, text_of
from ..environment import End, Prompt, Split
from ..grid.config import GridEnvironment
from ..hosted import LOADING_S, Host
from ..language_tasks import Made
from ..rewards import answers as rules
from ..tasks import Tasks
from ..webrl.config import WebSiteEnvironment
from .config import DataEnvironment, EnvironmentSettings, OwnEnvironment

TEMPLATE, TURN = 1024, 64  # the most bytes that a chat template adds to a chat, and to each of its messages


@contextmanager
def open_tasks(
    settings: EnvironmentSettings,
    tokenizer: Tokenizer,
    max_length: int | None,
    made: Made | None = None,
    loading_s: float = LOADING_S,
) -> Iterator[Tasks]:
    """Open the tasks that settings name; user code runs in a process that ends with the block. `made` is the data that
    an earlier stage made for them.
    """
    if not isinstance(settings, DataEnvironment | OwnEnvironment):
        if made is None and getattr(settings, "data", None) is not None:
            raise ConfigError(
                "env.data: these tasks are made by a stage of a recipe, so they can only be opened within its run"
            )
        module, _, name = settings.tasks.partition(":")  # imported only now: each needs other packages
        yield getattr(import_module(f"..{module}", __package__), name)(settings, made, tokenizer, max_length)
        return
    if isinstance(settings, DataEnvironment):
        reward = settings.reward
        target, digest = (
            (reward.path, reward.digest) if isinstance(reward, ByPath) else (rules.REWARDS.get(reward or ""), "")
        )
        host = Host(target, Path(), settings.deadline_s, sha256=digest, loading_s=loading_s) if target else None
        tasks: Tasks = DataTasks(settings, host, tokenizer, max_length)
    else:
        host = Host(
            settings.path, Path(), settings.deadline_s, settings.args, sha256=settings.digest, loading_s=loading_s
        )
        tasks = OwnTasks(settings, host, tokenizer, max_length)
    try:
        yield tasks
    finally:
        if host is not None:
            host.close()


def given_tokenizer(environments: Sequence[EnvironmentSettings]) -> Tokenizer | None:
    """The symbols of the grid among a recipe's environments, a tokenizer that needs no learning; None without a
    grid.
    """
    grid = next((settings for settings in environments if isinstance(settings, GridEnvironment)), None)
    if grid is None:
        return None
    from ..grid.imagination import GridDynamics

    return GridDynamics.of(grid.tag, "env.tag").tokenizer()


def fresh_tokenizer(environments: Sequence[EnvironmentSettings], vocab: int | None = None) -> Tokenizer:
    """The tokenizer of models from scratch: symbols of a recipe's grid, pieces made for its worlds or web sites, else
    bytes.

    Pieces of web sites fill a vocabulary of the given size. They are gathered by playing, so checks, which give no
    size, get bytes instead.
    """
    given = given_tokenizer(environments)
    if given is not None:
        return given
    sites = next((settings for settings in environments if isinstance(settings, WebSiteEnvironment)), None)
    if sites is not None and vocab is not None:
        from ..webrl.tokenizer import pieces_of as pieces_of_sites

        return pieces_of_sites(sites, vocab)
    worlds = [settings for settings in environments if isinstance(settings, WorldsEnvironment)]
    if not worlds:
        return ByteTokenizer()
    from ..agents.tokenizer import pieces_of
    from ..worlds.tasks import named_tasks

    tasks = [task for s in worlds for task in named_tasks([*s.tags, *s.test_tags], s.tag_files, s.config).values()]
    return pieces_of(tuple(dict.fromkeys(tasks)))


@dataclass(frozen=True)
class Row:
    """A row of data as a task."""

    where: str = field(repr=False)  # file and line; rows with equal content are the same task
    prompt: Prompt
    answer: str | None
    info: dict[str, Any]

    def __str__(self) -> str:
        return self.where


@lru_cache(maxsize=4)  # every stage of a recipe loads the same rows
def load_rows(path: str, template: str | None, system: str | None, answer: str | None) -> list[Row]:
    """The rows of a file as tasks; errors name file and line."""
    source, rows = read_rows(path), []
    for number, row in enumerate(source):
        where = source.where(number)
        prompt: Prompt = render_prompt(row, template, where)
        if system is not None:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [{"role": "system", "content": system}, *turns]
        shown = demonstration(row, answer, where)
        try:  # a lone surrogate, from a template or from another program's shards
            json.dumps((prompt, shown), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: no tokenizer can read its prompt or answer: {error}") from error
        rows.append(Row(where, prompt, shown, info_of(row, template, answer)))
    return rows


def _more(found: Sequence[Any]) -> str:
    """The words for further rows besides the one that an error names."""
    return f" (and {len(found) - 1:,} more row{'s' if len(found) > 2 else ''})" if len(found) > 1 else ""


def shared_tasks(trained: Sequence[Any], tested: Sequence[Any]) -> list[Any]:
    """The test tasks that are also training tasks."""
    test = set(map(_identity, tested))  # the smaller split
    known = {identity for identity in map(_identity, trained) if identity in test}
    return [task for task in tested if _identity(task) in known] if known else []


def _identity(task: Any) -> str | bytes:
    """A key that is equal for equal tasks; objects of user classes are compared by their pickles."""
    from ..hosted.wire import pack_in_host

    shown = repr(task)
    return pack_in_host(task) if "Sealed(" in shown else shown


class DataTasks(Tasks):
    """Rows of data, one turn each: the row's prompt, and the reward judges the answer."""

    def __init__(
        self, settings: DataEnvironment, host: Host | None, tokenizer: Tokenizer, max_length: int | None
    ) -> None:
        self.settings, self.host = settings, host
        if settings.train is None and settings.test is None:
            raise ConfigError("env: name the rows to train on with train: FILE, or rows to evaluate on with test: FILE")
        self._rows: dict[str, list[Row]] = {}
        for name, path in (("train", settings.train), ("test", settings.test)):
            if path and not Path(path).exists():
                raise ConfigError(f"env.{name}: {path}: no such file or folder")
            if path:
                self._rows[name] = load_rows(path, settings.template, settings.system, settings.answer)
        if settings.test is None:
            rows, every = self._rows["train"], settings.hold_out_every
            self._rows["test"] = [row for i, row in enumerate(rows) if i % every == every - 1]
            self._rows["train"] = [row for i, row in enumerate(rows) if i % every != every - 1]
        self._live: dict[int, Row] = {}
        super().__init__(tokenizer, max_length, max_turns=1)

    def episode_host(self) -> EpisodeHost:
        return self

    @property
    def together(self) -> bool:
        """As an `EpisodeHost`: a reward that judges many answers in one call gets all of a rollout in one."""
        return self.host is not None and self.host.batched

    def of(self, split: Split) -> Sequence[Row]:
        return self._rows.get(split, [])

    def why_empty(self, split: Split) -> str:
        settings = self.settings
        if split == "train":  # an empty file is refused when it is read
            return "name the rows to train on with --data FILE (env.train)"
        count = len(self.of("train"))
        return (
            f"{settings.train} has {count:,} row{'s' if count > 1 else ''}, too few to hold one out at "
            f"env.hold_out_every = {settings.hold_out_every}; add rows, lower it, or name others to evaluate on with "
            "--test FILE (env.test)"
        )

    def judged(self) -> bool:
        return self.host is not None

    def require_judge(self, split: Split, samples: int) -> None:
        """Load the reward now, and try a built-in one on every row: supervised fine-tuning would otherwise fail only
        after all of its steps.
        """
        if self.host is None:
            return
        try:
            self.host.require_reward()
        except ConfigError as error:
            raise ConfigError(f"env.reward: {error}") from error
        if isinstance(self.settings.reward, str):
            self._require_truths(getattr(rules, self.settings.reward), split)

    def _require_truths(self, rule: Callable[[str, str, dict[str, Any]], float], split: Split) -> None:
        """Check that every row has a true answer that a built-in rule can compare with."""
        wrong = []
        for row in self.of(split):
            try:
                rule("", "", row.info)
            except ValueError as error:
                wrong.append((row, error))
        if wrong:
            row, error = wrong[0]
            raise ConfigError(f"env.reward = {self.settings.reward}: {row}: {error}{_more(wrong)}")

    def require_room(self, max_new_tokens: int | None, split: Split | None = None) -> None:
        """Measure every row: one that does not fit would end the run at the step that uses it."""
        new = self.params(max_new_tokens, 1.0).max_new_tokens
        rows = [row for name in ("train", "test") if split in (None, name) for row in self.of(name)]
        long = [(row, length) for row in rows if (length := self._overlong(row, "", new))]
        if long:
            row, length = long[0]
            raise LengthError(
                f"{row}: its prompt has {length} tokens, which with stages.{self.stage}.max_new_tokens = {new} exceed "
                f"model.max_positions = {self.max_length}{_more(long)}; leave such rows out, or change these settings"
            )

    def require_lessons(self, where: str) -> None:
        rows = self.imitated()
        mute = [row for row in rows if row.answer is None]
        if mute:
            raise ConfigError(
                f"{where}: {mute[0]}: has no answer to imitate, or none that is text or a number{_more(mute)}; leave "
                "such rows out, or name the answers' column with env.answer"
            )
        long = [(row, length) for row in rows if (length := self._overlong(row, row.answer or "", 1))]
        if long:
            row, length = long[0]
            raise LengthError(
                f"{where}: {row}: prompt and answer have {length + 1} tokens, model.max_positions is {self.max_length}"
                f"{_more(long)}; leave such rows out or cut them"
            )

    def _overlong(self, row: Row, answer: str, more: int) -> int:
        """The length of a row's prompt and an answer if they and `more` tokens exceed the model's positions, else 0."""
        said = [row.prompt] if isinstance(row.prompt, str) else [m["content"] for m in row.prompt]
        # a token is at least a byte, so most rows need not be encoded
        bytes_ = sum(len(text.encode()) for text in (*said, answer)) + TEMPLATE + TURN * len(said)
        if self.max_length is None or bytes_ + more <= self.max_length:
            return 0
        length = len(self.conversations.context(Conversation(row, 0, 0, [row.prompt])))
        length += len(self.tokenizer.encode(answer)) if answer else 0
        return length if length + more > self.max_length else 0

    def demonstration(self, task: Row) -> list[str] | None:
        return None if task.answer is None else [task.answer]

    def lessons(self, tasks: Sequence[Row], where: str) -> list[list[TokenSequence]]:
        contexts = [self.conversations.context(Conversation(row, 0, 0, [row.prompt])) for row in tasks]
        pairs = zip(contexts, tasks, strict=True)
        return [[self.answer_ids(context, self._required(row, where)[0], f"{where}: {row}")] for context, row in pairs]

    def baselines(self) -> dict[str, Callable[[Prompt, Any], str | Invalid]]:
        answers = Counter(row.answer for row in self.of("train") if row.answer is not None)
        common = answers.most_common(1)[0][0] if answers else None
        return super().baselines() | ({} if common is None else {"most common answer": lambda prompt, task: common})

    def start_many(self, asked: Sequence[tuple[int, Row]], max_invalid: float = math.inf) -> list[Prompt | End]:
        """As an `EpisodeHost`: the first prompt is the row's."""
        self._live |= dict(asked)
        return [row.prompt for _, row in asked]

    def answer_many(self, answers: Sequence[tuple[int, str]], max_invalid: float = math.inf) -> list[Prompt | End]:
        """As an `EpisodeHost`: the reward judges the answers, all of them in one call."""
        rows = [self._live.pop(number) for number, _ in answers]
        if self.host is None:
            return [End(Invalid("env: has no reward; name one with reward: file.py:function")) for _ in rows]
        prompts, infos = [text_of(row.prompt) for row in rows], [row.info for row in rows]
        return list(self.host.score(prompts, [text for _, text in answers], infos, max_invalid))


class OwnTasks(Tasks):
    """An environment of the user's, played in its host."""

    def __init__(self, settings: OwnEnvironment, host: Host, tokenizer: Tokenizer, max_length: int | None) -> None:
        self.host = host
        self._tasks: dict[Split, Sequence[Any]] = {}
        super().__init__(tokenizer, max_length, settings.max_turns)

    def episode_host(self) -> EpisodeHost:
        return self.host

    def of(self, split: Split) -> Sequence[Any]:
        if split not in self._tasks:
            self._tasks[split] = self.host.tasks(split)
        return self._tasks[split]

    def demonstration(self, task: Any) -> list[str] | None:
        answers = self.host.demonstration(task)
        if isinstance(answers, Invalid):
            raise ConfigError(answers.reason)
        return [answers] if isinstance(answers, str) else answers

    def baselines(self) -> dict[str, Callable[[Prompt, Any], str | Invalid]]:
        return super().baselines() | {name: partial(self.host.baseline, name) for name in self.host.baseline_names()}
