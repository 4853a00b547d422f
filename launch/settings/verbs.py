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
    """Where the models of a recipe begin: a Hugging Face model with its tokenizer, or fresh weights.

    Fresh ones read bytes, what the recipe's environments make for them (worlds have a tokenizer of their own pieces),
    or your own tokenizer.
    """

    kind: Literal["start"]
    name: str
    # its folder, or a model of the hub pinned to a commit; its sizes must be those of `model`
    folder: str | None = None
    # of fresh weights: `file.py:function` that gives one of transformers or of terrella.data.tokenizers
    tokenizer: ByPath | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and self.tokenizer is not None:
            raise ValueError("tokenizer: the model in `folder` brings its own; leave one of both out")


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Training tasks are played, by a model or without one, and what is worth imitating becomes shards for sft stages.

    Where the environment names this very stage as its `data`, the environment itself makes what all stages read, such
    as rooms and play in them, or questions about games, by its own settings.
    """

    kind: Literal["collect"]
    name: str
    prompts: int | None = None  # training tasks, from the first on; questions that are made need no number
    samples_per_prompt: int = 1
    env: EnvironmentSettings | None = None  # default: the recipe's
    # the stage whose model plays; without one demonstrations do, or in worlds the random policy
    model: str | None = None
    # a collect stage with a model: its very answers are taken again, for an environment that teaches otherwise
    again: str | None = None
    least_reward: float | None = None  # episodes below it teach nothing: rejection sampling
    validation_share: float = 0.2  # of the episodes, held out to say what an sft stage learnt
    max_new_tokens: int = 400
    temperature: float = 1.0
    prompts_at_once: int = 32
    samples_per_shard: int = 4096
    rollouts: Rollouts = field(default_factory=Rollouts)
    # mean |sampler - trainer log-prob| above which the stage stops, where the sampler holds weights of its own
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
    """Supervised fine-tuning: cross-entropy on the environment's demonstrations, or on what a collect stage left,
    all turns of it.
    """

    kind: Literal["sft"]
    name: str
    init: str | None = None  # the stage whose weights to start from; without one, and without a start, they are fresh
    data: str | None = None  # a collect stage; without one the environment's demonstrations are imitated
    sequences_per_step: int
    optimizer: OptimizerConfig
    steps: int | None = None
    # over the training tasks, or what was collected; give either epochs, steps or match_tokens_of
    epochs: float | None = None
    # a finished stage: take as many steps as teach at least the tokens that it learnt from, or sampled where it was RL
    match_tokens_of: str | None = None
    # fit optimizer.warmup_steps and optimizer.total_steps, in their ratio, to the steps that the stage comes to
    stretch_schedule: bool = False
    env: EnvironmentSettings | None = None  # default: the recipe's
    lora: Lora | None = None
    # of the prompts' own tokens, beside 1 of the answers': models from scratch learn to copy from them
    prompt_weight: float = 0.0
    # weight of the mean loss over the prompts' tokens, beside 1 of that over the answers', however long they are
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
    """Tasks of the test split played after every so many steps, and after the last."""

    every: int = 10
    prompts: int = 128
    samples: int = 8  # of each
    # RL in an imagined world: the same tasks are played in it too; success there minus success in the true world, above
    # which the agent exploits its world model
    max_gap: float = 0.3
    on_gap: Literal["warn", "stop"] = "warn"  # what follows: an alarm, or the stage ends there and the run goes on

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
    # stop once this stage and those in `counting` have taken so many actions; `steps` is then the most
    actions: int | None = None
    counting: list[str] = field(default_factory=list)  # collect stages whose actions count as this stage's
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
    """A model as it is evaluated and compared."""

    name: str  # in tables
    model: str
    # how it meets the stage's tasks; default: as in the stage that trained it or collected its lessons. Where that
    # differs from an env that the stage itself names, the arm must say which
    env: EnvironmentSettings | None = None
    control: bool = False  # the report marks it as one


@dataclass(frozen=True, kw_only=True)
class Score:
    """Held-out tasks for several stages' models, beside trivial policies and, where there are demonstrations, the true
    answers.

    Give `models`, or `arms`: models with names, and environments to meet their tasks in, of their own.
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
        """The arms, or the models as arms in the stage's own environment."""
        return self.arms or [Arm(name, name, self.env, name == self.control) for name in self.models]

    @property
    def names(self) -> list[str]:
        """What the models are called in tables."""
        return [arm.name for arm in self.compared]

    @property
    def evaluated(self) -> list[str]:
        """The stages whose models are evaluated."""
        return [arm.model for arm in self.compared]


@dataclass(frozen=True)
class OwnStage(KindByPath):
    """A stage of one's own, `kind: file.py:name`: `def name(stage, job)` is called on every rank, and gives its outcome
    as a dict.

    `stage.args` holds the further keys; `job` has the run's folder, the mesh of ranks, the recipe and the outcomes of
    earlier stages.
    """

    name: str = field(kw_only=True)
    after: list[str] = field(default_factory=list)  # the earlier stages that it reads
    uses: ClassVar[tuple[str, ...]] = ("after",)


VerbStage = Start | Collect | Tune | Reinforce | Score | OwnStage
