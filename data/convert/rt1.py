"""RT-1 episodes (OXE fractal20220817_data) from TFDS's TFRecord files, without TensorFlow. Frames keep their encoded
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ..schema import VIDEO
from ..tfrecord import Feature, parse_example, read_records
from .base import Item

# the 13 numbers of an action: the parts in alphabetical order
ACTION_PARTS = {
    "base_displacement_vector": 2,
    "base_displacement_vertical_rotation": 1,
    "gripper_closedness_action": 1,
    "rotation_delta": 3,
    "terminate_episode": 3,
    "world_vector": 3,
}
INSTRUCTION = "steps/observation/natural_language_instruction"
_SIGNATURES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"))


def episode(features: dict[str, Feature], image: str = "image") -> dict[str, Any]:
    """The sample of one RLDS episode."""
    name = f"steps/observation/{image}"
    frames = features.get(name)
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"no {name}; the record holds {', '.join(sorted(features)[:8])}")
    suffix = next((s for mark, s in _SIGNATURES if frames[0].startswith(mark)), None)
    if suffix is None:
        raise ValueError("frames are neither PNG nor JPEG")
    columns = []
    for part, width in ACTION_PARTS.items():
        values = features.get(f"steps/action/{part}")
        if not isinstance(values, np.ndarray) or values.size != width * len(frames):
            raise ValueError(f"action part {part}: expected {width} numbers for each of {len(frames)} steps")
        columns.append(values.reshape(len(frames), width).astype(np.float32))
    height, width, channels = picture_shape(frames[0])
    meta = {
        "schema": VIDEO,
        "frames": len(frames),
        "shape": [height, width, channels],
        "dtype": "uint8",
        "views": [image],
    }
    sample: dict[str, Any] = {"meta.json": {**meta, "source": "rt1"}}
    sample |= {f"frames.{i:04d}.{suffix}": frame for i, frame in enumerate(frames)}
    sample["actions.npy"] = np.concatenate(columns, axis=1)
    given = features.get(INSTRUCTION)
    if isinstance(given, list) and given:
        sample["instruction.txt"] = given[0].decode("utf-8")
    return sample


def picture_shape(data: bytes) -> tuple[int, int, int]:
    """Height, width and channels from a PNG's or JPEG's header."""
    if data.startswith(b"\x89PNG"):
        channels = {0: 1, 2: 3, 4: 2, 6: 4}.get(data[25], 0)
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), channels
    at = 2
    while at + 9 < len(data):
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return (
                int.from_bytes(data[at + 5 : at + 7], "big"),
                int.from_bytes(data[at + 7 : at + 9], "big"),
                data[at + 9],
            )
        at += 2 + size
    raise ValueError("a JPEG without a frame header")


def read(source: Path, cursor: list[Any] | None, *, image: str = "image") -> Iterator[Item]:
    """Episodes of one TFRecord file or of a folder of them."""
    files = sorted(p for p in source.iterdir() if ".tfrecord" in p.name) if source.is_dir() else [source]
    if not files:
        raise ConfigError(f"{source}: no .tfrecord file here")
    at = cursor or ["", 0]
    for number, path in enumerate(files):
        if path.name < at[0]:
            continue
        start, size = (at[1] if path.name == at[0] else 0), path.stat().st_size
        for offset, record in read_records(path, start):
            here, where = [path.name, offset], f"{path.name} before byte {offset}"
            done = (number + offset / size) / len(files)
            try:
                sample = episode(parse_example(record), image)
            except (ValueError, LookupError, OverflowError) as error:  # a record that is no Example, a cut picture
                yield Item(here, dropped="not a usable episode", where=f"{where}: {error}", done=done)
                continue
            yield Item(here, sample, where=where, done=done)
