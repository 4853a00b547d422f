"""The outcome reward model: what it learns from, and how its answer is read. Shape suffixes: T tokens, H hidden, R judged rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...core.batch import PackedBatch
from ...core.engine import Head
from ...data.packing import TrainSequence
from ...kernels.linear_logprob import linear_logprob
from ..statistics import Estimate, proportion
from .prompts import Prompter, single_token
from .steps import WebTrajectory

YES, NO = "YES", "NO"


def verdict_row(prompter: Prompter, trajectory: WebTrajectory) -> TrainSequence:
    """Prompt and true verdict as a sequence; its one learnt token is the verdict, weight 1."""
    prompt, _ = prompter.verdict(trajectory.intent, [s.response for s in trajectory.steps], trajectory.steps[-1].html)
    word = single_token(prompter.tokenizer, YES if trajectory.success else NO)
    ce = np.zeros(len(prompt) + 1, np.float32)
    ce[-1] = 1.0
    return TrainSequence(np.asarray([*prompt, word], np.int64), ce=ce)


def yes_score(yes: int, no: int):
    """A score for the engine: softmax over the logits of YES and NO wherever a verdict stands, 0 elsewhere."""

    def score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
        assert batch.ce_weight_T is not None
        rows = torch.nonzero(batch.ce_weight_T)[:, 0]
        hidden_RH = hidden_TH.index_select(0, rows)
        both = [
            linear_logprob(hidden_RH, head.weight_VH, torch.full_like(rows, word), group=head.group, vocab_size=head.vocab_size)[0]
            for word in (yes, no)
        ]
        found = torch.zeros(len(batch.ce_weight_T), device=hidden_TH.device)
        return {"yes": found.index_copy(0, rows, torch.sigmoid(both[0] - both[1]).float())}

    return score


def accuracy(probabilities: Sequence[float], truth: Sequence[bool]) -> dict[str, Estimate | float | None]:
    """Share of right verdicts, the mean of both classes' shares (None where one class is missing), and what always giving the commoner
    answer would score."""
    said = [p >= 0.5 for p in probabilities]
    right = [a == b for a, b in zip(said, truth, strict=True)]
    parts = [[r for r, t in zip(right, truth, strict=True) if t is value] for value in (True, False)]
    shares = [sum(part) / len(part) for part in parts if part]
    return {
        "accuracy": proportion(sum(right), len(right)),
        "balanced": sum(shares) / len(shares) if len(shares) == 2 else None,
        "majority": max(map(len, parts)) / max(len(right), 1),
    }
