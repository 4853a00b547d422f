"""Stand-ins for the released video checkpoints, with fresh weights and reduced width: `python -m
terrella.launch.released FOLDER`.

The folders have the release's layout and names, so that a recipe can be rehearsed before the real ones are there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from ..core.errors import ConfigError
from ..rl.video.config import VideoEnvironment
from . import recipe as recipes

RECIPES = {"video-rt1": ("rt1-compressive-tokenizer", "multi"), "video-rt1-single": ("rt1-frame-tokenizer", "single")}


def stand_ins(name: str, folder: Path, divide: int, layers: int, overrides: tuple[str, ...] = ()) -> list[str]:
    """The tokenizer and both world models of a recipe, `divide` times narrower; gives the settings that fit them."""
    import torch

    from ..models.video.released import write_tokenizer, write_transformer
    from ..models.video.tokenizer import build_tokenizer

    kept, step = RECIPES[name]
    whole = recipes.load(name, overrides)
    assert isinstance(whole.env, VideoEnvironment)
    t, model = whole.env.tokenizer, whole.model.sizes
    for what, width in [
        ("groups", t.groups),
        ("latent", t.latent),
        ("head_dim", model.head_dim),
        *(("channels", c) for c in t.channels),
    ]:
        if width % divide:
            raise ConfigError(f"--divide {divide} does not divide {what} ({width})")
    narrow = replace(
        t, channels=[c // divide for c in t.channels], groups=t.groups // divide, latent=t.latent // divide
    )
    small = replace(
        model, layers=layers, hidden=model.hidden // divide, head_dim=model.head_dim // divide, ffn=model.ffn // divide
    )
    torch.manual_seed(0)
    write_tokenizer(build_tokenizer(narrow), folder / kept)
    layout = whole.env.layout
    for seed, arm in enumerate(("base", "rlvr")):
        where = folder / f"rt1-world-model-{step}-step-{arm}"
        write_transformer(replace(small, vocab=layout.vocab), layout.bos, layout.eos, where, seed)
    settings = {f"env.tokenizer.{key}": getattr(narrow, key) for key in ("channels", "groups", "latent")}
    settings |= {f"model.{key}": getattr(small, key) for key in ("layers", "hidden", "head_dim", "ffn")}
    return [f"{key}={value}" for key, value in settings.items()]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m terrella.launch.released", description="Write stand-ins for the released video checkpoints."
    )
    parser.add_argument("folder", type=Path, help="where to; one folder for each checkpoint")
    parser.add_argument(
        "--divide", type=int, default=16, help="how many times narrower than the release; default %(default)s"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers of the world models; default %(default)s")
    given = parser.parse_args(words)
    try:
        for name in RECIPES:
            kept, step = RECIPES[name]
            settings = stand_ins(name, given.folder, given.divide, given.layers)
            settings.append(f"stages.tokenizer.released={given.folder / kept}")
            arms = {"pretrain": "base", "rlvr": "rlvr"}
            settings += [
                f"stages.{s}.folder={given.folder / f'rt1-world-model-{step}-step-{arm}'}" for s, arm in arms.items()
            ]
            print(f"terrella train {name}-released " + " ".join(f"--set '{s}'" for s in settings))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
