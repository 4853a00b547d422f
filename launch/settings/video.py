"""Settings of the stages that only video has: tokenizer and Real2Sim; they read the recipe's env. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.by_path import ByPath, OwnFile
from ...core.config import OptimizerConfig
from ...models.video.config import TokenizerLoss
from ...rl.rollout.config import SamplerConfig
from ...rl.video.config import TRAINING_REACH
from .base import positive

Skill = Literal["scripted", "noisy", "weak", "random"]


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

    @property
    def context_distances(self) -> range:
        """Compressive: how many frames behind their context frame those that are trained on may lie."""
        return range(1, self.window) if self.window else range(TRAINING_REACH + self.frames_per_clip)


@dataclass(frozen=True)
class VideoReal2Sim:
    """Policies tried inside world models, beside what became of them in reality: do the two agree on who is better?
    Reality is the table-top scene's simulator; for recorded episodes of another robot, a file says what it was.
    """

    kind: Literal["video-real2sim"]
    name: str
    models: list[str]  # the stages whose world models are tried
    # of the table-top scene by name; of recorded episodes their instructions, in which * stands for any words
    tasks: list[str] = field(default_factory=lambda: ["push", "open", "close"])
    # whose success rates are compared: the scene's by name, yours as `file.py:Name`
    policies: list[Skill | ByPath] = field(default_factory=lambda: ["scripted", "noisy", "weak", "random"])
    # recorded episodes that trials begin with: a folder of video_episode shards; default: those held out by env
    shards: str | None = None
    # says from imagined frames, instruction and recorded frames whether the task was done, as `file.py:function`;
    # default: the scene's detector; of recorded episodes, whether the last frame is nearer to their end than to their
    # start
    judge: ByPath | None = None
    episodes: int = 30  # initial frames of each task
    frames: int = 24  # of an episode, at most
    top_k: int = 100  # tokens to sample from
    temperature: float = 1.0  # that frames are sampled at; 0 takes the likeliest codes
    repetition_penalty: float = 1.0  # the publication has 1.2 here
    first_seed: int = 900_000
    # of the scene: JSON that a machine with the simulator wrote; of recorded episodes: YAML or JSON with true success
    # by task and policy, each a rate or [successes, episodes]
    truth: OwnFile | None = None
    bf16: bool = False
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    env: ClassVar[None] = None  # the recipe's
    uses: ClassVar[tuple[str, ...]] = ("models",)
    even: ClassVar[tuple[str, ...]] = ("episodes",)

    def __post_init__(self) -> None:
        positive(self, "episodes", "frames", "repetition_penalty")
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} must be at least 0")
        names = [p.path.rpartition(":")[2] if isinstance(p, ByPath) else p for p in self.policies]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"policies: two are called '{twice}'; tables could not tell them apart")


VideoStage = VideoTokenizerTraining | VideoReal2Sim
