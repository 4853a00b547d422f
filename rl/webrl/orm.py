"""The outcome reward model: what it learns from, and how its answer is read. Shape suffixes: T tokens, H hidden, R
judged rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...core.batch import PackedBatch
from ...core.engine import Head
from ...data.packing import TrainSequence
from ...kernels.linear_logprob import linear_logprob
from ..statistics import Estimate, mean_of_proportions, proportion
from .prompts import Prompter, single_token
from .steps import SUCCESS, WebStep, WebTrajectory

YES, NO = "YES", "NO"
NOTE = "# Element: "
_ELEMENT = re.compile(r'element="(\d+)"')
_NAMES = ("data-text", "placeholder", "title", "name")


def noted(step: WebStep) -> str:
    """A response with the note on its element that WebRL's demonstrations write. An actor without such notes says only
    a number, which means nothing on the last page: then the name is read off the page it acted on."""
    found = _ELEMENT.search(step.response)
    if found is None or NOTE in step.response:
        return step.response
    tag = re.search(rf'<[a-z0-9]+ id="{found[1]}"([^>]*)>', step.html)
    attributes = dict(re.findall(r'([a-z-]+)="([^"]*)"', tag[1])) if tag else {}
    name = next((attributes[key] for key in _NAMES if attributes.get(key)), "")
    return f"{NOTE}{name}\n{step.response}" if name else step.response


def verdict_row(prompter: Prompter, trajectory: WebTrajectory) -> TrainSequence:
    """Prompt and true verdict as a sequence; its one learnt token is the verdict, weight 1."""
    prompt, _ = prompter.verdict(trajectory.intent, [noted(s) for s in trajectory.steps], trajectory.steps[-1].html)
    word = single_token(prompter.tokenizer, YES if trajectory.success else NO)
    ce = np.zeros(len(prompt) + 1, np.float32)
    ce[-1] = 1.0
    return TrainSequence(np.asarray([*prompt, word], np.int64), ce=ce)


def weighed(row: TrainSequence, verdict: float, read: float) -> TrainSequence:
    """The row with these weights on its verdict and on every token that is read, but for the first, which follows
    nothing. Reading is worth learning: without it a model from scratch tells near misses from successes far worse
    (docs/web.md)."""
    ce = np.full(len(row.ids), read, np.float32)
    ce[0], ce[-1] = 0.0, verdict
    return replace(row, ce=ce)


def yes_score(yes: int, no: int):
    """A score for the engine: softmax over the logits of YES and NO wherever a verdict stands, 0 elsewhere."""

    def score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
        assert batch.ce_weight_T is not None
        rows = torch.nonzero(batch.ce_weight_T)[:, 0]
        hidden_RH = hidden_TH.index_select(0, rows)
        both = [
            linear_logprob(
                hidden_RH,
                head.weight_VH,
                torch.full_like(rows, word),
                group=head.group,
                vocab_size=head.vocab_size,
                fp8=head.fp8,
            )[0]
            for word in (yes, no)
        ]
        scores = torch.zeros(len(batch.ce_weight_T), device=hidden_TH.device)
        return {"yes": scores.index_copy(0, rows, torch.sigmoid(both[0] - both[1]).float())}

    return score


def by_kind(learnt: Sequence[tuple[Hashable, bool]], asked: Sequence[Hashable]) -> list[float]:
    """The verdicts of a judge that knows the kind of task alone: 1 where successes, weighed like all failures together,
    prevail. Actors fail at some kinds and succeed at others, so this is the baseline that a reward model which reads
    the trajectory must beat."""
    wins, losses = Counter(k for k, success in learnt if success), Counter(k for k, success in learnt if not success)
    return [float(wins[k] * losses.total() > losses[k] * wins.total()) for k in asked]


def labels(probabilities: Sequence[float], truth: Sequence[bool]) -> dict[str, Estimate | None]:
    """What its labels are worth as rewards: `precision`, the share of its YES that are successes; `recall`, the share
    of the successes that it finds; `base`, the share of successes, which a YES to everything has for precision. None
    where there is nothing of the kind."""
    said = [p >= SUCCESS for p in probabilities]
    found = sum(s and t for s, t in zip(said, truth, strict=True))
    counts = {"precision": sum(said), "recall": sum(truth)}
    shares = {name: proportion(found, n) if n else None for name, n in counts.items()}
    return {**shares, "base": proportion(sum(truth), len(truth)) if truth else None}


def accuracy(probabilities: Sequence[float], truth: Sequence[bool]) -> dict[str, Estimate | None]:
    """Share of right verdicts, of either class and as the mean of both, and what always giving the commoner answer
    would score; None where there is nothing of the kind."""
    right = [(p >= SUCCESS) == t for p, t in zip(probabilities, truth, strict=True)]
    parts = [[r for r, t in zip(right, truth, strict=True) if t is value] for value in (True, False)]
    shares = [proportion(sum(part), len(part)) if part else None for part in parts]
    return {
        "accuracy": proportion(sum(right), len(right)) if right else None,
        "balanced": None if None in shares else mean_of_proportions([s for s in shares if s is not None]),
        "successes": shares[0],
        "failures": shares[1],
        "majority": proportion(max(map(len, parts)), len(right)) if right else None,
    }
