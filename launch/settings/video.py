"""Settings of video world models: one section that all stages agree on, and the stages. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.config import OptimizerConfig
from ...data.video_layout import VideoLayout
from ...models.video.config import TokenizerConfig, TokenizerLoss
from ...rl.rollout.config import SamplerConfig
from .base import Comparison, OnPolicy, Supervision, positive


@dataclass(frozen=True)
class VideoSettings:
    """What all stages of a video world model agree on: the tokenizer, and how a clip becomes a sequence."""

    tokenizer: TokenizerConfig  # how frames become tokens
    history: int = 1  # frames that are given
    horizon: int = 7  # frames to predict
    actions: Literal["rt1", "tabletop", "quantiles"] = "rt1"  # the ranges of the action bins; quantiles are measured on the data
    action_dims: int = 13  # numbers of an action
    action_bins: int = 256  # bins that each number is cut into
    context_reach: int = 15  # compressive: the context frame lies at most so many frames before the clip

    def __post_init__(self) -> None:
        positive(self, "history", "horizon", "action_dims", "action_bins")
        wanted = {"rt1": 13, "tabletop": 3}.get(self.actions, self.action_dims)
        if self.action_dims != wanted:
            raise ValueError(f"action_dims: actions of {self.actions} have {wanted} numbers")

    @property
    def layout(self) -> VideoLayout:
        """The token layout that follows from these settings."""
        t = self.tokenizer
        return VideoLayout(
            codebook=t.codebook,
            frame_tokens=t.frame_tokens,
            context_tokens=t.context_tokens,
            history=self.history,
            horizon=self.horizon,
            markers=not t.context_tokens,
            action_dims=self.action_dims,
            action_bins=self.action_bins,
        )


@dataclass(frozen=True)
class VideoData:
    """Video episodes: recorded in the table-top scene, or shards that exist already."""

    kind: Literal["video-data"]
    name: str
    shards: str | None = None  # a folder of video_episode shards; then nothing is recorded
    heldout_every: int = 100  # of existing shards, every so many-th episode is held out
    episodes: int = 0  # to record for training
    heldout_episodes: int = 0  # to record for evaluation
    frames: int = 24  # of an episode
    tasks: list[str] = field(default_factory=lambda: ["push", "open", "close"])  # what the recorded policies are asked to do
    policies: list[str] = field(default_factory=lambda: ["scripted", "noisy", "weak", "random"])  # who acts, dealt evenly to the episodes
    first_seed: int = 100_000
    workers: int = 0  # processes that record; 0 means the stage itself

    def __post_init__(self) -> None:
        if self.shards is None:
            positive(self, "episodes", "heldout_episodes", "frames")
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")


@dataclass(frozen=True)
class VideoTokenizerTraining:
    """Trains the tokenizer of the recipe's `video` section on the frames of a data stage."""

    kind: Literal["video-tokenizer"]
    name: str
    data: str  # the video-data stage
    steps: int
    clips_per_step: int  # clips of a batch
    optimizer: OptimizerConfig
    frames_per_clip: int = 8  # frames drawn from each
    window: int = 0  # compressive: frames are drawn from a window of this length behind the context frame; 0 means consecutive frames
    augment: bool = True  # crops and colours are varied at random
    loss: TokenizerLoss = field(default_factory=TokenizerLoss)  # terms and their weights
    bf16: bool = False
    released: str | None = None  # a folder of released weights to take instead of training
    heldout_clips: int = 64  # clips that reconstruction is measured on
    checkpoint_every: int = 500
    log_every: int = 10
    uses: ClassVar[tuple[str, ...]] = ("data",)

    def __post_init__(self) -> None:
        positive(self, "steps", "clips_per_step", "frames_per_clip", "heldout_clips", "checkpoint_every", "log_every")
        if self.window and self.window <= self.frames_per_clip:
            raise ValueError(f"window: {self.window} must exceed frames_per_clip ({self.frames_per_clip})")


@dataclass(frozen=True)
class VideoTokens:
    """Clips of a data stage as shards of token sequences, by a frozen tokenizer."""

    kind: Literal["video-tokens"]
    name: str
    data: str  # the video-data stage
    tokenizer: str  # the video-tokenizer stage
    clips_per_episode: int = 4  # 0 where nothing is trained
    heldout_clips_per_episode: int = 1  # likewise, of held-out episodes
    batch: int = 16  # clips encoded together
    bf16: bool = False
    uses: ClassVar[tuple[str, ...]] = ("data", "tokenizer")

    def __post_init__(self) -> None:
        positive(self, "heldout_clips_per_episode", "batch")
        if self.clips_per_episode < 0:
            raise ValueError(f"clips_per_episode: {self.clips_per_episode} must not be negative")


