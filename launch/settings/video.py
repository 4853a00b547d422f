"""Settings of the stages that only video has: tokenizer and Real2Sim; they read the recipe's env. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.config import OptimizerConfig
from ...models.video.config import TokenizerLoss
from ...rl.rollout.config import SamplerConfig
from .base import positive


@dataclass(frozen=True)
class VideoTokenizerTraining:
    """Trains the tokenizer of the recipe's `env` on the frames of its episodes."""

    kind: Literal["video-tokenizer"]
    name: str
    steps: int
    clips_per_step: int  # clips of a batch
    optimizer: OptimizerConfig
    frames_per_clip: int = 8  # frames drawn from each
    # compressive: frames are drawn from a window of this length behind the context frame; 0 means consecutive frames
    window: int = 0
    augment: bool = True  # crops and colours are varied at random
    loss: TokenizerLoss = field(default_factory=TokenizerLoss)  # terms and their weights
    bf16: bool = False
    released: str | None = None  # a folder of released weights to take instead of training
    heldout_clips: int = 64  # clips that reconstruction is measured on
    checkpoint_every: int = 500
    log_every: int = 10
    env: ClassVar[None] = None  # the recipe's

    def __post_init__(self) -> None:
        positive(self, "steps", "clips_per_step", "frames_per_clip", "heldout_clips", "checkpoint_every", "log_every")
        if self.window and self.window <= self.frames_per_clip:
            raise ValueError(f"window: {self.window} must exceed frames_per_clip ({self.frames_per_clip})")


@dataclass(frozen=True)
class VideoReal2Sim:
    """Policies of graded skill, tried inside world models and in the true simulator: do the two agree on who is
    better?
    """

    kind: Literal["video-real2sim"]
    name: str
    models: list[str]  # the stages whose world models are tried
    tasks: list[str] = field(default_factory=lambda: ["push", "open", "close"])  # of the table-top scene
    # whose success rates are compared
    policies: list[str] = field(default_factory=lambda: ["scripted", "noisy", "weak", "random"])
    episodes: int = 30  # initial frames of each task
    frames: int = 24  # of an episode
    top_k: int = 100  # tokens to sample from
    repetition_penalty: float = 1.0  # the publication has 1.2 here
    first_seed: int = 900_000
    truth: str | None = None  # JSON of true success rates, for machines without the simulator
    bf16: bool = False
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    env: ClassVar[None] = None  # the recipe's
    uses: ClassVar[tuple[str, ...]] = ("models",)
    even: ClassVar[tuple[str, ...]] = ("episodes",)

    def __post_init__(self) -> None:
        positive(self, "episodes", "frames")


VideoStage = VideoTokenizerTraining | VideoReal2Sim
