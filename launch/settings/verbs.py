"""Settings of the stages over an environment: start, sft, rl, eval. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.by_path import KindByPath
from ...core.config import OptimizerConfig
from ...rl.own.config import EnvironmentSettings
from .base import Comparison, Lora, OnPolicy, positive


@dataclass(frozen=True)
class Start:
    """Where the models of a recipe begin: a Hugging Face model with its tokenizer, or fresh weights that read bytes."""

    kind: Literal["start"]
    name: str
    folder: str | None = None  # its folder, or a model of the hub pinned to a commit; its sizes must be those of `model`


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Supervised fine-tuning: cross-entropy on the environment's demonstrations, all turns of them."""

    kind: Literal["sft"]
    name: str
    init: str  # the stage whose weights to start from
    sequences_per_step: int
    optimizer: OptimizerConfig
    steps: int | None = None
    epochs: float | None = None  # over the training tasks; give either epochs, steps or match_tokens_of
    match_tokens_of: str | None = None  # a finished stage: take as many steps as give at least its gradient tokens
    env: EnvironmentSettings | None = None  # default: the recipe's
    lora: Lora | None = None
    prompt_weight: float = 0.0  # of the prompts' own tokens, beside 1 of the answers': models from scratch learn to copy from them
    microbatch_tokens: int = 8192
    checkpoint_every: int = 100
    log_every: int = 10
    uses: ClassVar[tuple[str, ...]] = ("init", "match_tokens_of")

    def __post_init__(self) -> None:
        positive(self, "sequences_per_step", "microbatch_tokens", "checkpoint_every", "log_every")
        lengths = {"steps": self.steps, "epochs": self.epochs, "match_tokens_of": self.match_tokens_of}
        if sum(value is not None for value in lengths.values()) != 1:
            raise ValueError("steps: give exactly one of steps, epochs and match_tokens_of")
        positive(self, *(name for name in ("steps", "epochs") if lengths[name] is not None))


@dataclass(frozen=True, kw_only=True)
class Reinforce(OnPolicy):
    """RL on the environment's training tasks: episodes of one or many turns, rewarded at their end."""

    kind: Literal["rl"]
    max_new_tokens: int  # of one turn
    env: EnvironmentSettings | None = None  # default: the recipe's
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    uses: ClassVar[tuple[str, ...]] = ("init",)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_new_tokens", "microbatch_tokens")


@dataclass(frozen=True, kw_only=True)
class Score(Comparison):
    """Held-out tasks for several stages' models, beside trivial policies and, where there are demonstrations, the true answers."""

    kind: Literal["eval"]
    max_new_tokens: int
    n: int = 256  # tasks at most
    samples: int = 1  # of each task, at temperatures above 0
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    env: EnvironmentSettings | None = None  # default: the recipe's
    uses: ClassVar[tuple[str, ...]] = ("models",)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "n", "samples", "max_new_tokens")
        if not self.temperatures:
            raise ValueError("temperatures: at least one is needed; 0.0 is greedy")


@dataclass(frozen=True)
class OwnStage(KindByPath):
    """A stage of one's own, `kind: file.py:name`: `def name(stage, job)` is called on every rank, and gives its outcome as a dict.

    `stage.args` holds the further keys; `job` has the run's folder, the mesh of ranks, the recipe and the outcomes of earlier stages.
    """

    name: str = field(kw_only=True)
    after: list[str] = field(default_factory=list)  # the earlier stages that it reads
    uses: ClassVar[tuple[str, ...]] = ("after",)


VerbStage = Start | Tune | Reinforce | Score | OwnStage
