"""Bandit: one pull of a safe or a risky arm. Success is choosing the arm with the higher expected reward, whatever
it paid.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started


@dataclass(frozen=True)
class BanditConfig:
    """Names and payments of the arms: the low arm always pays `low_reward`, the high arm `high_reward` with
    `high_chance`.
    """

    low_arm: str = "Phoenix"
    high_arm: str = "Dragon"
    low_reward: float = 0.1
    high_reward: float = 1.0
    high_chance: float = 0.25

    def __post_init__(self) -> None:
        if self.low_arm.lower() == self.high_arm.lower() or self.high_chance * self.high_reward <= self.low_reward:
            raise ValueError(f"low_arm: the arms need two names and the high arm the higher expectation: {self}")


class Bandit(World):
    """Two arms, named in an order that the seed shuffles."""

    name = "bandit"
    Config = BanditConfig

    def __init__(self, **settings: Any) -> None:
        self.config = BanditConfig(**settings)
        self.arms: list[str] | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.arms = [self.config.low_arm, self.config.high_arm]
        random.Random(seed).shuffle(self.arms)
        self.seed, self.sample, self.done = seed, sample, False
        self.action_words = dict(enumerate(self.arms, start=1))
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.arms)
        assert self.arms is not None
        if self.done or action not in (1, 2):
            raise WorldFault(
                f"bandit: one pull of arm 1 or 2 per episode, not {action!r}{' after the end' if self.done else ''}"
            )
        self.done = True
        arm = self.arms[int(action) - 1]
        high = arm == self.config.high_arm
        # A string seed is hashed by `random` itself, the same way in every process.
        lucky = random.Random(f"{self.seed}/{self.sample}").random() < self.config.high_chance
        reward = self.config.high_reward * lucky if high else self.config.low_reward
        info = {"action_is_effective": True, "action_is_valid": True, "success": high}
        return StepResult(f"{arm}: {reward:g} points.", reward, True, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.arms)
        first, second = self.arms or ("", "")
        return (
            f"Two arms: {first} and {second}. You may pull one of them, once. What an arm pays may be fixed or may be "
            "a matter of luck, "
            f"as its name suggests; choose the arm that pays more on average. Answer with {first} or {second}."
        )

    def snapshot(self) -> Snapshot:
        check_started(self, self.arms)
        return {
            "world": self.name,
            "arms": list(self.arms or ()),
            "seed": self.seed,
            "sample": self.sample,
            "done": self.done,
        }

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name:
            raise WorldFault(f"bandit: a snapshot of {snapshot.get('world')!r}")
        self.arms, self.seed, self.sample = list(snapshot["arms"]), int(snapshot["seed"]), int(snapshot["sample"])
        self.done, self.action_words = bool(snapshot["done"]), dict(enumerate(snapshot["arms"], start=1))
