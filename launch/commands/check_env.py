"""`terrella check env X`: does an environment keep its promises? All are tried, and the first broken one is named.

A broken promise is reported with its remedy, as gymnasium's checker does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, zip_longest
from typing import Any

from ...core import schema
from ...core.errors import ConfigError
from ...data.tokenizers import ByteTokenizer
from ...data.trajectory import Invalid
from ...rl.conversation import text_of
from ...rl.environment import End, Prompt, Split
from ...rl.hosted import CHECKING_S, Sealed
from ...rl.own.config import DataEnvironment, EnvironmentSettings, OwnEnvironment
from ...rl.own.tasks import open_tasks, shared_tasks
from ...rl.tasks import EMPTY as EMPTY_BASELINE
from ...rl.tasks import Tasks

PLAYED = 8  # tasks of each split that are played
PROMPTS_S = 6.0  # in which the check of a recipe plays as many of them as it can
ODD = 'Ich weiß nicht.\n```{"answer": [1, 2]}```\n\x07'  # what a model may well write
SPLITS: tuple[Split, ...] = ("train", "test")
EMPTY, SHOWN = "the empty answer", "its demonstration"
Policy = Callable[[Prompt, int, int], str]  # prompt, number of the task, turn


@dataclass(frozen=True)
class _Setting:
    env: EnvironmentSettings


@dataclass(frozen=True)
class Played:
    """What an episode said, and how it ended; None where it did not."""

    prompts: tuple[str, ...]
    end: End | None

    @property
    def at_fault(self) -> bool:
        return self.end is not None and isinstance(self.end.reward, Invalid)

    @property
    def reward(self) -> float:
        assert self.end is not None and not isinstance(self.end.reward, Invalid)
        return float(self.end.reward)


def settings_of(named: str, overrides: Sequence[str]) -> Any:
    """The settings of an environment by name or path, with `key=value` as in a recipe's env section."""
    where = f"check env {named}"
    tree = schema.Located({"env": schema.Located({"kind": schema.Located(named, where)}, where)}, where)
    for setting in overrides:
        schema.apply_override(tree, f"env.{setting.removeprefix('env.')}")
    return schema.build(_Setting, tree).env


def check_environment(settings: Any) -> Iterator[str]:
    """What was looked at, a line each; raises ConfigError at the first promise that is broken.

    Everything is played in two processes, for a resumed run plays again what another process played.
    """
    opened = partial(open_tasks, settings, ByteTokenizer(), None, loading_s=CHECKING_S)
    with opened() as tasks, opened() as again:
        yield check_tasks(tasks, again)
        contract = Contract(tasks, again, getattr(settings, "max_turns", 1))
        scores = {EMPTY: contract.play(EMPTY, lambda prompt, number, turn: "")}
        yield f"play: {len(contract.chosen)} tasks, the first says {short(scores[EMPTY][0].prompts[0])}"
        scores["an odd answer"] = contract.play("an odd answer", lambda prompt, number, turn: ODD)
        yield f"play: the same answers give the same prompts and scores in another process; {contract.longest(scores)}"
        for name in tasks.baselines():
            if name == EMPTY_BASELINE:
                continue  # played above
            scores[f"baseline '{name}'"] = contract.play(f"baseline '{name}'", contract.baseline(name))
        lessons = [tasks.demonstration(task) for task in contract.chosen]
        if all(lessons):
            scores[SHOWN] = contract.play(SHOWN, contract.taught(lessons))
    means = {name: sum(p.reward for p in many) / len(many) for name, many in scores.items()}
    yield "score: finite; means: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    if SHOWN not in means:
        some = f"{sum(map(bool, lessons))} of {len(lessons)} tasks have one" if any(lessons) else "none"
        yield f"demonstration: {some}; supervised fine-tuning needs one of every task, RL needs none"
    elif means[SHOWN] <= means[EMPTY]:
        raise ConfigError(
            f"demonstration: scores {means[SHOWN]:.3f}, the empty answer {means[EMPTY]:.3f}; one of play and "
            "demonstration is wrong"
        )
    if len({played.reward for many in scores.values() for played in many}) == 1:
        yield "score: the same for all that was tried; RL learns from answers whose scores differ, so try a right one"


def check_for_run(settings: DataEnvironment | OwnEnvironment, splits: Collection[Split]) -> str:
    """What a run needs of an environment, of the splits that its stages play: tasks and prompts that a resume meets
    again, and none that is both trained and tested on. Scores may be a matter of chance, such as those of a judge.
    """
    opened = partial(open_tasks, settings, ByteTokenizer(), None, loading_s=CHECKING_S)
    with opened() as tasks, opened() as again:
        said = check_tasks(tasks, again, splits)
        if isinstance(settings, DataEnvironment):  # its prompts are the rows
            return said
        contract = Contract(tasks, again, settings.max_turns, splits)
        return f"{said}; {contract.compare_prompts(time.monotonic() + PROMPTS_S)}"


def check_tasks(tasks: Tasks, again: Tasks, splits: Collection[Split] = SPLITS) -> str:
    """The splits have tasks, the same in another process, and share none."""
    for split in splits:
        one, other = tasks.of(split), again.of(split)
        if not len(one):
            why = "what is evaluated on is never trained on" if split == "test" else "there is nothing to train on"
            raise ConfigError(f"tasks: '{split}' is empty; {why}, so give some")
        for place, (first, second) in enumerate(zip_longest(one, other, fillvalue="nothing")):
            if unlike(first, second):
                raise ConfigError(
                    f"tasks: task {place} of '{split}' is {short(first)}, and {short(second)} in another process; "
                    "a resumed run must see the same ones, so draw from random.Random(seed) and sort what comes out "
                    "of sets"
                )
    purpose = {"train": "train on", "test": "test on"}
    counts = ", ".join(f"{len(tasks.of(split))} to {purpose[split]}" for split in splits)
    if len(splits) > 1 and (shared := shared_tasks(tasks.of("train"), tasks.of("test"))):
        raise ConfigError(
            f"tasks: {len(shared)} of 'test' are in 'train' too, such as {short(shared[0])}; leave them out of one, "
            "for a score on what was trained on says nothing"
        )
    return f"tasks: {counts}, all picklable, the same in another process"


