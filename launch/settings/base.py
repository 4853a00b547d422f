"""Settings that stages share, whatever their world. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

from ...core.config import OptimizerConfig
from ...rl.algorithms import needs
from ...rl.algorithms.config import Algorithm
from ...rl.rollout.config import Rollouts, SamplerConfig


def positive(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) <= 0:
            raise ValueError(f"{name}: {getattr(settings, name)} must be above 0")


def references(stage: Any, env: Any = None) -> list[str]:
    """The earlier stages that a stage depends on: named in the fields that its class lists in `uses`, or by its
    environment (its own or the recipe's), which reads their data or asks their model."""
    read = (stage.env or env) if hasattr(stage, "env") else None
    made = [*sources(read).values()]
    earlier = made[: made.index(stage.name)] if stage.name in made else made
    earlier += [name for key in getattr(read, "models", ()) if (name := getattr(read, key)) is not None]
    for name in getattr(stage, "uses", ()):
        value = attrgetter(name)(stage)
        earlier += value if isinstance(value, list) else [value] if value else []
    return earlier


def sources(env: Any) -> dict[str, str]:
    """The stages that make an environment's data, by the settings that name them; each builds on the ones before it."""
    keys = getattr(env, "sources", ("data",))
    return {key: name for key in keys if (name := getattr(env, key, None)) is not None}


def dealt_evenly(stage: Any) -> tuple[str, ...]:
    """The settings, listed in `even` of the stage's class, that must be a multiple of the data-parallel ranks, since
    each takes an equal part.
    """
    return getattr(stage, "even", ())


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: everything else is frozen."""

    rank: int = 64  # width of the adapters
    alpha: float = 64.0  # the adapters' output is scaled by alpha / rank

    def __post_init__(self) -> None:
        positive(self, "rank", "alpha")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a stage are kept."""

    keep: int = 2  # how many of the newest; if one is damaged, a resume uses the previous one
    best: str | None = None  # also keep the one with the best value of this metric, such as validation/mean
    lowest: bool = False  # whether lower is better, as for a loss
    # what a finished stage keeps once a later one trains: the weights of its last and best checkpoint, or everything
    # (whole), from which `--steps` and `--back-to` can continue. The last stage that trains is left as it is
    finished: Literal["weights", "whole"] = "weights"

    def __post_init__(self) -> None:
        positive(self, "keep")
        if self.lowest and self.best is None:
            raise ValueError("lowest: needs best, the name of a metric")


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Settings of every RL stage, whatever its tasks."""

    name: str
    init: str  # the stage whose weights to start from
    algorithm: Algorithm  # how rewards become a loss
    prompts_per_step: int  # groups of samples in one rollout
    samples_per_prompt: int  # size of a group
    steps: int  # number of rollouts
    optimizer: OptimizerConfig
    # mini-batches of whole groups per rollout, one optimizer step each
    updates_per_rollout: int = 1
    epochs_per_rollout: int = 1  # passes over a rollout
    temperature: float = 1.0
    drift_gate: float = 0.05  # mean |sampler - trainer log-prob| above which the run stops
    checkpoint_every: int = 10
    checkpoints: Retention = field(default_factory=Retention)  # which of them stay
    rollouts_every: int = 10  # keep a sample of trajectories for the report
    rollouts: Rollouts = field(default_factory=Rollouts)
    critic: OptimizerConfig | None = None  # of ppo and starpo-s
    even: ClassVar[tuple[str, ...]] = ("prompts_per_step",)

    def __post_init__(self) -> None:
        positive(self, "prompts_per_step", "steps", "temperature", "drift_gate", "checkpoint_every", "rollouts_every")
        positive(self, "updates_per_rollout", "epochs_per_rollout")
        if self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt: a group needs at least 2 samples")
        trains_critic = "values" in needs(self.algorithm)
        if trains_critic and self.critic is None:
            raise ValueError(
                f"critic: algorithm {self.algorithm.kind} trains one; give its optimizer, e.g. critic: {{lr: 1e-5}}"
            )
        if self.critic is not None and not trains_critic:
            raise ValueError(f"critic: algorithm {self.algorithm.kind} trains none; leave it out (critic: null)")
        if self.updates_per_rollout > self.prompts_per_step:
            raise ValueError(
                f"updates_per_rollout: {self.updates_per_rollout} mini-batches of whole groups need as many "
                f"prompts_per_step, not {self.prompts_per_step}"
            )


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder of one stage's model, proven equal."""

    kind: Literal["export"]
    name: str
    model: str  # the stage whose model is exported
    uses: ClassVar[tuple[str, ...]] = ("model",)


def needs_reference(stage: OnPolicy) -> bool:
    """Whether an RL stage keeps its initial weights: for a KL term, or to report the divergence from them."""
    return stage.rollouts.report_kl or "reference" in needs(stage.algorithm)


def retention_of(stage: Any) -> Retention | None:
    """Which checkpoints of a stage are kept; None for a stage that does not train in steps."""
    return getattr(stage, "checkpoints", None) or getattr(getattr(stage, "training", None), "checkpoints", None)


def sampler_of(stage: Any, stages: Iterable[Any]) -> SamplerConfig | None:
    """The rollout settings of a stage; an evaluation without its own uses those of the recipe's first RL stage. None if
    no model is asked, as in a collect stage without one.
    """
    if hasattr(stage, "rollouts"):
        return stage.rollouts.sampler if getattr(stage, "model", "") is not None else None
    if not hasattr(stage, "sampler"):
        return None
    return stage.sampler or next((other.rollouts.sampler for other in stages if isinstance(other, OnPolicy)), None)
