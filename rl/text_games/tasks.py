"""Text games as an environment: answers are right or not, and imagined games drift from the true ones."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from ...core.errors import ConfigError
from ...data.convert.text_game import is_changed, pair_of
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Trajectory
from ..evaluation import TEST, Evaluation, Results, heat, percent, points, verdict
from ..language import Domain, Question, prompt_ids, read_pair, readable
from ..language_data import write_parts
from ..language_tasks import PARTS, TITLES, Line, Made, QuestionTasks, ending
from ..rollout.sampler import Sample
from ..statistics import Estimate
from . import evaluate as games
from .config import TextGameEnvironment
from .crawl import crawl_all, find_game, prompt_writer
from .splits import Split, drawn, not_learnt, split_rows, thinned
from .thoughts import thought
from .world import by_step, drift_table, walks_of

DRIFT = "drift"
FIRST_SEED = 10_000  # of the games that are imagined; questions are of those from 0 on
TOKENIZER_TEXTS = 1500  # what a tokenizer learns from
log = logging.getLogger("terrella")


def names_in(rows: Sequence[dict[str, Any]]) -> str:
    """An expression for the names of the rows' things, the longest first."""
    labels = {o["name"].rpartition(" (ID: ")[0] for row in rows for o in row["current_state"]["objects"]}
    return rf"(?:{'|'.join(sorted(map(re.escape, labels), key=lambda label: (-len(label), label)))}) \(ID: \d+\)"


