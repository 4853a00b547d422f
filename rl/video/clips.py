"""Clips out of video shards: which frames a clip has, and their pixels, decoding no more than is asked for.

Shapes: T frames, H x W x 3 uint8.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.rng import fold, uniform
from ...data.convert.npz import episode_sample
from ...data.pictures import decode_picture
from ...data.schema import VIDEO
from ...data.shards import ShardSet, ShardWriter
from .config import TRAINING_REACH

CACHE_BYTES = 2 << 30  # decoded episodes that are kept


@dataclass(frozen=True)
class ClipPlace:
    """Where a clip lies: an episode, its first frame, and the context frame (-1 where there is none)."""

    episode: int
    start: int
    context: int = -1


class Episodes:
    """Video episodes by number: those of a folder, or every n-th of it (`every`) or the rest (`heldout=False`)."""

    def __init__(self, folder: str | Path, *, every: int = 0, heldout: bool = False) -> None:
        self.shards = ShardSet(folder, decode=False)
        numbers = range(len(self.shards))
        self.numbers = [i for i in numbers if not every or (i % every == 0) == heldout]
        self._kept: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}
        self._room = CACHE_BYTES

    def __len__(self) -> int:
        return len(self.numbers)

    def raw(self, episode: int) -> dict[str, bytes]:
        return self.shards[self.numbers[episode]]

    def length(self, episode: int) -> int:
        if episode not in self._lengths:
            self._lengths[episode] = len(_pictures(self.raw(episode)))
        return self._lengths[episode]

    def frames(self, episode: int, wanted: Sequence[int]) -> np.ndarray:
        """Frames by number; beyond the end the last one is repeated. While there is room, whole episodes are decoded
        and kept.
        """
        if episode not in self._kept:
            raw = self.raw(episode)
            names = _pictures(raw)
            if self._room <= 0:
                return np.stack([decode_picture(raw[names[min(i, len(names) - 1)]]) for i in wanted])
            self._kept[episode] = np.stack([decode_picture(raw[name]) for name in names])
            self._room -= self._kept[episode].nbytes
        kept = self._kept[episode]
        return kept[np.minimum(np.asarray(wanted), len(kept) - 1)]

    def actions(self, episode: int, wanted: Sequence[int]) -> np.ndarray:
        """Actions by number, the last one repeated likewise; [T, A]."""
        raw = self.raw(episode)
        if "actions.npy" not in raw:
            raise ValueError(
                f"{raw['__key__']}: the episode has no actions.npy; an action-conditioned model needs them"
            )
        actions = np.load(io.BytesIO(raw["actions.npy"]), allow_pickle=False)
        return actions[np.minimum(np.asarray(wanted), len(actions) - 1)]


def copy_small(source: Episodes, numbers: Sequence[int], folder: Path, side: int, most: int) -> None:
    """Copies of some episodes, cut to `most` frames of `side` x `side` pixels, as shards."""
    with ShardWriter(folder, kind=VIDEO) as writer:
        for number in numbers:
            steps = range(min(source.length(number), most))
            frames = source.frames(number, steps)
            rows, columns = (np.arange(side) * size // side for size in frames.shape[1:3])
            instruction = source.raw(number).get("instruction.txt")
            small = episode_sample(
                {"image": frames[:, rows][:, :, columns]},
                source.actions(number, steps),
                None if instruction is None else instruction.decode("utf-8"),
            )
            writer.write(small, key=f"{number:08d}")


def _pictures(raw: dict[str, bytes]) -> list[str]:
    names = sorted(name for name in raw if name.startswith("frames."))
    if names == ["frames.mp4"] or not names:
        raise ValueError(f"{raw.get('__key__')}: frames must be pictures (png, jpg, webp)")
    return names


def draw_place(episodes: Episodes, key: tuple[int, ...], frames: int, context_reach: int | None) -> ClipPlace:
    """A clip by chance: an episode, a start, and a context frame at most `context_reach` frames before it."""
    return place_in(episodes, int(uniform(*key, 0) * len(episodes)), key, frames, context_reach)


def place_in(
    episodes: Episodes, episode: int, key: tuple[int, ...], frames: int, context_reach: int | None
) -> ClipPlace:
    """A clip of this episode by chance."""
    room = max(episodes.length(episode) - frames, 0)
    start = int(uniform(*key, 1) * (room + 1))
    if context_reach is None:
        return ClipPlace(episode, start)
    first = max(start - context_reach, 0)
    return ClipPlace(episode, start, first + int(uniform(*key, 2) * (start - first + 1)))


def training_clip(
    episodes: Episodes, seed: int, number: int, frames: int, context: bool, window: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """(frames, context frame) for tokenizer training. With `window` the context is a window's first frame and the
    frames are drawn from the rest of it, so that none is the context itself; without, the frames follow each other.
    `VideoTokenizerTraining.context_distances` says how far they lie behind it."""
    key = (fold(seed, number),)
    if not window:
        place = draw_place(episodes, key, frames, TRAINING_REACH if context else None)
        taken = episodes.frames(place.episode, range(place.start, place.start + frames))
        return taken, episodes.frames(place.episode, [place.context])[0] if context else None
    place = draw_place(episodes, key, window, None)
    later = sorted(range(1, window), key=lambda i: uniform(*key, 3, i))[:frames]
    taken = episodes.frames(place.episode, [place.start + i for i in [0, *sorted(later)]])
    return taken[1:], taken[0] if context else None
