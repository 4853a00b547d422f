"""A world model's own task: predict what follows a state and actions. RL rewards exact predictions; evaluations measure
how many are exact, and how often a success is predicted that does not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...data.shards import ShardSet
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Role, TokenSequence, Trajectory
from ..environment import Split
from ..evaluation import TEST, Evaluation, Results, heat
from ..language import readable
from ..language_tasks import Made, ending
from ..rollout.episodes import rollout
from ..rollout.sampler import Sample, Sampler, SamplingParams
from ..statistics import Estimate, mean_change, mean_share
from ..tasks import Tasks
from ..worlds.tasks import Task
from .config import TransitionsEnvironment
from .dynamics import ON, WON, answer, read, transitions
from .tasks import WorldTasks

COLUMNS = ["all exact", "state exact", "outcome exact", "successes foretold", "false successes"]
NOTHING = "nothing changes"
REMEDIES = {
    "train": "raise its prompts, or loosen its least_reward",
    "held_out": "raise its validation_share or its prompts, or name another collect stage as env.test",
}
Foretold = tuple[str, float, str] | None  # state, reward and mark; None if an answer is unreadable
Cells = list[float | None]  # by column; None if the column does not apply to the transition


@dataclass(frozen=True)
class Transition:
    """A question to a world model, and what really followed."""

    asked: tuple[int, ...]
    still: str  # the state before the actions, as a world model should write it where nothing changes
    truth: str  # what it should write

    def __str__(self) -> str:
        return self.still


@dataclass
class PredictionEpisode:
    """One answer to one question."""

    task: Transition
    prompt_id: int
    sample_index: int
    tokenizer: Tokenizer = field(repr=False)
    said: str | None = None

    def context(self) -> tuple[int, ...] | None:
        return self.task.asked if self.said is None else None

    def receive(self, sample: Sample) -> None:
        self.said = readable(self.tokenizer, sample.ids)

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        exact, state, outcome, _, _ = compared(self.task, read(self.said or ""))
        assert exact is not None
        return [exact], exact, {"state": state, "outcome": outcome}


def compared(task: Transition, said: Foretold) -> Cells:
    """The prediction compared with what followed, by column."""
    truth = read(task.truth)
    if truth is None:
        raise ConfigError(f"env.data: {task.truth!r} is no transition; its stage needs env: {{teaches: transitions}}")
    state, outcome = said is not None and said[0] == truth[0], said is not None and said[1:] == truth[1:]
    hoped, won = float(said is not None and said[2] == WON), truth[2] == WON
    return [float(state and outcome), float(state), float(outcome), hoped if won else None, None if won else hoped]


class TransitionTasks(Tasks):
    """The transitions of collect stages; before these have finished, those of a random episode to look at."""

    def __init__(
        self, settings: TransitionsEnvironment, made: Made, tokenizer: Tokenizer, max_length: int | None
    ) -> None:
        super().__init__(tokenizer, max_length, 1)
        self.settings, self.made = settings, made
        for key, source in {"data": made, **made.uses}.items():
            if getattr(source.settings.get("env") or source.env, "teaches", None) != "transitions":
                kind = source.settings["kind"]
                other = "" if kind == "collect" else f", and the kind collect, not {kind}"
                raise ConfigError(f"env.{key}: stage '{source.name}' needs env: {{teaches: transitions}}{other}")

    def _read(self, made: Made, part: str) -> list[Transition]:
        if not made.finished:
            return self._predicted(made)
        folder = made.folder / part
        if not any(folder.glob("*.tar")):
            raise ConfigError(f"env: stage '{made.name}' left no transitions in {folder}; {REMEDIES[part]}")
        return read_transitions(folder, self._worlds(made).worlds)

    def _worlds(self, made: Made) -> WorldTasks:
        """The worlds that a stage plays in."""
        return WorldTasks(made.settings.get("env") or made.env, None, self.tokenizer, self.max_length)

    def _predicted(self, made: Made) -> list[Transition]:
        """Transitions of the random policy in the stage's first task; a short dummy if it cannot play."""
        worlds = self._worlds(made)
        seat = worlds.episode(worlds.of("train")[0], 0, 0)
        (played,) = worlds.play(worlds.player([seat]), [seat], worlds.params(1, 1.0), 0)
        if isinstance(played.reward, Invalid) or seat.episode is None or not (turns := transitions(seat.episode, 0.0)):
            return [Transition((self.tokenizer.eos_id,), "?", answer("?", 0.0, ON))]
        before = [seat.episode.states[turn.turn] for turn in turns]
        still = [seat.episode.world.change(state, state) for state in before]
        pairs = zip(turns, still, strict=True)
        return [Transition(turn.sequence.ids[: turn.asked], state, turn.text) for turn, state in pairs]

    @cached_property
    def _train(self) -> list[Transition]:
        return self._read(self.made, "train")

    @cached_property
    def _test(self) -> list[Transition]:
        test = self.made.uses.get("test")
        if test is None and not self.made.settings["validation_share"]:
            raise ConfigError(f"env.test: stage '{self.made.name}' has validation_share: 0; {REMEDIES['held_out']}")
        return self._read(self.made, "held_out") if test is None else self._read(test, "train")

    def of(self, split: Split) -> Sequence[Transition]:
        return self._train if split == "train" else self._test

    def episode(self, task: Transition, prompt_id: int, sample_index: int) -> PredictionEpisode:
        return PredictionEpisode(task, prompt_id, sample_index, self.tokenizer)

    def play(self, sampler: Sampler, episodes: Sequence[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        return rollout(sampler, episodes, params, seed)

    def lessons(self, tasks: Sequence[Transition], where: str) -> list[list[TokenSequence]]:
        return [[self.answer_ids(task.asked, task.truth, where)] for task in tasks]

    def demonstration(self, task: Transition) -> list[str] | None:
        return [task.truth]

    def shown(self, episode: PredictionEpisode) -> list[dict[str, Any]]:
        task, said = episode.task, episode.said or ""
        prompt = self.tokenizer.decode(list(task.asked), keep_special=True)
        return [{"prompt": prompt, "action": "", "prediction": said, "truth": task.truth, "exact": said == task.truth}]

    def shown_as(self, model: str, temperature: float, part: str) -> str | None:
        return None  # RL shows answers, and these are very many

    # Evaluation.

    def judgements(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[Cells | Invalid]:
        pairs = zip(episodes, played, strict=True)
        return [t.reward if isinstance(t.reward, Invalid) else compared(e.task, read(e.said or "")) for e, t in pairs]

    def results(self, evaluation: Evaluation) -> Results:
        tables: dict[str, dict[str, Any]] = {}
        outcome: dict[str, Any] = {}
        asked: list[Transition] = evaluation.tasks[TEST]
        for temperature in evaluation.temperatures:
            judged = {name: evaluation.judged[name, temperature, TEST] for name in evaluation.models}
            tables[TEST + ending(evaluation, temperature)] = self._table(evaluation, asked, judged, temperature)
            for name, cells in judged.items():
                scores = zip(COLUMNS, estimates(cells), strict=True)
                outcome |= {f"{name}/t{temperature:g}/{column}": score.to_cell() for column, score in scores}
            for one, other in evaluation.compared():
                pairs = zip(judged[one], judged[other], strict=True)
                changes = [(_mean(a, 0), _mean(b, 0)) for a, b in pairs]
                change = mean_change([a - b for a, b in changes if a is not None and b is not None])
                outcome[f"{one} minus {other}/all exact, {heat(temperature)}"] = change.to_cell()
        return Results(tables, outcome)

    def _table(
        self, evaluation: Evaluation, asked: list[Transition], judged: dict[str, Any], temperature: float
    ) -> dict[str, Any]:
        common = Counter(found[1:] for task in self._train if (found := read(task.truth))).most_common(1)
        still = [[compared(task, (task.still, *common[0][0]))] for task in asked] if common else []
        lines = {NOTHING: ("baseline", still)} | {n: (evaluation.kind_of(n), cells) for n, cells in judged.items()}
        invalid = sum(isinstance(cell, Invalid) for cells in judged.values() for samples in cells for cell in samples)
        return {
            "title": f"{self.stage}: held-out transitions, {heat(temperature)}",
            "columns": COLUMNS,
            "lower": COLUMNS[-1:],
            "rows": [
                {"name": name, "kind": kind, "cells": [score.to_cell() for score in estimates(cells)]}
                for name, (kind, cells) in lines.items()
            ],
            "note": f"n = {len(asked)} transitions; 95 % intervals over them. Successes foretold: of those that come; "
            f"false ones: of transitions without. {invalid} results were invalid and are left out.",
        }


def read_transitions(folder: Path, tasks: Mapping[str, Task]) -> list[Transition]:
    """All transitions that a collect stage wrote to a folder, of worlds by their tags."""
    shards, found = ShardSet(folder), []
    worlds = {name: task.make() for name, task in tasks.items()}
    for number in range(len(shards)):
        sample = shards[number]
        ids, roles = (np.asarray(sample[name]).tolist() for name in ("tokens.npy", "roles.npy"))
        asked = tuple(i for i, role in zip(ids, roles, strict=True) if role == Role.PROMPT)
        before = sample["states.json"][0]
        still = worlds[sample["meta.json"]["task"]].change(before, before)
        found.append(Transition(asked, still, sample["messages.json"][-1]["content"]))
    return found


def _mean(samples: Sequence[Cells | Invalid], column: int) -> float | None:
    values = [v for cells in samples if not isinstance(cells, Invalid) and (v := cells[column]) is not None]
    return sum(values) / len(values) if values else None


def estimates(judged: Sequence[Sequence[Cells | Invalid]]) -> list[Estimate]:
    """Means by column, over the transitions that it applies to."""
    columns = [[_mean(samples, column) for samples in judged] for column in range(len(COLUMNS))]
    return [mean_share([value for value in values if value is not None]) for values in columns]
