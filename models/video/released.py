"""Video checkpoints in the layout of the public release: tokenizers as diffusers writes them, world models as
transformers does.

Our parameter names are the release's, so weights move by name; its `config.json` is read and every tensor's name and
shape is checked. The writers make folders of the same layout at any width, for tests and rehearsals and for the
release's own tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.files import load_tensors, make_folder, read_json, save_tensors, write_json
from ..config import ModelConfig
from ..folder import open_safetensors
from .config import LEVELS, RT1_COMPRESSIVE, RT1_FRAME, TokenizerConfig
from .tokenizer import VideoTokenizer, build_tokenizer

WEIGHTS = "diffusion_pytorch_model.safetensors"
# tables that follow from the levels
CONSTANTS = re.compile(r"(dynamics_)?quantize\.(_levels|_basis|implicit_codebook)")
# attention before diffusers 0.18
OLD_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
COMPRESSIVE_KEYS = ("vq_fsq_levels", "dyn_fsq_levels", "patch_size", "max_att_resolution")


def tokenizer_config(stated: dict[str, Any], height: int = 256, width: int = 320) -> TokenizerConfig:
    """Our settings from a release's config.json; a setting that we would compute differently is refused by name."""
    compressive = any(key in stated for key in COMPRESSIVE_KEYS)
    base = RT1_COMPRESSIVE if compressive else RT1_FRAME
    channels = list(stated.get("block_out_channels", base.channels))
    wanted: dict[str, Any] = {
        "act_fn": "silu",
        "norm_type": "group",
        "in_channels": 3,
        "out_channels": 3,
        "context_length": 1,
    }
    wanted |= {
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
    }
    if compressive:
        wanted["mid_block_add_attention"] = False
    for key in ("num_vq_embeddings", "num_dyn_embeddings"):
        if key in stated:
            raise ConfigError(
                f"config.json: {key} belongs to a tokenizer with a learnt codebook; only finite scalar quantisation "
                "is built here"
            )
    for key, value in wanted.items():
        if stated.get(key, value) != value:
            raise ConfigError(f"config.json: {key} = {stated[key]!r} is not built here, only {value!r}")
    resnets = int(stated.get("layers_per_block", base.encoder_resnets))
    levels = [
        _levels(stated[key], key) for key in ("fsq_levels", "vq_fsq_levels", "dyn_fsq_levels") if key in stated
    ] or [base.levels]
    if any(other != levels[0] for other in levels):
        raise ConfigError(
            "config.json: vq_fsq_levels and dyn_fsq_levels differ; both quantisers have the same levels here"
        )
    if compressive:
        _check_attention(stated, len(channels))
    return replace(
        base,
        height=height,
        width=width,
        channels=channels,
        latent=int(stated.get("latent_channels", base.latent)),
        groups=int(stated.get("norm_num_groups", base.groups)),
        levels=levels[0],
        encoder_resnets=resnets,
        decoder_resnets=resnets + 1 if compressive else resnets,
        patch=int(stated.get("patch_size", base.patch)),
    )


def _levels(stated: int | list[int], key: str) -> list[int]:
    """The levels of a quantiser: given, or named by the bits of its codebook."""
    if isinstance(stated, int) and stated not in LEVELS:
        raise ConfigError(f"config.json: {key} = {stated} is none of {', '.join(map(str, LEVELS))}")
    return list(LEVELS[stated] if isinstance(stated, int) else stated)


