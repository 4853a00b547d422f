"""What the video stages share: episodes of a data stage, its tokenizer, and token clips with the pixels they stand for."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.files import read_json
from ...data.shards import ShardSet
from ...data.video_actions import RT1_RANGES, ActionBins, quantile_ranges
from ...data.video_layout import VideoLayout
from ...models.video.tokenizer import VideoTokenizer
from ...models.video.training import load_tokenizer
from ...rl.video.clips import ClipPlace, Episodes
from ...rl.video.imagine import ClipTask
from ...rl.worlds.tabletop import ACTION_RANGES
from ..job import Job
from ..settings.video import VideoData, VideoSettings, VideoTokens

Split = Literal["train", "heldout"]
WEIGHTS = "tokenizer.safetensors"
ACTIONS = "actions.json"
QUANTILE_EPISODES = 2000


def settings(job: Job) -> VideoSettings:
    """The recipe's video section."""
    assert job.recipe.video is not None, "a recipe of video stages has a video section"
    return job.recipe.video


def device() -> torch.device:
    """Where this rank decodes pictures: beside its engine."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def episodes(job: Job, stage: str, split: Split) -> Episodes:
    """A data stage's episodes."""
    found = next(s for s in job.recipe.stages if s.name == stage)
    if not isinstance(found, VideoData):
        raise ConfigError(f"stages: '{stage}' is no video-data stage")
    if found.shards is not None:
        return Episodes(found.shards, every=found.heldout_every, heldout=split == "heldout")
    return Episodes(job.stage_folder(stage) / split)


def tokenizer(job: Job, stage: str) -> VideoTokenizer:
    """A tokenizer stage's result, frozen."""
    return load_tokenizer(settings(job).tokenizer, job.stage_folder(stage) / WEIGHTS, device())


def action_bins(job: Job, data: str, tokens: str | None = None) -> ActionBins:
    """The bins of the recipe; measured ones are kept by the stage that made the tokens."""
    chosen = settings(job)
    if chosen.actions == "quantiles":
        held = read_json(job.stage_folder(tokens) / ACTIONS) if tokens else None
        if held is None:
            train = episodes(job, data, "train")
            some = [train.actions(i, range(train.length(i))) for i in range(min(len(train), QUANTILE_EPISODES))]
            held = quantile_ranges(np.concatenate(some))
        return ActionBins(tuple((float(a), float(b)) for a, b in held), chosen.action_bins)
    if chosen.actions == "rt1":
        return ActionBins(RT1_RANGES, chosen.action_bins, single=True)
    return ActionBins(ACTION_RANGES, chosen.action_bins)


class TokenClips:
    """The clips of a tokens stage, and the true frames behind them."""

    def __init__(self, job: Job, stage: str, split: Split) -> None:
        found = next(s for s in job.recipe.stages if s.name == stage)
        if not isinstance(found, VideoTokens):
            raise ConfigError(f"stages: '{stage}' is no video-tokens stage")
        self.stage = found
        self.layout: VideoLayout = settings(job).layout
        self.shards = ShardSet(job.stage_folder(stage) / split)
        self.episodes = episodes(job, found.data, split)

    def __len__(self) -> int:
        return len(self.shards)

    def place(self, sample: dict[str, Any]) -> ClipPlace:
        told = sample["meta.json"]
        return ClipPlace(told["episode"], told["start"], told["context"])

    def task(self, number: int, prompt_id: int) -> ClipTask:
        """A clip with the pixels that its predictions are compared with."""
        sample = self.shards[number]
        place, history = self.place(sample), self.layout.history
        wanted = range(place.start + history - 1, place.start + self.layout.frames)
        pixels = self.episodes.frames(place.episode, wanted)
        return ClipTask(prompt_id, sample["tokens.npy"].astype(np.int64), pixels[1:], pixels[0])
