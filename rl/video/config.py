"""Settings of video as an environment: the tokenizer, how a clip becomes a sequence, and what predictions are worth.
Without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...data.video_layout import VideoLayout
from ...models.video.config import TokenizerConfig

Metric = Literal["mae", "mse", "psnr", "ssim", "lpips", "lpips_alex"]


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
    signed: ClassVar[tuple[str, ...]] = ("mae", "mse", "psnr", "ssim", "lpips", "lpips_alex", "repetition_penalty")

    def __post_init__(self) -> None:
        if not any(self.weights.values()):
            raise ValueError("mae: at least one metric needs a weight")

    @property
    def weights(self) -> dict[str, float]:
        """By metric."""
        names = ("mae", "mse", "psnr", "ssim", "lpips", "lpips_alex")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class VideoEnvironment:
    """A world model of video: given frames and actions in, the codes of the next frames out, decoded and compared
    with what happened.
    """

    kind: Literal["video"]
    data: str  # the video-tokens stage whose clips are trained and evaluated on
    tokenizer: TokenizerConfig  # how frames become tokens
    history: int = 1  # frames that are given
    horizon: int = 7  # frames to predict
    # the ranges of the action bins; quantiles are measured on the data
    actions: Literal["rt1", "tabletop", "quantiles"] = "rt1"
    action_dims: int = 13  # numbers of an action
    action_bins: int = 256  # bins that each number is cut into
    context_reach: int = 15  # compressive: the context frame lies at most so many frames before the clip
    reward: VideoReward = field(default_factory=VideoReward)  # what predicted frames are paid for
    bf16: bool = False  # of the decoder
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

    def __post_init__(self) -> None:
        for name in ("history", "horizon", "action_dims", "action_bins"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0")
        wanted = {"rt1": 13, "tabletop": 3}.get(self.actions, self.action_dims)
        if self.action_dims != wanted:
            raise ValueError(f"action_dims: actions of {self.actions} have {wanted} numbers")
        if self.headline not in self.metrics:
            raise ValueError(f"headline: '{self.headline}' is not in metrics")

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