def _check_attention(stated: dict[str, Any], blocks: int) -> None:
    """The frames' encoder attends to the context wherever the picture is small enough; here that is after its last
    two blocks.
    """
    side, most = int(stated.get("resolution", 256)), int(stated.get("max_att_resolution", 32))
    sides = [side // 2 ** min(i + 1, blocks - 1) for i in range(blocks)]
    if [s <= most for s in sides] != [i >= blocks - 2 for i in range(blocks)]:
        raise ConfigError(
            f"config.json: max_att_resolution = {most} with resolution = {side} attends to the context after blocks "
            f"of {sides}; "
            "only the last two are built here"
        )


def released_config(config: TokenizerConfig) -> dict[str, Any]:
    """The release's config.json for a tokenizer of ours; what that file cannot say is refused."""
    compressive = config.kind == "compressive"
    if config.still or config.decoder_resnets != config.encoder_resnets + compressive:
        raise ConfigError(
            "env.tokenizer: the released layout has no `still`, and "
            f"{'one more resnet' if compressive else 'as many resnets'} "
            "in a decoder's block as in an encoder's"
        )
    blocks = len(config.channels)
    shared: dict[str, Any] = {
        "_class_name": "CompressiveVQModelFSQ" if compressive else "CNNFSQModel256",
        "act_fn": "silu",
        "block_out_channels": config.channels,
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": config.latent,
        "layers_per_block": config.encoder_resnets,
        "norm_num_groups": config.groups,
        "norm_type": "group",
        "resolution": config.height,
    }
    if not compressive:
        return shared | {"fsq_levels": config.levels}
    side = {
        "max_att_resolution": config.grid[0],
        "patch_size": config.patch,
        "context_length": 1,
        "mid_block_add_attention": False,
    }
    return shared | side | {"vq_fsq_levels": config.levels, "dyn_fsq_levels": config.levels}


def rename(name: str) -> str | None:
    """A release's parameter name as ours, or None for what is no parameter here."""
    if CONSTANTS.fullmatch(name):
        return None
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def check_released(folder: Path, wanted: TokenizerConfig) -> None:
    """Refuse a folder that is not the recipe's tokenizer: its config, and the names and shapes of its tensors. Reads
    no weights.
    """
    config = _read_config(folder, wanted.height, wanted.width)
    for field in fields(TokenizerConfig):
        ours, theirs = getattr(wanted, field.name), getattr(config, field.name)
        if (
            field.name != "dropout"
            and ours != theirs
            and not (config.kind == "frame" and field.name in ("patch", "heads"))
        ):
            raise ConfigError(
                f"{folder / 'config.json'}: {field.name} is {theirs}, the recipe's env.tokenizer has {ours}"
            )
    found: dict[str, list[int]] = {}
    for file in _files(folder):
        with open_safetensors(file) as held:
            found |= {
                new: held.get_slice(name).get_shape() for name in held.keys() if (new := rename(name)) is not None
            }
    with torch.device("meta"):
        own = build_tokenizer(config).state_dict()
    for name in sorted(own.keys() ^ found.keys()):
        raise ConfigError(
            f"{folder}: {name} is {'missing from the file' if name in own else 'in the file but not in the tokenizer'}"
        )
    for name, shape in found.items():
        if list(shape) != list(own[name].shape):
            raise ConfigError(
                f"{folder}: {name} has shape {list(shape)}, the configuration asks for {list(own[name].shape)}"
            )


def load_released(folder: Path, height: int = 256, width: int = 320) -> VideoTokenizer:
    """The tokenizer in a release's folder; every parameter must be there with its shape, and none may be left over."""
    config = _read_config(folder, height, width)
    check_released(folder, config)
    model = build_tokenizer(config)
    tensors = {name: tensor for file in _files(folder) for name, tensor in load_tensors(file).items()}
    model.load_state_dict({new: tensor for name, tensor in tensors.items() if (new := rename(name)) is not None})
    return model.eval()


def _read_config(folder: Path, height: int, width: int) -> TokenizerConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: missing; name a folder of the released tokenizer")
    try:
        return tokenizer_config(read_json(path), height, width)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: describes no tokenizer of {height} x {width} pixels: {error}") from error


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{folder}: no .safetensors file; convert the release's weights to safetensors first")
    return found


def write_tokenizer(model: VideoTokenizer, folder: Path) -> None:
    """A tokenizer as a folder of the release's layout."""
    hf_config = released_config(model.config)
    make_folder(folder)
    save_tensors(
        folder / WEIGHTS, {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    )
    write_json(folder / "config.json", hf_config)


def write_transformer(config: ModelConfig, bos: int, eos: int, folder: Path, seed: int = 0) -> None:
    """A transformer of fresh weights as a folder of the release's layout: config.json in its words, one file of fp32
    weights.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator) * config.init_std for name, shape in _transformer_shapes(config)
    }
    tensors = {name: torch.ones_like(tensor) if "norm" in name else tensor for name, tensor in drawn.items()}
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": config.init_std,
        "intermediate_size": config.ffn,
        "max_length": config.max_positions,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    make_folder(folder)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", hf_config)


def _transformer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden, config.ffn
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
            yield f"{prefix}mlp.{name}_proj.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab, hidden)
