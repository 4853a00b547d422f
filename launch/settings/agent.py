"""Settings of the stages of agents in worlds: self-play, imitation, multi-turn RL, evaluation by arms. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.config import OptimizerConfig
from ...rl.agents.config import AgentSettings, Variant
from ...rl.rollout.config import Rollouts, SamplerConfig
from .base import Lora, OnPolicy, positive


@dataclass(frozen=True)
class AgentStart:
    """Where the agents of a recipe begin: a Hugging Face folder, or a model from scratch with a tokenizer made for the tags."""

    kind: Literal["agent-start"]
    name: str
    tags: list[str]  # of every world that an agent of the recipe meets
    tag_files: list[str] = field(default_factory=list)  # YAML files with tags beside those that ship
    folder: str | None = None  # a Hugging Face folder or a pinned model of the hub; its sizes must be those of `model`

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError("tags: at least one is needed")


@dataclass(frozen=True)
class AgentPlay:
    """Self-play: a model, or the random policy, plays worlds; its turns become shards to imitate, their state tags filled as told."""

    kind: Literal["agent-play"]
    name: str
    start: str
    agent: AgentSettings
    groups: int  # seeds played
    tags: dict[str, float] = field(default_factory=dict)  # with their weights; without any those of the start, equally
    samples_per_group: int = 8
    model: str | None = None  # the stage whose model plays; without one actions are random
    again: str | None = None  # an agent-play stage with a model: its very turns are taken again, for other states in their tags
    states: Variant = "truth"  # the ablations are belief, masked, blanked (masked symbol by symbol) and random_coordinates
    learn_blanks: bool = False  # blanked states carry a loss, so that the shape of an answer is learnt and nothing else
    only_tagged: bool = True  # leave out turns whose tags are not all there
    validation_share: float = 0.2  # of the trajectories
    first_seed: int = 10_000
    random_actions: int = 3  # a turn of the random policy
    max_new_tokens: int = 400
    temperature: float = 1.0
    groups_at_once: int = 32
    rollouts: Rollouts = field(default_factory=Rollouts)
    uses: ClassVar[tuple[str, ...]] = ("start", "model", "again")
    even: ClassVar[tuple[str, ...]] = ("groups",)

    def __post_init__(self) -> None:
        positive(self, "groups", "samples_per_group", "random_actions", "max_new_tokens", "groups_at_once")
        if self.again is not None and self.model is not None:
            raise ValueError("again: the turns are those of another stage; leave model out")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share: {self.validation_share} must be in [0, 1)")


@dataclass(frozen=True)
class AgentSupervised:
    """Imitation of self-play turns: cross-entropy over what was thought and answered, written states included."""

    kind: Literal["agent-sft"]
    name: str
    data: str  # the agent-play stage
    init: str
    sequences_per_step: int
    epochs: float
    optimizer: OptimizerConfig
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    checkpoint_every: int = 100
    log_every: int = 10
    uses: ClassVar[tuple[str, ...]] = ("data", "init")

    def __post_init__(self) -> None:
        positive(self, "sequences_per_step", "epochs", "microbatch_tokens", "checkpoint_every", "log_every")


@dataclass(frozen=True)
class AgentValidation:
    """Held-out seeds played during training, by tags of their own."""

    tags: dict[str, float] = field(default_factory=dict)  # without any those of the start, equally
    every: int = 10
    groups: int = 128
    samples_per_group: int = 8
    first_seed: int = 123

    def __post_init__(self) -> None:
        positive(self, "every", "groups", "samples_per_group")


@dataclass(frozen=True, kw_only=True)
class AgentReinforce(OnPolicy):
    """Multi-turn RL of an agent in worlds. prompts_per_step groups are dealt to the tags by weight; a group shares its seed."""

    kind: Literal["agent-rl"]
    agent: AgentSettings
    max_new_tokens: int  # of one turn
    tags: dict[str, float] = field(default_factory=dict)  # with their weights; without any those of the start, equally
    first_seed: int = 10_000
    actions: int | None = None  # stop once this stage and those in `counting` have taken so many actions; `steps` is then the most
    counting: list[str] = field(default_factory=list)  # agent-play stages whose actions count as this arm's
    validation: AgentValidation | None = None
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    uses: ClassVar[tuple[str, ...]] = ("init", "counting")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_new_tokens", "microbatch_tokens")
        if self.actions is not None:
            positive(self, "actions")


@dataclass(frozen=True)
class Arm:
    """A model as it is evaluated and compared."""

    name: str
    model: str
    agent: AgentSettings | None = None  # that of the stage which made the model, unless told
    control: bool = False  # the report marks it as one


@dataclass(frozen=True)
class AgentEvaluate:
    """Agents on held-out seeds beside the random policy and the ceiling: Pass@1, Pass@k, what turns did, perplexity of states."""

    kind: Literal["agent-eval"]
    name: str
    arms: list[Arm]
    max_new_tokens: int
    tags: list[str] = field(default_factory=list)  # one table each; without any those of the start
    groups: int = 128
    samples_per_group: int = 8
    first_seed: int = 123
    temperature: float = 1.0
    greedy: bool = False  # also play every seed once without chance, in a column of its own
    headline: str | None = None  # the arm that is compared with every other one, over the same seeds
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    uses: ClassVar[tuple[str, ...]] = ("models",)

    def __post_init__(self) -> None:
        positive(self, "groups", "samples_per_group", "max_new_tokens")
        names = [arm.name for arm in self.arms]
        if self.headline is not None and self.headline not in names:
            raise ValueError(f"headline: '{self.headline}' is no arm ({', '.join(names)})")

    @property
    def models(self) -> list[str]:
        return [arm.model for arm in self.arms]


AgentStage = AgentStart | AgentPlay | AgentSupervised | AgentReinforce | AgentEvaluate
