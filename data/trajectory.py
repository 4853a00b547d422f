"""Trajectories: token ids, roles and sampler log-probs. Ids are the truth, text is a view."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


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

    def __post_init__(self) -> None:
        for name in ("roles", "logprobs", "versions"):
            found = len(getattr(self, name))
            if found != len(self.ids) and (found or name == "roles"):
                raise ValueError(f"{len(self.ids)} ids, but {found} {name}")

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
