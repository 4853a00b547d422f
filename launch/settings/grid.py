"""Settings of the stages of a grid world model: self-play, imitation, RL on imagined rollouts, evaluation. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Comparison, OnPolicy, Supervision, positive


@dataclass(frozen=True)
class SelfPlay:
    """A random policy plays the world and writes its transitions as shards; some rooms are held out for evaluation."""

    kind: Literal["self-play"]
    name: str
    rooms: int  # rooms to learn from
    heldout_rooms: int  # rooms never seen in training
    actions_per_room: int  # random actions recorded in each room
    first_seed: int = 10_000
    samples_per_shard: int = 4096

    def __post_init__(self) -> None:
        positive(self, "rooms", "heldout_rooms", "actions_per_room", "samples_per_shard")


@dataclass(frozen=True, kw_only=True)
class Supervised(Supervision):
    """Next-state prediction by cross-entropy on the shards of a self-play stage."""

    kind: Literal["supervised"]
    microbatch_sequences: int = 64
    even: ClassVar[tuple[str, ...]] = ("sequences_per_step",)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "microbatch_sequences")


@dataclass(frozen=True)
class Imagination:
    """Tasks for a world model: a start state and forced actions; it sees only its own last prediction."""

    source: str  # the self-play stage whose rooms are used
    steps: int = 4  # states to imagine
    walk: int = 8  # random actions before the start state, at most

    def __post_init__(self) -> None:
        positive(self, "steps")


@dataclass(frozen=True, kw_only=True)
class Reinforce(OnPolicy):
    """RL with a verifiable reward on imagined rollouts."""

    kind: Literal["rlvr"]
    tasks: Imagination  # what is imagined, and from where
    microbatch_sequences: int = 64
    uses: ClassVar[tuple[str, ...]] = ("init", "tasks.source")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "microbatch_sequences")


@dataclass(frozen=True, kw_only=True)
class Evaluate(Comparison):
    """Held-out tasks for several stages' models, beside the copy baseline and the true world; the headline is at the last temperature."""

    kind: Literal["evaluate"]
    tasks: Imagination  # what is imagined, and from where
    n: int = 1024  # tasks in held-out rooms
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    uses: ClassVar[tuple[str, ...]] = ("models", "tasks.source")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "n")


GridStage = SelfPlay | Supervised | Reinforce | Evaluate
