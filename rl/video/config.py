"""Settings of video as an environment: the tokenizer, how a clip becomes a sequence, and what predictions are worth.
Without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from ...data.video_layout import VideoLayout
from ...models.video.config import TokenizerConfig
from ..worlds.tabletop import TASKS, Table
from .policies import SKILLS

Metric = Literal["mae", "mse", "psnr", "ssim", "lpips", "lpips_alex"]
METRICS: tuple[Metric, ...] = get_args(Metric)
TRAINING_REACH = 15  # frames that a context lies before a clip at most, where a tokenizer is trained on whole clips


@dataclass(frozen=True)
class VideoReward:
    """Weights of the metrics between predicted and true frames; similarities count positively, errors negatively."""

    mae: float = 1.0  # weight of the mean absolute error
    mse: float = 0.0  # weight of the mean squared error
    psnr: float = 0.0  # weight of the peak signal-to-noise ratio
    ssim: float = 0.0  # weight of the structural similarity
    lpips: float = 1.0  # VGG
    lpips_alex: float = 0.0  # weight of LPIPS by AlexNet
    # over frames: their mean, the last alone, or later ones discounted
    aggregate: Literal["mean", "last", "discount"] = "mean"
    repetition_penalty: float = 0.0  # taken off when the last frame is repeated
    signed: ClassVar[tuple[str, ...]] = (*METRICS, "repetition_penalty")

    def __post_init__(self) -> None:
        if not any(self.weights.values()):
            raise ValueError("mae: at least one metric needs a weight")

    @property
    def weights(self) -> dict[str, float]:
        """By metric."""
        return {name: getattr(self, name) for name in METRICS}


@dataclass(frozen=True)
class VideoRecording:
    """Episodes to record in the table-top scene."""

    episodes: int  # for training
    heldout_episodes: int  # for evaluation
    frames: int = 24  # of an episode
    # what the recorded policies are asked to do
    tasks: list[str] = field(default_factory=lambda: ["push", "open", "close"])
    # who acts, dealt evenly to the episodes
    policies: list[str] = field(default_factory=lambda: ["scripted", "noisy", "weak", "random"])
    first_seed: int = 100_000
    workers: int = 0  # processes that record; 0 means the stage itself

    def __post_init__(self) -> None:
        if min(self.episodes, self.heldout_episodes, self.frames) <= 0:
            raise ValueError("episodes: must be above 0, as must heldout_episodes and frames")
        if not self.tasks or not self.policies:
            raise ValueError("tasks: name at least one, and at least one of policies")
        for name, known in (("tasks", TASKS), ("policies", SKILLS)):
            unknown = next((one for one in getattr(self, name) if one not in known), None)
            if unknown is not None:
                raise ValueError(f"{name}: '{unknown}' is none of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class VideoEnvironment:
    """A world model of video: given frames and actions in, the codes of the next frames out, decoded and compared
    with what happened.
    """

    kind: Literal["video"]
    episodes: str  # the collect stage that records the episodes, or counts those of `shards`
    tokenizer_stage: str  # the video-tokenizer stage, which trains on their frames
    data: str  # the collect stage that makes their clips into tokens, which are trained and evaluated on
    shards: str | None = None  # a folder of video_episode shards; then nothing is recorded
    heldout_every: int = 100  # of existing shards, every so many-th episode is held out
    recording: VideoRecording | None = None  # the episodes, where there are no shards of them
    frame_stride: int = 1  # table-top: tenths of a second from frame to frame; an action reaches as many times as far
    large_objects: bool = False  # table-top: block, goal and pusher cover about twice the pixels
    clips_per_episode: int = 4  # 0 where nothing is trained
    heldout_clips_per_episode: int = 1  # likewise, of held-out episodes
    # of the training clips, by episode: from which share to which; a stage's own `env` may take another part
    train_part: tuple[float, float] = (0.0, 1.0)
    clips_at_once: int = 16  # encoded together
    tokenizer: TokenizerConfig  # how frames become tokens
    history: int = 1  # frames that are given
    horizon: int = 7  # frames to predict
    # the ranges of the action bins; quantiles are measured on the data
    actions: Literal["rt1", "tabletop", "quantiles"] = "rt1"
    action_dims: int = 13  # numbers of an action
    action_bins: int = 256  # bins that each number is cut into
    context_reach: int = 15  # compressive: the context frame lies at most so many frames before the clip
    reward: VideoReward = field(default_factory=VideoReward)  # what predicted frames are paid for
    bf16: bool = False  # of the tokenizer, where clips are encoded and decoded
    visual_ids_only: bool = False  # sample frame codes alone; the publication does not
    top_k: int = 0  # tokens to sample from; 0 means all of them, as RL needs
    metrics: list[Metric] = field(  # that evaluations measure between predicted and true frames
        default_factory=lambda: ["mae", "mse", "psnr", "ssim", "lpips"]
    )
    headline: Metric = "lpips"  # the metric of an evaluation's summary
    runs: int = 0  # of an evaluation's samples, the first so many are averaged in its table; 0 means all
    best_of: list[int] = field(default_factory=list)  # sizes of the best-of-N curve, at most an evaluation's samples
    # so many new tries for a first sample that repeats its last frame; the table has them in a row of their own
    reject_repeats: int = 0
    shown: int = 4  # clips of an evaluation in the report
    fixed_length: ClassVar[bool] = True  # an answer is as long as its frames have codes
    tasks: ClassVar[str] = "video.tasks:VideoTasks"
    sources: ClassVar[tuple[str, ...]] = ("episodes", "tokenizer_stage", "data")
    making: ClassVar[tuple[str, ...]] = (
        *("episodes", "tokenizer_stage", "shards", "heldout_every", "recording", "tokenizer", "history", "horizon"),
        *("frame_stride", "large_objects"),
        *("actions", "action_dims", "action_bins", "context_reach", "clips_per_episode", "heldout_clips_per_episode"),
    )

    def __post_init__(self) -> None:
        counts = (
            "history",
            "horizon",
            "frame_stride",
            "action_dims",
            "action_bins",
            "heldout_clips_per_episode",
            "clips_at_once",
        )
        for name in counts:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0")
        if self.clips_per_episode < 0:
            raise ValueError(f"clips_per_episode: {self.clips_per_episode} must not be negative")
        if self.shards is None and self.recording is None:
            raise ValueError("recording: name the episodes to record, or shards for a folder of them")
        low, high = self.train_part
        if not 0 <= low < high <= 1:
            raise ValueError(f"train_part: [{low:g}, {high:g}] must lie between 0 and 1, the smaller first")
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")
        wanted = {"rt1": 13, "tabletop": 3}.get(self.actions, self.action_dims)
        if self.action_dims != wanted:
            raise ValueError(f"action_dims: actions of {self.actions} have {wanted} numbers")
        if self.actions != "tabletop" and (self.frame_stride > 1 or self.large_objects):
            name = "frame_stride" if self.frame_stride > 1 else "large_objects"
            raise ValueError(f"{name}: belongs to the table-top scene; actions is {self.actions}")
        if self.headline not in self.metrics:
            raise ValueError(f"headline: '{self.headline}' is not in metrics")
        if 0 in self.best_of:
            raise ValueError("best_of: the best of 0 samples is none; sizes are 1 or more")

    @property
    def table(self) -> Table:
        """The table-top scene, where it is what is filmed."""
        return Table(self.tokenizer.height, self.tokenizer.width, self.frame_stride, self.large_objects)

    @property
    def context_distances(self) -> range:
        """How many frames behind their context frame those of the clips may lie."""
        most = self.context_reach + self.history + self.horizon
        return range(most if self.recording is None else min(most, self.recording.frames))

    @property
    def layout(self) -> VideoLayout:
        """The token layout that follows from these settings: tokens are codes, and have no text."""
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
