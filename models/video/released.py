"""Tokenizer weights of the public releases (rt1-frame-tokenizer, rt1-compressive-tokenizer): read by name, checked against their config.

Our parameter names are theirs, so the map is short; what a release keeps beside the parameters is listed here. Not run on the
released files themselves, which could not be had: the names were checked against the public code and the diffusers library.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .config import RT1_COMPRESSIVE, RT1_FRAME, TokenizerConfig
from .tokenizer import VideoTokenizer, build_tokenizer

CONSTANTS = ("quantize.", "dynamics_quantize.")  # the quantisers' tables, which follow from the levels
OLD_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}  # attention before diffusers 0.18


def tokenizer_config(told: dict[str, Any], height: int = 256, width: int = 320) -> TokenizerConfig:
    """Our settings from a release's config.json; a setting that we would compute differently is refused by name."""
    compressive = "patch_size" in told or "num_dyn_embeddings" in told
    base = RT1_COMPRESSIVE if compressive else RT1_FRAME
    wanted = {"act_fn": "silu", "norm_type": "group", "in_channels": 3, "out_channels": 3, "context_length": 1}
    for key, value in wanted.items():
        if told.get(key, value) != value:
            raise ConfigError(f"config.json: {key} = {told[key]!r} is not built here, only {value!r}")
    resnets = int(told.get("layers_per_block", base.encoder_resnets))
    return replace(
        base,
        height=height,
        width=width,
        channels=list(told.get("block_out_channels", base.channels)),
        latent=int(told.get("latent_channels", base.latent)),
        groups=int(told.get("norm_num_groups", base.groups)),
        encoder_resnets=resnets,
        decoder_resnets=resnets + 1 if compressive else resnets,
        patch=int(told.get("patch_size", base.patch)),
    )


def rename(name: str) -> str | None:
    """A release's parameter name as ours, or None for what is no parameter here."""
    if name.startswith(CONSTANTS):
        return None
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def load_released(folder: Path, height: int = 256, width: int = 320) -> VideoTokenizer:
    """The tokenizer in a release's folder; every parameter must be there with its shape, and none may be left over."""
    from safetensors.torch import load_file

    config = tokenizer_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), height, width)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no .safetensors file; convert the release's weights to safetensors first")
    found = {new: tensor for file in files for name, tensor in load_file(file).items() if (new := rename(name)) is not None}
    model = build_tokenizer(config)
    own = model.state_dict()
    for name in sorted(own.keys() ^ found.keys()):
        raise ConfigError(f"{folder}: {name} is {'missing from the file' if name in own else 'in the file but not in the tokenizer'}")
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise ConfigError(f"{folder}: {name} has shape {list(tensor.shape)}, the configuration asks for {list(own[name].shape)}")
    model.load_state_dict(found)
    return model.eval()
