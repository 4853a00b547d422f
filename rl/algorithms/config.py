"""Settings of the algorithms; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.by_path import KindByPath


def at_most_one(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) > 1:
            raise ValueError(f"{name}: {getattr(settings, name)} must be at most 1")


def a_share(settings: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(settings, name) <= 1:
            raise ValueError(f"{name}: {getattr(settings, name)} must be in (0, 1]")


@dataclass(frozen=True)
class Policy:
    """What every policy-gradient algorithm can choose. Its defaults are GRPO's; the algorithms below change them.

    `aggregate` is how token terms become one loss: a mean over all tokens, a mean over sequences of token means, or a
    sum over tokens with a mean over sequences, which is what a sequence's log-probability asks for.
    """

    clip_low: float = 0.2  # the importance ratio is clipped below 1 minus this
    clip_high: float = 0.2  # and above 1 plus this
    dual_clip: float | None = None  # bound on the loss of a negative advantage, in units of -A
    aggregate: Literal["token", "sequence", "sum"] = "token"  # how token terms become one loss: see above
    kl_coef: float = 0.0  # weight of the divergence from the reference model, the stage's start; 0 needs none
    kl_in: Literal["loss", "reward"] = "loss"  # a term of the loss, or taken from each token's reward
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of the loss term; in the reward it is k1
    kl_clamp: float | None = None  # bound on the divergence of one token
    entropy_coef: float = 0.0  # weight of an entropy bonus
    # correction for samples of other weights than the trainer's: each is weighed by trainer / sampler probability, with
    # this cap; log-probs are then recomputed by the trainer
    tis_cap: float | None = None
    # each token's own ratio, or one of all sampled tokens of a sequence
    tis_per: Literal["token", "sequence"] = "token"
    # a ratio above the cap counts as the cap; or it, and one below 1 / cap, makes the weight 0
    tis_beyond: Literal["clip", "mask"] = "clip"

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} must not be negative")
        for name, least in (("dual_clip", 1), ("kl_clamp", 0), ("tis_cap", 0)):
            if getattr(self, name) is not None and getattr(self, name) <= least:
                raise ValueError(f"{name}: {getattr(self, name)} must be above {least}")
        if self.tis_beyond == "mask" and self.tis_cap is not None and self.tis_cap <= 1:
            raise ValueError(f"tis_cap: {self.tis_cap} must be above 1 where ratios beyond it are masked")


@dataclass(frozen=True)
class GRPO(Policy):
    """Group-relative policy optimisation: the advantage of a sample is its reward against its group's."""

    kind: Literal["grpo"] = "grpo"
    # what a reward is compared with, and divided by
    scale: Literal["mean_std", "mean", "leave_one_out", "uniform_std"] = "mean_std"
    keep: float = 1.0  # share of the groups that train, by the standard deviation of their rewards: StarPO-S's filter

    def __post_init__(self) -> None:
        super().__post_init__()
        a_share(self, "keep")


@dataclass(frozen=True)
class DrGRPO(Policy):
    """GRPO without its two biases: no division by the group's std, and every token weighs the same constant."""

    kind: Literal["dr-grpo"] = "dr-grpo"
    aggregate: Literal["sum"] = "sum"
    length: int = 512  # the constant a sequence's sum is divided by: the generation budget

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length: {self.length} must be at least 1")


@dataclass(frozen=True)
class DAPO(Policy):
    """GRPO with a wider upper clip, groups without a signal replaced by fresh prompts, and a soft penalty on
    overlong answers.
    """

    kind: Literal["dapo"] = "dapo"
    clip_high: float = 0.28
    refills: int = 4  # rounds of fresh prompts at most, to replace groups whose rewards are all equal
    overlong_length: int = 0  # sampled tokens a trajectory may have; 0 means no penalty
    overlong_cache: int = 0  # the penalty grows from 0 to 1 over this many tokens before that length

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refills < 0:
            raise ValueError(f"refills: {self.refills} must not be negative")
        if self.overlong_length and not 0 < self.overlong_cache <= self.overlong_length:
            raise ValueError(
                f"overlong_cache: {self.overlong_cache} must be between 1 and overlong_length ({self.overlong_length})"
            )


