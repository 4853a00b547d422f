"""Imagined clips: the world model continues a clip by given actions; predictions are decoded and compared with what
happened.

Shapes: B clips, T predicted frames, N codes of a frame, L tokens, 3 x H x W pictures in [0, 1].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...data.trajectory import Invalid
from ...data.video_layout import VideoLayout
from ...models.video.tokenizer import Codes, CompressiveTokenizer, ContextCache, VideoTokenizer
from ..rewards.video import Aggregate, Metric, frame_metrics, video_reward
from ..rollout.sampler import Forced, Sample

DECODE_BATCH = 64  # clips decoded at once


@dataclass(frozen=True)
class ClipTask:
    """A true clip: its tokens and the pixels of the frames to predict."""

    prompt_id: int
    row_L: np.ndarray
    truth_THW3: np.ndarray  # uint8
    given_HW3: np.ndarray  # the last frame that was given, uint8


@dataclass(frozen=True)
class Scored:
    """What was predicted, and how good it is. `codes_BTN` begins with the last given frame."""

    pictures_BT3HW: torch.Tensor
    codes_BTN: torch.Tensor
    metrics: dict[str, torch.Tensor]  # [B, T] each


class ClipDecoder:
    """Rows of tokens to pictures, by the frozen tokenizer."""

    def __init__(self, tokenizer: VideoTokenizer, layout: VideoLayout, bf16: bool = False) -> None:
        self.tokenizer, self.layout, self.bf16 = tokenizer, layout, bf16
        self.device = next(tokenizer.parameters()).device

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @torch.no_grad()
    def pictures(self, rows_BL: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(pictures of the predicted frames, codes from the last given frame on). Sampled ids that are no frame
        codes are clamped.
        """
        codes_BTN = torch.from_numpy(self.layout.take(rows_BL, "frame", clamp=True)).to(self.device)[
            :, self.layout.history - 1 :
        ]
        out = []
        with self.autocast():
            cache, row_of = self._context(rows_BL)
            for start in range(0, len(rows_BL), DECODE_BATCH):
                part = slice(start, start + DECODE_BATCH)
                held = None
                if cache is not None:
                    held = ContextCache(cache.picture_B3HW[row_of[part]], cache.features[row_of[part]])
                out.append(self.tokenizer.detokenize(Codes(codes_BTN[part, 1:]), held).float())
        return torch.cat(out), codes_BTN

    def _context(self, rows_BL: np.ndarray) -> tuple[ContextCache | None, torch.Tensor]:
        """The contexts' features, each made once however many samples share it."""
        if not isinstance(self.tokenizer, CompressiveTokenizer):
            return None, torch.zeros(0, dtype=torch.int64)
        context, row_of = np.unique(self.layout.take(rows_BL, "context"), axis=0, return_inverse=True)
        parts = [
            self.tokenizer.context_cache(torch.from_numpy(context[i : i + DECODE_BATCH]).to(self.device))
            for i in range(0, len(context), DECODE_BATCH)
        ]
        cache = ContextCache(torch.cat([p.picture_B3HW for p in parts]), torch.cat([p.features for p in parts]))
        return cache, torch.from_numpy(row_of.reshape(-1)).to(self.device)

    @torch.no_grad()
    def score(self, rows_BL: np.ndarray, truths: Sequence[np.ndarray], names: tuple[Metric, ...]) -> Scored:
        """Pictures of the rows and their metrics against the true frames."""
        pictures, codes = self.pictures(rows_BL)
        metrics: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for start in range(0, len(rows_BL), DECODE_BATCH):
            true = to_pictures(np.stack(truths[start : start + DECODE_BATCH]), self.device)
            for name, value in frame_metrics(pictures[start : start + DECODE_BATCH], true, names).items():
                metrics[name].append(value)
        return Scored(pictures, codes, {name: torch.cat(parts) for name, parts in metrics.items()})


@dataclass
class Judge:
    """The reward of imagined clips: those that are judged together are decoded and compared at the first question."""

    decoder: ClipDecoder
    weights: Mapping[str, float]
    aggregate: Aggregate = "mean"
    repetition_penalty: float = 0.0
    seconds: float = 0.0
    pictures: int = 0
    one: threading.Lock = field(default_factory=threading.Lock)  # steps that are sampled ahead share a judge

    def ask(self, group: Sequence[ImaginedClip]) -> None:
        """Score the samples of one clip, but for those that the sampler lost."""
        sampled = [member for member in group if member.sample is not None]
        with self.one:
            start = time.monotonic()
            self._score(sampled)
            self.seconds += time.monotonic() - start
            self.pictures += len(sampled) * self.decoder.layout.horizon

    def _score(self, group: list[ImaginedClip]) -> None:
        """The samples of one clip, decoded by themselves: in a batch with others their last digits would depend on how
        many ranks there are and which samples came first, and an advantage is made of little more than last digits."""
        names: tuple[Any, ...] = tuple(name for name, weight in self.weights.items() if weight)
        rows = np.array([m.row() for m in group], np.int64)
        scored = self.decoder.score(rows, [m.task.truth_THW3 for m in group], names)
        rewards = video_reward(
            scored.metrics, self.weights, self.aggregate, scored.codes_BTN, self.repetition_penalty
        ).tolist()
        repeats = (scored.codes_BTN[:, -1] == scored.codes_BTN[:, -2]).all(-1).tolist()
        means = {name: value.mean(1).tolist() for name, value in scored.metrics.items()}
        for i, member in enumerate(group):
            member.reward = rewards[i]
            member.info = {"repeats": repeats[i], **{name: values[i] for name, values in means.items()}}


class ImaginedClip:
    """One sample of one clip: the given part is the prompt, actions are forced between the predicted frames."""

    scored_together = True  # pictures are decoded by the dozen

    def __init__(self, task: ClipTask, sample_index: int, layout: VideoLayout, judge: Judge | None) -> None:
        self.task, self.prompt_id, self.sample_index, self.layout, self.judge = (
            task,
            task.prompt_id,
            sample_index,
            layout,
            judge,
        )
        self.forced: Forced = layout.forced(task.row_L)
        self.sample: Sample | None = None
        self.reward: float | None = None
        self.info: dict[str, Any] = {}
        self.group: Sequence[ImaginedClip] = (self,)  # the samples that it is judged with

    def context(self) -> tuple[int, ...] | None:
        return self.layout.prompt_ids(self.task.row_L) if self.sample is None else None

    def receive(self, sample: Sample) -> None:
        self.sample = sample

    def row(self) -> list[int]:
        """The clip's tokens with the predictions in them."""
        assert self.sample is not None
        return [*self.layout.prompt_ids(self.task.row_L), *self.sample.ids]

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        if self.judge is not None and self.reward is None:
            self.judge.ask(self.group)
        if self.reward is None:
            return [], Invalid("the clip was not judged"), {}
        return [], self.reward, self.info


def judge_by_clip(samples: Sequence[ImaginedClip]) -> None:
    """Have the samples of a clip judged together."""
    groups: dict[int, list[ImaginedClip]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
        sample.group = groups[sample.prompt_id]


def to_pictures(frames: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """uint8 [..., H, W, 3] to float [..., 3, H, W] in [0, 1]."""
    x = torch.from_numpy(np.ascontiguousarray(frames)).to(device, non_blocking=True)
    return x.movedim(-1, -3).float() / 255.0


def to_frames(pictures: torch.Tensor) -> np.ndarray:
    """The way back, rounded."""
    return (pictures.clamp(0, 1) * 255.0).round().to(torch.uint8).movedim(-3, -1).cpu().numpy()
