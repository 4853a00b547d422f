"""What stages of video leave for others: episodes, a trained tokenizer, action bins, and token clips with the pixels
behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.files import read_json
from ...data.shards import ShardSet
from ...data.video_actions import RT1_RANGES, ActionBins, quantile_ranges
from ...models.video.tokenizer import VideoTokenizer
from ...models.video.training import load_tokenizer
from ..environment import Split
from ..language_tasks import Made
from .clips import Episodes
from .config import VideoEnvironment
from .imagine import ClipTask

WEIGHTS = "tokenizer.safetensors"
ACTIONS = "actions.json"
QUANTILE_EPISODES = 2000
FOLDERS: dict[Split, str] = {"train": "train", "test": "heldout"}  # of a stage's shards


def device() -> torch.device:
    """Where this rank decodes pictures: beside its engine."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def episodes_of(settings: VideoEnvironment, made: Made, split: Split) -> Episodes:
    """The episodes of a split, recorded or in shards."""
    if settings.shards is not None:
        return Episodes(settings.shards, every=settings.heldout_every, heldout=split == "test")
    return Episodes(made.uses["episodes"].folder / FOLDERS[split])


def frozen_tokenizer(settings: VideoEnvironment, made: Made) -> VideoTokenizer:
    """The result of the video-tokenizer stage."""
    return load_tokenizer(settings.tokenizer, made.uses["tokenizer_stage"].folder / WEIGHTS, device())


def action_bins(settings: VideoEnvironment, made: Made) -> ActionBins:
    """The bins of the recipe; measured ones are kept by the stage that makes the tokens."""
    if settings.actions == "quantiles":
        ranges = read_json(made.folder / ACTIONS)
        if ranges is None:
            train = episodes_of(settings, made, "train")
            some = [train.actions(i, range(train.length(i))) for i in range(min(len(train), QUANTILE_EPISODES))]
            ranges = quantile_ranges(np.concatenate(some))
        return ActionBins(tuple((float(a), float(b)) for a, b in ranges), settings.action_bins)
    if settings.actions == "rt1":
        return ActionBins(RT1_RANGES, settings.action_bins, single=True)
    return ActionBins(settings.table.action_ranges, settings.action_bins)


class Clips(Sequence["Clip"]):
    """The clips that a collect stage made of a split, read when they are asked for; before it has run, one of zeros."""

    def __init__(self, settings: VideoEnvironment, made: Made, split: Split) -> None:
        self.settings, self.layout, self.made = settings, settings.layout, made
        self.split: Split = split

    @cached_property
    def shards(self) -> ShardSet:
        return ShardSet(self.made.folder / FOLDERS[self.split])

    @cached_property
    def episodes(self) -> Episodes:
        """The true frames."""
        return episodes_of(self.settings, self.made, self.split)

    @cached_property
    def numbers(self) -> range:
        """The clips of this part: whole episodes, so that two parts share none."""
        if not self.made.finished:
            return range(1)
        count, each = len(self.shards), max(self.settings.clips_per_episode, 1)
        if self.split == "test" or self.settings.train_part == (0.0, 1.0):
            return range(count)
        low, high = (round(share * (count // each)) * each for share in self.settings.train_part)
        return range(low, high)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return Clip(self, self.numbers[at])


@dataclass(frozen=True)
class Clip:
    """A true clip. An evaluation compares predictions with it itself, without the reward of RL."""

    source: Clips
    number: int
    rewarded: bool = True

    @cached_property
    def _sample(self) -> dict[str, Any]:
        return self.source.shards[self.number]

    @cached_property
    def row_L(self) -> np.ndarray:
        """Its tokens."""
        layout = self.source.layout
        if not self.source.made.finished:
            sizes = (layout.frames, layout.frame_tokens), (layout.frames, layout.action_dims), (layout.context_tokens,)
            frames, actions, context = (np.zeros((1, *size), np.int64) for size in sizes)
            return layout.assemble(frames, actions, context if layout.context_tokens else None)[0]
        row = self._sample["tokens.npy"].astype(np.int64)
        if len(row) != layout.total:
            raise ConfigError(
                f"env: its clips have {layout.total} tokens, those of stage '{self.source.made.name}' {len(row)}"
            )
        return row

    @cached_property
    def _pixels(self) -> np.ndarray:
        place, layout = self._sample["meta.json"], self.source.layout
        wanted = range(place["start"] + layout.history - 1, place["start"] + layout.frames)
        return self.source.episodes.frames(place["episode"], wanted)

    def task(self, prompt_id: int) -> ClipTask:
        """The clip with the pixels that its predictions are compared with."""
        return ClipTask(prompt_id, self.row_L, self._pixels[1:], self._pixels[0])
