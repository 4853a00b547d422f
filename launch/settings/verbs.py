"""Settings of the stages over an environment: start, collect, sft, rl, eval. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.by_path import ByPath, KindByPath
from ...core.config import OptimizerConfig
from ...rl.own.config import EnvironmentSettings
from ...rl.rollout.config import Rollouts, SamplerConfig
from .base import Lora, OnPolicy, Retention, positive


@dataclass(frozen=True)
class Start:
    """The start of a recipe's models: a Hugging Face model with its tokenizer, or fresh weights.

    Fresh weights come with a byte tokenizer, one made for the recipe's environments (worlds have one of their own
    pieces), or your own.
    """

    kind: Literal["start"]
    name: str
    # its folder, or a model of the hub pinned to a commit; its sizes must be those of `model`
    folder: str | None = None
    # for fresh weights: `file.py:function` that returns one of transformers or of terrella.data.tokenizers
    tokenizer: ByPath | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and self.tokenizer is not None:
            raise ValueError("tokenizer: the model in `folder` brings its own; leave one of both out")


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Plays training tasks, with or without a model, and writes what is worth imitating as shards for sft stages.

    If the environment names this stage as its `data`, the environment makes its own data here, such as rooms and play
    in them, or questions about games, by its own settings.
    """

    kind: Literal["collect"]
    name: str
    prompts: int | None = None  # number of training tasks; none if the environment makes its own data
    samples_per_prompt: int = 1
    env: EnvironmentSettings | None = None  # default: the recipe's
    # the stage whose model plays; default: demonstrations or, in worlds, the random policy
    model: str | None = None
    # a collect stage with a model: its answers are reused, for an environment that teaches something else
    again: str | None = None
    least_reward: float | None = None  # episodes with less are not imitated: rejection sampling
    validation_share: float = 0.2  # share of episodes held out, to measure what an sft stage learnt
    max_new_tokens: int = 400
    temperature: float = 1.0
    prompts_at_once: int = 32
    samples_per_shard: int = 4096
    rollouts: Rollouts = field(default_factory=Rollouts)
    # mean |sampler - trainer log-prob| above which the stage stops, for a sampler with its own copy of the weights
    drift_gate: float = 0.05
    uses: ClassVar[tuple[str, ...]] = ("model", "again")

    def __post_init__(self) -> None:
        counts = ("samples_per_prompt", "max_new_tokens", "prompts_at_once", "samples_per_shard", "drift_gate")
        positive(self, *counts, *(["prompts"] if self.prompts is not None else []))
        if self.again is not None and self.model is not None:
            raise ValueError("again: the answers are those of another stage; leave model out")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share: {self.validation_share} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Supervised fine-tuning: cross-entropy on the environment's demonstrations, or on all turns that a collect stage
    wrote.
    """

    kind: Literal["sft"]
    name: str
    init: str | None = None  # the stage whose weights to start from; without one, and without a start, they are fresh
    data: str | None = None  # a collect stage; default: the environment's demonstrations
    sequences_per_step: int
    optimizer: OptimizerConfig
    steps: int | None = None
    # passes over the training tasks, or what was collected; give one of epochs, steps and match_tokens_of
    epochs: float | None = None
    # a stage: train until at least as many tokens are learnt as it learnt or, for RL, sampled
    match_tokens_of: str | None = None
    # scale optimizer.warmup_steps and optimizer.total_steps to the number of steps of the stage
    stretch_schedule: bool = False
    env: EnvironmentSettings | None = None  # default: the recipe's
    lora: Lora | None = None
    # weight of a prompt token, relative to 1 for answers: models from scratch learn to copy from prompts
    prompt_weight: float = 0.0
    # weight of the mean loss over prompt tokens, relative to 1 for that over answers, however long they are
    prompt_loss: float = 0.0
    microbatch_tokens: int = 8192
    checkpoint_every: int = 100
    checkpoints: Retention = field(default_factory=Retention)  # which of them stay
    log_every: int = 10
    uses: ClassVar[tuple[str, ...]] = ("data", "init", "match_tokens_of")

    def __post_init__(self) -> None:
        positive(self, "sequences_per_step", "microbatch_tokens", "checkpoint_every", "log_every")
        if min(self.prompt_weight, self.prompt_loss) < 0 or (self.prompt_weight and self.prompt_loss):
            raise ValueError(
                f"prompt_weight: {self.prompt_weight} and prompt_loss: {self.prompt_loss} must not be negative; give "
                "one of them at most"
            )
        lengths = {"steps": self.steps, "epochs": self.epochs, "match_tokens_of": self.match_tokens_of}
        if self.data is not None and self.env is not None:
            raise ValueError("env: the lessons are those of the stage `data`; leave env out")
        if sum(value is not None for value in lengths.values()) != 1:
            given = " and ".join(f"{name} = {value}" for name, value in lengths.items() if value is not None)
            raise ValueError(
                "steps: give exactly one of steps, epochs and match_tokens_of, and null for what a base gives"
                + (f"; here are {given}" if given else "")
            )
        positive(self, *(name for name in ("steps", "epochs") if lengths[name] is not None))


@dataclass(frozen=True)
class HeldOut:
    """Tasks of the test split, played every `every` steps and after the last."""

    every: int = 10
    prompts: int = 128
    samples: int = 8  # of each
    # RL in an imagined world: the gap between success there and in the true world, on the same tasks, above which the
    # agent exploits its world model
    max_gap: float = 0.3
    on_gap: Literal["warn", "stop"] = "warn"  # reaction: an alarm, or the stage ends and the run continues

    def __post_init__(self) -> None:
        positive(self, "every", "prompts", "samples", "max_gap")
        if self.max_gap >= 1:
            raise ValueError(f"max_gap: {self.max_gap} must be below 1: no gap between two success rates is above it")


@dataclass(frozen=True, kw_only=True)
class Reinforce(OnPolicy):
    """RL on the environment's training tasks: episodes of one or many turns, rewarded at their end."""

    kind: Literal["rl"]
    max_new_tokens: int | None = None  # of one turn; environments whose answers have a length of their own need none
    env: EnvironmentSettings | None = None  # default: the recipe's
    # stop once this stage and those in `counting` have taken this many actions; `steps` is then the maximum
    actions: int | None = None
    counting: list[str] = field(default_factory=list)  # collect stages whose actions are counted too
    validation: HeldOut | None = None  # on held-out tasks; rollouts.validation is on a cut of the training tasks
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    uses: ClassVar[tuple[str, ...]] = ("init", "counting")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(
            self,
            "microbatch_tokens",
            *(name for name in ("max_new_tokens", "actions") if getattr(self, name) is not None),
        )
        if self.validation is not None and self.rollouts.validation.every:
            raise ValueError(
                "validation: on held-out tasks, or by rollouts.validation on a cut of the training tasks; leave one out"
            )


