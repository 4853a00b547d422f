"""The families of decoders and their Hugging Face form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import read_json
from ..config import ModelConfig
from .base import Family, from_hf, hf_names, parameter_names, read_rope, to_hf, write_rope
from .gemma import GEMMA3
from .glm import GLM, read_chatglm_config
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GLM, GEMMA3)
}

__all__ = [
    "FAMILIES",
    "Family",
    "from_hf",
    "hf_names",
    "parameter_names",
    "read_config",
    "read_hf_config",
    "to_hf",
    "write_hf_config",
]


def read_config(folder: str | Path) -> ModelConfig:
    """Our config of a Hugging Face folder, or of a config file by itself."""
    path = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    hf = read_json(path)
    if hf is None:
        raise ConfigError(f"{path}: missing")
    return read_hf_config(hf, str(path))


def read_hf_config(hf: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Our config from the contents of a config.json."""
    if not isinstance(hf, dict):
        raise ConfigError(f"{source}: must hold a JSON object, not a {type(hf).__name__}")
    kind, packed = hf.get("model_type"), hf.get("quantization_config")
    if packed is not None:
        how = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise ConfigError(
            f"{source}: quantization_config: {how or 'quantised'} weights cannot be trained; name the folder before "
            "quantization"
        )
    try:
        if kind == "chatglm":
            return read_chatglm_config(hf)
        if kind == "gemma3":
            raise ValueError("model_type: 'gemma3' reads pictures too; only its text model, gemma3_text, is supported")
        if kind not in FAMILIES:
            raise ValueError(f"model_type: '{kind}' is not supported ({', '.join(FAMILIES)} and chatglm are)")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act: '{hf['hidden_act']}' is not supported (silu is)")
        heads = int(hf["num_attention_heads"])
        common: dict[str, Any] = {
            "layers": int(hf["num_hidden_layers"]),
            "hidden": int(hf["hidden_size"]),
            "heads": heads,
            "kv_heads": int(hf.get("num_key_value_heads") or heads),
            "head_dim": int(hf.get("head_dim") or hf["hidden_size"] // heads),
            "ffn": int(hf["intermediate_size"]),
            "vocab": int(hf["vocab_size"]),
            "max_positions": int(hf["max_position_embeddings"]),
            "norm_eps": float(hf["rms_norm_eps"]),
            "tied": bool(hf.get("tie_word_embeddings", False)),
            "init_std": float(hf.get("initializer_range", 0.02)),
        }
        return ModelConfig(**{"family": kind, **common, **read_rope(hf), **FAMILIES[kind].read(hf)})
    except KeyError as error:
        raise ConfigError(f"{source}: the key {error} is missing") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source}: {error.args[0]}") from error


# what a folder of a family has or lacks, whatever is wished for
_OF_FAMILY = ("block", "experts", "qkv_bias", "qk_norm", "rotary_fraction", "rotary_interleaved")


def write_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The contents of config.json; a model that it would describe as another is refused."""
    family = FAMILIES[config.family]
    act = {} if config.block == "gemma" else {"hidden_act": "silu"}
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **act,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        **write_rope(config),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "torch_dtype": dtype,
        **family.write(config),
    }
    read = read_hf_config(written)
    for name in _OF_FAMILY:
        ours, theirs = getattr(config, name), getattr(read, name)
        if ours != theirs:
            raise ConfigError(
                f"model.{name}: is {ours}, but models of model.family: {config.family} have {theirs}; change one"
            )
    return written
