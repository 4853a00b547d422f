"""What an actor learns from steps: WebRL's two objectives, and the methods it is compared with, as weighed
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...data.packing import TrainSequence
from ...kernels.policy import PolicySettings
from . import advantage
from .steps import WebStep, WebTrajectory, mc_returns

Method = Literal["paper", "released", "filtered_bc", "awr", "digirl", "reinforce"]
WITH_REFERENCE = ("paper", "released")


@dataclass(frozen=True)
class Weighed:
    """A step with its advantage (the WebRL objectives, reinforce) or its imitation weight (the others)."""

    step: WebStep
    value: float
    trajectory: int = 0  # its place in the list that was weighed
    index: int = 0  # and in that trajectory


def weigh(
    method: Method,
    trajectories: Sequence[WebTrajectory],
    values: Sequence[Sequence[float]] | None,
    *,
    lam: float = 0.5,
    gamma: float = 0.9,
) -> list[Weighed]:
    """Every step that the method learns from. `values` are the critic's of each trajectory's states, the one after
    the last included.
    """
    if method == "filtered_bc":
        kept = advantage.filtered([t.reward for t in trajectories])
        whole = [(n, t) for n, (t, keep) in enumerate(zip(trajectories, kept, strict=True)) if keep]
        return [Weighed(s, 1.0, n, i) for n, t in whole for i, s in enumerate(t.steps) if s.learn]
    if values is None:
        raise ValueError(f"method: {method} needs the critic's values")
    weighed: list[Weighed] = []
    for n, (t, known) in enumerate(zip(trajectories, values, strict=True)):
        if method in ("paper", "reinforce"):
            numbers = advantage.mixed(t.reward, known, lam)
        elif method == "released":
            numbers = advantage.released(t.reward, known, mc_returns(len(t.steps), t.reward, gamma))
        elif method == "awr":
            numbers = [advantage.exponential_weight(a) for a in advantage.discounted(t.reward, known, gamma)]
        else:
            # instructions that the policy has mastered or never solves teach little: DigiRL asks for reward beyond the
            # first state's value
            numbers = [float(a > 1 / len(t.steps)) for a in advantage.doubly_robust(t.reward, known, lam)]
            if t.reward <= known[0]:
                continue
        for i, (s, number) in enumerate(zip(t.steps, numbers, strict=True)):
            if s.learn and (method != "digirl" or number):
                weighed.append(Weighed(s, number, n, i))
    return weighed


def settings(method: Method, beta: float, length_normalize: bool) -> PolicySettings:
    """The kernel's objective."""
    if method in WITH_REFERENCE:
        return PolicySettings(objective=f"webrl_{method}", beta=beta, length_normalize=length_normalize)
    return PolicySettings()


def row(method: Method, weighed: Weighed, sequences: int, reference: np.ndarray | None = None) -> TrainSequence:
    """A step for the engine. The loss is a mean over the step's sequences; a sequence counts as one whatever its
    length.
    """
    ids, mask = weighed.step.ids, weighed.step.mask
    share = mask / np.float32(max(mask.sum(), 1.0) * sequences)
    if method in ("filtered_bc", "awr", "digirl"):
        return TrainSequence(ids, ce=share * np.float32(weighed.value))
    advantage_ = mask * np.float32(weighed.value)
    if method == "reinforce":
        return TrainSequence(ids, pg=share, advantage=advantage_)
    if reference is None:
        raise ValueError(f"method: {method} needs the reference's log-probs")
    return TrainSequence(ids, pg=share, advantage=advantage_, ref_logprob=(reference * mask).astype(np.float32))