@dataclass(frozen=True)
class Arm:
    """A model in an evaluation, with its environment."""

    name: str  # in tables
    model: str
    # the environment it plays in; default: that of the stage that trained it or collected its lessons. If that
    # differs from an env of this stage, the arm must name one
    env: EnvironmentSettings | None = None
    control: bool = False  # marked as a control in the report


@dataclass(frozen=True, kw_only=True)
class Score:
    """Evaluates several stages' models on held-out tasks, beside trivial policies and, if there are demonstrations, the
    true answers.

    Give `models`, or `arms`: models with their own names and environments.
    """

    name: str
    models: list[str] = field(default_factory=list)  # the stages whose models are evaluated
    before: str | None = None  # the headline compares this stage ...
    after: str | None = None  # ... with this one
    control: str | None = None  # the stage that the report marks as the control arm
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    kind: Literal["eval"]
    arms: list[Arm] = field(default_factory=list)
    max_new_tokens: int | None = None  # of one turn; environments whose answers have a length of their own need none
    n: int = 256  # tasks at most
    samples: int = 1  # of each task, at temperatures above 0
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    env: EnvironmentSettings | None = None  # default: the recipe's
    uses: ClassVar[tuple[str, ...]] = ("evaluated",)

    def __post_init__(self) -> None:
        for key in ("before", "after", "control"):
            if getattr(self, key) is not None and getattr(self, key) not in self.names:
                raise ValueError(f"{key}: '{getattr(self, key)}' is none of {', '.join(self.names)}")
        positive(self, "n", "samples", *(["max_new_tokens"] if self.max_new_tokens is not None else []))
        if bool(self.models) == bool(self.arms):
            raise ValueError("models: give either models or arms")
        if not self.temperatures:
            raise ValueError("temperatures: at least one is needed; 0.0 is greedy")
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            what = "arms" if self.arms else "models"
            raise ValueError(f"{what}: two are called '{twice}'; tables could not tell them apart")

    @property
    def compared(self) -> list[Arm]:
        """The arms; `models` become arms in the stage's environment."""
        return self.arms or [Arm(name, name, self.env, name == self.control) for name in self.models]

    @property
    def names(self) -> list[str]:
        """The names of the models in tables."""
        return [arm.name for arm in self.compared]

    @property
    def evaluated(self) -> list[str]:
        """The stages whose models are evaluated."""
        return [arm.model for arm in self.compared]


@dataclass(frozen=True)
class OwnStage(KindByPath):
    """Your own stage, `kind: file.py:name`: `def name(stage, job)` is called on every rank and returns its outcome as a
    dict.

    `stage.args` holds the other keys; `job` has the run's folder, the mesh of ranks, the recipe and the outcomes of
    earlier stages.
    """

    name: str = field(kw_only=True)
    after: list[str] = field(default_factory=list)  # the earlier stages that it reads
    uses: ClassVar[tuple[str, ...]] = ("after",)


VerbStage = Start | Collect | Tune | Reinforce | Score | OwnStage