@dataclass(frozen=True)
class GSPO(Policy):
    """GRPO with one importance ratio per sequence, the geometric mean of its tokens'."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregate: Literal["sequence"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tis_cap is not None and self.tis_per == "token":
            raise ValueError("tis_cap: GSPO's ratio is the sequence's; correct by sequences too (tis_per: sequence)")


@dataclass(frozen=True)
class RLOO(Policy):
    """REINFORCE with the mean of the group's other samples as baseline; a sequence is one action."""

    kind: Literal["rloo"] = "rloo"
    aggregate: Literal["token", "sequence", "sum"] = "sum"
    kl_in: Literal["loss", "reward"] = "reward"


@dataclass(frozen=True)
class ReinforcePP(Policy):
    """REINFORCE++: returns with a KL penalty at every token, normalised over the tokens of the whole batch, without
    a critic.
    """

    kind: Literal["reinforce++"] = "reinforce++"
    kl_in: Literal["loss", "reward"] = "reward"
    gamma: float = 1.0  # discount from token to token
    group_baseline: bool = False  # subtract the group's mean reward first

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most_one(self, "gamma")


@dataclass(frozen=True)
class PPO(Policy):
    """PPO with a critic: advantages by GAE over tokens, or bi-level over turns and then tokens."""

    kind: Literal["ppo"] = "ppo"
    kl_in: Literal["loss", "reward"] = "reward"
    gamma: float = 1.0  # discount from token to token
    lam: float = 1.0  # GAE's decay from token to token
    bi_level: bool = False  # advantages over turns first, then over the tokens of each
    turn_gamma: float = 0.95  # of the upper level
    turn_rewards: bool = False  # each turn's reward at its last token, instead of the trajectory's at the very last
    value_clip: float = 0.5  # how far the critic's value may move from the old one before its loss is clipped
    whiten: bool = True  # advantages of a batch get mean 0 and standard deviation 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most_one(self, "gamma", "lam", "turn_gamma")
        if self.value_clip <= 0:
            raise ValueError(f"value_clip: {self.value_clip} must be above 0")
        if self.bi_level and not self.turn_rewards:
            raise ValueError("bi_level: needs turn_rewards, or there is only one turn end to see")
        # the upper level sees the turns' rewards alone; a KL penalty between turn ends belongs to the lower one
        if self.bi_level and self.kl_coef and self.kl_in == "reward":
            raise ValueError("bi_level: cannot be combined with kl_in: reward; put the KL term into the loss")


@dataclass(frozen=True)
class StarPOS(PPO):
    """StarPO-S: PPO on the groups whose rewards differ most, with clip-higher and dual clip."""

    kind: Literal["starpo-s"] = "starpo-s"  # type: ignore[assignment]
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.001
    keep: float = 0.25  # share of the groups, by the standard deviation of their rewards

    def __post_init__(self) -> None:
        super().__post_init__()
        a_share(self, "keep")


@dataclass(frozen=True)
class SFT:
    """Imitation of what was sampled (rejection sampling): cross-entropy on the trajectories whose reward is high
    enough.
    """

    kind: Literal["sft"] = "sft"
    min_reward: float = 1.0  # trajectories below it are left out
    signed: ClassVar[tuple[str, ...]] = ("min_reward",)


@dataclass(frozen=True)
class OwnAlgorithm(Policy, KindByPath):
    """Advantages by a function of one's own, `kind: file.py:name`: `def name(rewards, infos, **args)` is given the
    rewards of a group and what its scores hold beside them, and gives one advantage a sample. Clipping, KL and the rest
    are chosen as for GRPO."""

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        KindByPath.__post_init__(self)


Algorithm = GRPO | DrGRPO | DAPO | GSPO | RLOO | ReinforcePP | PPO | StarPOS | SFT | OwnAlgorithm
# kind of the settings -> module of this folder
MODULES = {
    "grpo": "grpo",
    "dr-grpo": "dr_grpo",
    "dapo": "dapo",
    "gspo": "gspo",
    "rloo": "rloo",
    "reinforce++": "reinforce_pp",
    "ppo": "ppo",
    "starpo-s": "starpo_s",
    "sft": "sft",
    "path": "own",
}