def unlike(one: Any, other: Any) -> bool:
    """Whether two values differ; of a class of the user's nobody here can say."""
    sealed = isinstance(one, Sealed) and isinstance(other, Sealed)
    return one is not other and not sealed and repr(one) != repr(other)


def short(value: Any) -> str:
    """A value in one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Contract:
    """A few tasks, played by policies in two processes."""

    def __init__(self, tasks: Tasks, again: Tasks, max_turns: int, splits: Collection[Split] = SPLITS) -> None:
        self.tasks, self.again, self.max_turns = tasks, again, max_turns
        self.chosen = [task for split in splits for task in _spread(tasks.of(split))]
        self._numbers = count()  # of episodes: none is used twice

    def play(self, name: str, policy: Policy) -> list[Played]:
        """All tasks; refused where the processes differ, and where an episode does not end or ends without a score."""
        played = []
        for number, task in enumerate(self.chosen):
            where, one = f"play: task {short(task)} with {name}", self._episode(self.tasks, number, policy)
            # first: the other process would only lose as much time
            if one.end is not None and isinstance(one.end.reward, Invalid):
                raise ConfigError(
                    f"{where} has no score: {one.end.reward.reason}; whatever the model answers is worth a number, "
                    "and Invalid is for faults of the machinery"
                )
            other = self._episode(self.again, number, policy)
            require_same_prompts(where, one, other)
            if one.end is None:
                raise ConfigError(
                    f"{where} was not over after max_turns = {self.max_turns} answers; end it with `return score`, or "
                    "raise max_turns"
                )
            if repr(one.end) != repr(other.end):
                raise ConfigError(
                    f"{where} ended with {one.end}, and with {other.end} in another process; "
                    "a score must depend on the task and the answers alone"
                )
            played.append(one)
        return played

    def compare_prompts(self, end: float) -> str:
        """Play the tasks with empty answers until the clock says `end`; refused where the processes' prompts differ."""
        for number, task in enumerate(self.chosen):
            if number and time.monotonic() > end:
                return f"the prompts of {number} of {len(self.chosen)} too, more take longer than {PROMPTS_S:g} s"
            one = self._episode(self.tasks, number, lambda *_: "")
            if one.at_fault:
                continue  # a run counts it and leaves it out; the other process would only lose as much time
            other = self._episode(self.again, number, lambda *_: "")
            require_same_prompts(f"play: task {short(task)} with {EMPTY}", one, other)
        return f"the prompts of {len(self.chosen)} too"

    def _episode(self, tasks: Tasks, number: int, policy: Policy) -> Played:
        """One task played to its end, or through the most turns."""
        key, prompts, table = next(self._numbers), [], tasks.conversations.host
        (said,) = table.start_many([(key, self.chosen[number])])
        while not isinstance(said, End):
            if len(prompts) == self.max_turns:
                return Played(tuple(prompts), None)
            prompts.append(text_of(said))
            (said,) = table.answer_many([(key, policy(said, number, len(prompts) - 1))])
        return Played(tuple(prompts), said)

    def baseline(self, name: str) -> Policy:
        """One of the environment's trivial policies."""
        answer = self.tasks.baselines()[name]

        def policy(prompt: Prompt, number: int, turn: int) -> str:
            given = answer(prompt, self.chosen[number])
            if isinstance(given, Invalid):
                raise ConfigError(
                    f"baselines: '{name}' gave task {short(self.chosen[number])} no answer: {given.reason}"
                )
            return given

        return policy

    def taught(self, lessons: Sequence[Any]) -> Policy:
        """The demonstrations."""

        def policy(prompt: Prompt, number: int, turn: int) -> str:
            if turn >= len(lessons[number]):
                raise ConfigError(
                    f"demonstration: of task {short(self.chosen[number])} ends after {turn} of its turns; give one "
                    "answer a turn"
                )
            return lessons[number][turn]

        return policy

    def longest(self, scores: dict[str, list[Played]]) -> str:
        """How long episodes were."""
        most = max(len(played.prompts) for many in scores.values() for played in many)
        return f"at most {most} of {self.max_turns} turns"


def require_same_prompts(where: str, one: Played, other: Played) -> None:
    """Refuse an episode that said something else in another process, up to where one of them failed."""
    if one.at_fault or other.at_fault:
        pairs = zip(one.prompts, other.prompts, strict=False)
    else:
        pairs = zip_longest(one.prompts, other.prompts, fillvalue="nothing")
    for turn, said in enumerate(pairs):
        if said[0] != said[1]:
            raise ConfigError(
                f"{where} said {short(said[0])} in turn {turn + 1}, and {short(said[1])} in another process; "
                "prompts must depend on task and answers alone (draw from random.Random of a seed in the task)"
            )


def _spread(tasks: Sequence[Any]) -> list[Any]:
    """A few tasks, the first and the last among them."""
    n = min(PLAYED, len(tasks))
    return [tasks[i * (len(tasks) - 1) // max(n - 1, 1)] for i in range(n)]