class TextGameTasks(QuestionTasks):
    """Questions about text games."""

    domain: ClassVar[Domain] = "text-game"
    columns: ClassVar[list[str]] = games.COLUMNS
    several = True
    settings: TextGameEnvironment

    def __init__(self, settings: TextGameEnvironment, made: Made, tokenizer: Tokenizer, max_length: int | None) -> None:
        self.reward = settings.reward
        super().__init__(settings, made, tokenizer, max_length)

    @property
    def style(self) -> Callable[[dict[str, Any]], str]:
        """How questions are written."""
        return prompt_writer(self.settings.prompt)

    def example(self) -> Question:
        row = crawl_all(self.settings.games[:1], range(1))[0]
        return read_pair(pair_of(row, self.style, "train"))

    def require_source(self) -> None:
        for name in (*self.settings.games, *self.settings.unseen_games):
            find_game(name)
        super().require_source()

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        """Crawl, split, and write the questions; crawling takes seconds, so that a killed stage begins again."""
        chosen = self.settings
        if chosen.in_shards:
            return super().make(guard)
        rows = crawl_all([*chosen.games, *chosen.unseen_games], range(chosen.seeds))
        split = split_rows(rows, each=chosen.heldout_per_verb, unseen_games=chosen.unseen_games, seed=self.made.seed)
        if missing := not_learnt(split):
            log.warning(
                "heldout_per_verb: nothing is left to learn %d kinds of rows from (%s); take more seeds",
                len(missing),
                missing[0],
            )
        if chosen.rows_per_kind:
            split = replace(split, train=thinned(split.train, chosen.rows_per_kind, self.made.seed))
        if chosen.thoughts:
            lessons = drawn(split.train, chosen.thoughts, chosen.non_gold_ratio, self.made.seed)
            if len(lessons) < chosen.thoughts:
                raise ConfigError(
                    f"env.thoughts: only {len(lessons)} rows can be drawn; lower it, or raise seeds or rows_per_kind"
                )
            split = Split(lessons, [], [])
        parts = dict(zip(PARTS, (split.train, split.test, split.unseen_games), strict=True))
        every = max(1, len(split.train) // TOKENIZER_TEXTS)
        guard()
        write_parts(
            self.made, [*parts.values()], self._lesson if chosen.thoughts else self._pair, names_in(split.train), every
        )
        return {
            **{f"{name}_rows": len(members) for name, members in parts.items()},
            **{f"{name}_changed": sum(map(is_changed, members)) for name, members in parts.items()},
            "kinds_not_learnt": len(missing),
            "pad_prompts_to": self.multiple,
        }

    def _pair(self, row: dict[str, Any], part: str) -> dict[str, Any]:
        return pair_of(row, self.style, part)

    def _lesson(self, row: dict[str, Any], part: str) -> dict[str, Any]:
        """A row whose reasoned answer is the scripted teacher's."""
        sample = self._pair(row, part)
        response = f"{thought(row)}\n{read_pair(sample).answer}"
        return {**sample, "extra.json": {**sample["extra.json"], "response": response}}

    def judge(self, asked: Sequence[Question], answers: Sequence[str | Invalid]) -> list[Any]:
        return games.judge_rows([question.row for question in asked], answers, self.settings.mode)

    def estimates(self, asked: Sequence[Question], judged: Sequence[Any]) -> list[Estimate]:
        return games.accuracies(judged)

    def gains(self, asked: Sequence[Question], after: Sequence[Any], before: Sequence[Any]) -> list[Estimate]:
        return games.gains(after, before)

    def table_of(self, asked: Sequence[Question], models: Sequence[Line], title: str) -> dict[str, Any]:
        compared = [games.Model(name, judged, kind) for name, kind, judged in models]
        return games.table([question.row for question in asked], compared, self.settings.mode, title)

    # Imagined games are a part of what an evaluation plays.

    def parts(self, n: int) -> dict[str, list[Any]]:
        parts, steps = super().parts(n), self.settings.drift_steps
        if steps and not self.settings.games:
            raise ConfigError("env.drift_steps: needs env.games to imagine; questions in shards name none")
        return parts | ({DRIFT: list(range(self.settings.drift_episodes))} if steps else {})

    def episode(self, task: Any, prompt_id: int, sample_index: int) -> Any:
        if isinstance(task, Question):
            return super().episode(task, prompt_id, sample_index)
        return Drifting(self, task, prompt_id, sample_index)

    def judgements(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[Any]:
        if not episodes or not isinstance(episodes[0], Drifting):
            return super().judgements(episodes, played)
        faults = [t.reward if isinstance(t.reward, Invalid) else None for t in played]
        hits = [{"model": e.walk.model, "copy": e.walk.copy} for e in episodes]
        return [fault or walked for fault, walked in zip(faults, hits, strict=True)]

    def results(self, evaluation: Evaluation) -> Results:
        results = super().results(evaluation)
        if evaluation.after:
            rows = [question.row for question in evaluation.tasks[TEST]]
            name, judged = evaluation.after, evaluation.firsts(TEST)[evaluation.after]
            model = games.Model(name, judged, evaluation.kind_of(name))
            for by in ("game", "verb"):
                results.tables[f"by-{by}"] = games.breakdown(rows, model, self.settings.mode, by)
        if evaluation.samples > 1:
            self._add_pass(evaluation, results)
        if DRIFT in evaluation.tasks:
            walked: dict[str, list[list[bool]]] = {}
            for name, judged in evaluation.firsts(DRIFT).items():
                valid = [hits for hits in judged if not isinstance(hits, Invalid)]
                walked[name] = by_step([hits["model"] for hits in valid], self.settings.drift_steps)
                walked["copy"] = by_step([hits["copy"] for hits in valid], self.settings.drift_steps)
            title = f"Imagined states still exact after k steps, {heat(evaluation.temperatures[-1])}"
            results.tables[DRIFT] = drift_table(walked, title)
        return results

    def _add_pass(self, evaluation: Evaluation, results: Results) -> None:
        """Tables of the rows that at least one of the samples gets right: what RL can still find in a model."""
        k = evaluation.samples
        parts = [part for part in evaluation.tasks if part in TITLES]
        for part, temperature in product(parts, filter(None, evaluation.temperatures)):
            asked, models = evaluation.tasks[part], list[games.Model]()
            for name in evaluation.models:
                judged = [games.best(samples) for samples in evaluation.judged[name, temperature, part]]
                models.append(games.Model(name, judged, evaluation.kind_of(name)))
                values = zip(self.columns, games.accuracies(judged), strict=True)
                key = f"{name}/{part}/pass@{k}{ending(evaluation, temperature)}"
                results.outcome.update({f"{key}/{column}": value.value for column, value in values})
            title = f"{TITLES[part]}, one of {k} samples right, {heat(temperature)}"
            table = games.table([question.row for question in asked], models, self.settings.mode, title)
            results.tables[f"{part}-pass{k}{ending(evaluation, temperature)}"] = table

    def summary(self, evaluation: Evaluation) -> dict[str, Any]:
        assert evaluation.before and evaluation.after
        judged = evaluation.firsts(TEST)
        scores = {name: games.accuracies(found) for name, found in judged.items()}
        gain = games.gains(judged[evaluation.after], judged[evaluation.before])[1]
        before, after = scores[evaluation.before], scores[evaluation.after]
        share = after[0].n / max(1, after[2].n)
        paragraphs = [
            f"Change {points(gain)} on the same {gain.n} held-out transitions that change the state. "
            "Answering that nothing "
            f"changes gets 0 % of these, all of the unchanged ones, and {100 * share:.1f} % overall.",
            (
                f"Unchanged {percent(before[0])} -> {percent(after[0])}; overall {percent(before[2])} -> "
                f"{percent(after[2])}."
            ),
        ]
        if evaluation.control:
            gap = games.gains(judged[evaluation.after], judged[evaluation.control])[1]
            control = scores[evaluation.control]
            paragraphs.append(
                f"Control, more imitation for the same gradient tokens: changed {percent(control[1])}, overall "
                f"{percent(control[2])} (RLVR minus control on changed transitions {points(gap)})."
            )
        words = (
            f"RLVR on a language world model, changed transitions right ({self.settings.mode} judge): {verdict(gain)}"
        )
        return {"headline": f"{words} {percent(before[1])} -> {percent(after[1])}.", "paragraphs": paragraphs}


class Drifting:
    """A game that a model imagines step by step beside the true one; every step is asked as a question of its own."""

    def __init__(self, tasks: TextGameTasks, number: int, prompt_id: int, sample_index: int) -> None:
        self.tasks, self.prompt_id, self.sample_index = tasks, prompt_id, sample_index
        (self.walk,) = walks_of(tasks.settings.games, [number], tasks.settings.drift_steps, FIRST_SEED)

    def context(self) -> tuple[int, ...] | None:
        row = self.walk.question()
        return None if row is None else prompt_ids(self.tasks.tokenizer, self.tasks.style(row), self.tasks.multiple)

    def receive(self, sample: Sample) -> None:
        self.walk.take(readable(self.tasks.tokenizer, sample.ids))

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        return [], 0.0, {}
