"""Trajectories: token ids, roles and sampler log-probs. Ids are the truth, text is a view."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np


class Role(IntEnum):
    """Who wrote a token. Masks come from roles alone."""

    PROMPT = 0
    ACTION = 1  # sampled by the policy
    OBSERVATION = 2  # written by the world between sampled spans
    STATE = 3  # a world state to be learnt by imitation


@dataclass(frozen=True)
class Invalid:
    """A failure of the machinery, never of the model: it is counted and retried, and enters no statistic."""

    reason: str


@dataclass(frozen=True)
class Routing:
    """The experts that a sampler chose: for every token and layer a few, in its router's order, or -1 where it chose
    none. Kept as the bytes of int16 [tokens, layers, experts of a token], which compare and travel as they are.
    """

    layers: int
    each: int
    data: bytes

    @classmethod
    def of(cls, chosen_TLK: np.ndarray) -> Routing:
        _, layers, each = chosen_TLK.shape
        return cls(layers, each, chosen_TLK.astype(np.int16, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """int16 [tokens, layers, experts of a token]."""
        return np.frombuffer(self.data, np.int16).reshape(-1, self.layers, self.each)

    def __len__(self) -> int:
        return len(self.data) // (2 * self.layers * self.each)


def continued(before: Routing | None, after: Routing | None, at: int, length: int) -> Routing | None:
    """`before` up to token `at` of `length`, `after` from there on."""
    some = before or after
    if some is None:
        return None
    joined = np.full((length, some.layers, some.each), -1, np.int16)
    if before is not None:
        joined[:at] = before.array()[:at]
    if after is not None:
        joined[at:] = after.array()[at:]
    return Routing.of(joined)


@dataclass(frozen=True)
class TokenSequence:
    """One contiguous context. `logprobs` is the sampler's, 0.0 wherever the role is not ACTION.

    `weight_version` is the oldest that sampled a token of it. Where there were several, `versions` has one for every
    id, that of a token that was not sampled being the version of what follows.
    """

    ids: tuple[int, ...]
    roles: tuple[Role, ...]
    logprobs: tuple[float, ...] = ()
    weight_version: int = 0
    versions: tuple[int, ...] = ()
    experts: Routing | None = None  # of a model with experts, where the sampler tells

    def __post_init__(self) -> None:
        for name in ("roles", "logprobs", "versions"):
            found = len(getattr(self, name))
            if found != len(self.ids) and (found or name == "roles"):
                raise ValueError(f"{len(self.ids)} ids, but {found} {name}")
        if self.experts is not None and len(self.experts) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids, but experts of {len(self.experts)} tokens")

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version for every id."""
        return self.versions or (self.weight_version,) * len(self.ids)


@dataclass
class Trajectory:
    """All sequences of one sample of one prompt; with a windowed context every turn is a sequence of its own."""

    prompt_id: int
    sample_index: int
    sequences: list[TokenSequence]
    reward: float | Invalid
    turn_rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
