"""Video episodes in npz files (`image`, `action`), as the public video releases keep them, and episodes as samples.
Lossless.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ..pictures import encode_webp
from ..schema import VIDEO
from .base import Item

TEST_EVERY = 100
FORMATS = ("png", "webp")


def episode_sample(
    views: dict[str, np.ndarray], actions: np.ndarray | None, instruction: str | None, frames: str = "png", **meta: Any
) -> dict[str, Any]:
    """A video episode: every frame of every view as PNG or WebP, view after view, without loss.

    Whole numbers of 0 to 255 of any type come back as they were.
    """
    first = next(iter(views.values()))
    for name, clip in views.items():
        if clip.ndim != 4 or clip.shape != first.shape:
            raise ValueError(
                f"view {name} has shape {clip.shape}, expected [frames, height, width, channels] like the first view"
            )
        if not np.issubdtype(clip.dtype, np.integer) or clip.min() < 0 or clip.max() > 255:
            raise ValueError(f"view {name}: pixels must be whole numbers of 0 to 255, found {clip.dtype}")
        if clip.dtype != first.dtype:
            raise ValueError(f"view {name} is {clip.dtype}, the first view is {first.dtype}")
    if actions is not None and len(actions) != len(first):
        raise ValueError(f"{len(actions)} actions for {len(first)} frames")
    about = {
        "schema": VIDEO,
        "frames": len(first),
        "shape": list(first.shape[1:]),
        "dtype": first.dtype.name,
        "views": list(views),
        **meta,
    }
    sample: dict[str, Any] = {"meta.json": about}
    pictures = [picture for clip in views.values() for picture in clip.astype(np.uint8)]
    # PNG is left to the writer, which may encode in other processes
    sample |= {f"frames.{i:04d}.{frames}": p if frames == "png" else encode_webp(p) for i, p in enumerate(pictures)}
    if actions is not None:
        sample["actions.npy"] = actions
    if instruction is not None:
        sample["instruction.txt"] = instruction
    return sample


def read(source: Path, cursor: str | None, *, split: str = "all", frames: str = "png") -> Iterator[Item]:
    """Episodes of a file or folder. `split`: all, or train and test where every hundredth file by name is test."""
    if split not in ("all", "train", "test"):
        raise ConfigError(f"split={split!r}: expected all, train or test")
    if frames not in FORMATS:
        raise ConfigError(f"frames={frames!r}: expected one of {', '.join(FORMATS)}")
    files = sorted(source.glob("*.npz")) if source.is_dir() else [source]
    if not files:
        raise ConfigError(f"{source}: no .npz file here")
    for number, path in enumerate(files):
        if cursor is not None and path.name <= cursor:
            continue
        done = (number + 1) / len(files)
        held_out = number % TEST_EVERY == 0
        if split != "all" and held_out != (split == "test"):
            yield Item(path.name, dropped=f"not in the {split} split", where=path.name, done=done)
            continue
        try:
            sample = _load(path, frames)
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            yield Item(path.name, dropped="not a usable episode", where=f"{path.name}: {error}", done=done)
            continue
        yield Item(path.name, sample, key=path.stem.replace(".", "_"), where=path.name, done=done)


def _load(path: Path, frames: str) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as held:
        views = {k: held[k] for k in held.files if k == "image" or k.endswith("_image")}
        if not views:
            raise ValueError(f"no image array; it holds {', '.join(held.files)}")
        actions = held["action"] if "action" in held.files else None
        instruction = str(held["instruction"]) if "instruction" in held.files else None
    return episode_sample(views, actions, instruction, frames, source=path.name)