@dataclass(frozen=True, kw_only=True)
class VideoSupervised(Supervision):
    """Next-frame prediction by cross-entropy on token shards: pre-training, or the control arm of an RL stage."""

    kind: Literal["video-pretrain"]
    microbatch_sequences: int = 8
    checkpoint_every: int = 500
    released: str | None = None  # a folder of a released transformer to take instead of training
    even: ClassVar[tuple[str, ...]] = ("sequences_per_step",)

    def __post_init__(self) -> None:
        if self.released is None:
            super().__post_init__()
        positive(self, "microbatch_sequences")


@dataclass(frozen=True)
class VideoReward:
    """Weights of the metrics between predicted and true frames; similarities count positively, errors negatively."""

    mae: float = 1.0  # weight of the mean absolute error
    mse: float = 0.0  # weight of the mean squared error
    psnr: float = 0.0  # weight of the peak signal-to-noise ratio
    ssim: float = 0.0  # weight of the structural similarity
    lpips: float = 1.0  # VGG
    lpips_alex: float = 0.0  # weight of LPIPS by AlexNet
    aggregate: Literal["mean", "last", "discount"] = "mean"  # over frames: their mean, the last alone, or later ones discounted
    repetition_penalty: float = 0.0  # taken off when the last frame is repeated
    signed: ClassVar[tuple[str, ...]] = ("mae", "mse", "psnr", "ssim", "lpips", "lpips_alex", "repetition_penalty")

    def __post_init__(self) -> None:
        if not any(self.weights.values()):
            raise ValueError("mae: at least one metric needs a weight")

    @property
    def weights(self) -> dict[str, float]:
        names = ("mae", "mse", "psnr", "ssim", "lpips", "lpips_alex")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class VideoReinforce(OnPolicy):
    """RL on imagined clips: predicted frames are decoded and compared with the true ones."""

    kind: Literal["video-rlvr"]
    data: str  # the stage that made the token shards
    reward: VideoReward = field(default_factory=VideoReward)  # what predicted frames are paid for
    visual_ids_only: bool = False  # sample frame codes alone; the publication does not
    microbatch_sequences: int = 8
    bf16: bool = False  # of the decoder
    uses: ClassVar[tuple[str, ...]] = ("init", "data")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "microbatch_sequences")


@dataclass(frozen=True, kw_only=True)
class VideoEvaluate(Comparison):
    """Held-out clips for several stages' models: picture metrics, repetition, rejection of repeated clips, best of N."""

    kind: Literal["video-eval"]
    data: str  # the video-tokens stage
    n: int = 64  # held-out clips
    runs: int = 3  # sampling runs
    temperature: float = 1.0
    top_k: int = 100  # tokens to sample from
    metrics: list[Literal["mae", "mse", "psnr", "ssim", "lpips", "lpips_alex"]] = field(  # measured between predicted and true frames
        default_factory=lambda: ["mae", "mse", "psnr", "ssim", "lpips"]
    )
    best_of: list[int] = field(default_factory=list)  # sizes of the best-of-N curve
    reject_repeats: int = 0  # so many new tries for a clip that repeats its last frame; a row of its own for `before`
    shown: int = 4  # clips in the report
    bf16: bool = False
    headline: Literal["mae", "mse", "psnr", "ssim", "lpips", "lpips_alex"] = "lpips"  # the metric of the summary
    uses: ClassVar[tuple[str, ...]] = ("models", "data")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "n", "runs")
        if self.headline not in self.metrics:
            raise ValueError(f"headline: '{self.headline}' is not in metrics")


@dataclass(frozen=True)
class VideoReal2Sim:
    """Policies of graded skill, tried inside world models and in the true simulator: do the two agree on who is better?"""

    kind: Literal["video-real2sim"]
    name: str
    models: list[str]  # the stages whose world models are tried
    data: str  # the video-tokens stage
    tasks: list[str] = field(default_factory=lambda: ["push", "open", "close"])  # of the table-top scene
    policies: list[str] = field(default_factory=lambda: ["scripted", "noisy", "weak", "random"])  # whose success rates are compared
    episodes: int = 30  # initial frames of each task
    frames: int = 24  # of an episode
    top_k: int = 100  # tokens to sample from
    repetition_penalty: float = 1.0  # the publication has 1.2 here
    first_seed: int = 900_000
    truth: str | None = None  # JSON of true success rates, for machines without the simulator
    bf16: bool = False
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    uses: ClassVar[tuple[str, ...]] = ("models", "data")
    even: ClassVar[tuple[str, ...]] = ("episodes",)

    def __post_init__(self) -> None:
        positive(self, "episodes", "frames")


VideoStage = VideoData | VideoTokenizerTraining | VideoTokens | VideoSupervised | VideoReinforce | VideoEvaluate | VideoReal2Sim
