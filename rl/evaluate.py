"""Scores of a world model's imagination on held-out tasks, and of its trivial baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.tokenizers import CharTokenizer
from .imagination import ImaginationEpisode, ImaginationTask
from .rollout.episodes import rollout
from .rollout.sampler import Sampler, SamplingParams
from .statistics import Estimate, mean_share, proportion


@dataclass(frozen=True)
class TaskScore:
    """What one imagined rollout got right. Changed-cell accuracy is None where the true states did not change."""

    first_exact: bool
    all_exact: bool
    first_changed: float | None
    all_changed: float | None


def score_predictions(task: ImaginationTask, predictions: Sequence[str]) -> TaskScore:
    """Exactness of the first and of all states; changed cells are those where the truth differs from the state before it."""
    exact = [p == t for p, t in zip(predictions, task.truths, strict=True)]
    before = (task.state, *task.truths[:-1])
    right, changed = [], []
    for old, truth, prediction in zip(before, task.truths, predictions, strict=True):
        cells = [i for i in range(len(truth)) if truth[i] != old[i]]
        changed.append(len(cells))
        right.append(sum(i < len(prediction) and prediction[i] == truth[i] for i in cells))
    return TaskScore(
        exact[0],
        all(exact),
        right[0] / changed[0] if changed[0] else None,
        sum(right) / sum(changed) if sum(changed) else None,
    )


def copy_baseline(tasks: Sequence[ImaginationTask]) -> list[TaskScore]:
    """Predicting that nothing ever changes."""
    return [score_predictions(task, [task.state] * len(task.truths)) for task in tasks]


def imagine(
    sampler: Sampler, tasks: Sequence[ImaginationTask], tokenizer: CharTokenizer, temperature: float, seed: int
) -> tuple[list[TaskScore], list[ImaginationEpisode]]:
    """One rollout of every task at a temperature."""
    episodes = [ImaginationEpisode(task, 0, tokenizer) for task in tasks]
    params = SamplingParams(max_new_tokens=len(tokenizer.encode(tasks[0].state)), temperature=temperature)
    rollout(sampler, episodes, params, seed)
    return [score_predictions(e.task, e.texts()) for e in episodes], episodes


@dataclass(frozen=True)
class Summary:
    """The four scores of a model, each with its interval."""

    first_exact: Estimate
    all_exact: Estimate
    first_changed: Estimate
    all_changed: Estimate

    def cells(self) -> list[dict]:
        return [e.to_cell() for e in (self.first_exact, self.all_exact, self.first_changed, self.all_changed)]


def summarise(scores: Sequence[TaskScore]) -> Summary:
    """Means over tasks with 95 % intervals."""
    return Summary(
        proportion(sum(s.first_exact for s in scores), len(scores)),
        proportion(sum(s.all_exact for s in scores), len(scores)),
        mean_share([s.first_changed for s in scores if s.first_changed is not None]),
        mean_share([s.all_changed for s in scores if s.all_changed is not None]),
    )
