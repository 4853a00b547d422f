"""The critic: two classifiers of success on the last token of a state. Shape suffixes: T tokens, H hidden."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ...core.batch import PackedBatch
from ...core.engine import Head
from ...core.errors import ConfigError
from ...data.packing import TrainSequence
from ...models.heads import twin_value


def state_row(prompt: Sequence[int], end: int, label: float = 0.0, weight: float = 1.0) -> TrainSequence:
    """A state whose last token is read. Position t holds id t, so one more id (never read) makes the last one's
    position exist; padding and packing then cannot move the place."""
    ids = np.asarray([*prompt, end], np.int64)
    value, returns = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    value[-1], returns[-1] = weight, label
    return TrainSequence(ids, value=value, returns=returns)


def twin_loss(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of both heads with the trajectory's outcome, wherever a state ends."""
    if head.values_T is None or batch.value_weight_T is None or batch.return_T is None:
        raise ConfigError("critic: the model has no twin heads, or the batch no labels")
    member_T = batch.value_weight_T != 0
    logits = head.values_T.float()
    label_T = (batch.return_T > 0).long()
    each = F.cross_entropy(logits.flatten(0, 1), label_T.repeat_interleave(2), reduction="none").view(-1, 2)
    loss = (batch.value_weight_T * torch.where(member_T[:, None], each, torch.zeros_like(each)).sum(1)).sum()
    said_T = twin_value(logits.detach()) >= 0.5
    right = ((said_T == label_T.bool()) & member_T).sum()
    return loss, {
        "loss": loss.detach(),
        "states": member_T.sum(),
        "right": right,
        "positive": (label_T * member_T).sum(),
    }


def twin_score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Both heads' probability of success before every target, and the smaller one."""
    if head.values_T is None:
        raise ConfigError("critic: the model has no twin heads")
    both = head.values_T.float().softmax(-1)[..., 1]
    return {"value": both.min(-1).values, "first": both[:, 0], "second": both[:, 1]}
