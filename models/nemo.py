"""NeMo 2 checkpoint folders: `weights/` in megatron's distributed checkpoint format, `context/model.yaml` beside it.

nemo-toolkit 3 no longer holds language models, so nothing of it is needed or used here; docs/packages.md says which
folders of version 2.7 were read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from ..core.errors import ConfigError
from ..core.files import make_folder, whole_folder, write_atomic
from .config import ModelConfig, RopeScaling
from .dcp import DistributedTensors
from .families import parameter_names
from .families.base import VOCABULARIES
from .source import Source, one_rank, weight

_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

_ONLY = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "seq_len_interpolation_factor": None,
}  # settings that only come so


def _stacked_key(name: str) -> tuple[str, int | None]:
    """The key under which all layers of a tensor are stacked, and the layer."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return f"module.{name}", None
    inner = ".".join(parts[3:])
    return f"module.decoder.layers.{_FUSED.get(inner, inner)}", int(parts[2])


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """The part of `context/model.yaml` that says what the model is."""
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.norm_eps,
        "rotary_base": config.rope_theta,
        "rotary_percent": config.rotary_fraction,
        "share_embeddings_and_output_weights": config.tied,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "seq_length": config.max_positions,
        "vocab_size": config.vocab,
        **_ONLY,
        **_scaling_settings(config),
    }


def _scaling_settings(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    if scaling.kind != "llama3":
        raise ConfigError(f"rope_scaling: {scaling.kind} is not supported for NeMo folders, which know Llama 3.1's")
    return {
        "scale_factor": scaling.factor,
        "old_context_len": scaling.original_max_positions,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
    }


def read_settings(path: Path, rows: Callable[[], int]) -> ModelConfig:
    """Our config from `context/model.yaml`; tags of Python objects in it are ignored, never executed. Where it leaves
    the vocabulary to a tokenizer, it is as large as the embedding has rows.
    """

    class Plain(yaml.SafeLoader):
        pass

    def as_data(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)  # type: ignore[arg-type]

    Plain.add_multi_constructor("", as_data)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Plain)
        values = tree.get("config", tree)
        return _config_of(values | {"vocab_size": values.get("vocab_size") or rows()}, path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: missing") from error
    except KeyError as error:
        raise ConfigError(f"{path}: the setting {error} is missing") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path}: not the settings of a NeMo model: {' '.join(str(error).split())[:200]}") from error


def _config_of(values: dict[str, Any], path: Path) -> ModelConfig:
    for key, wanted in _ONLY.items():
        if values.get(key, wanted) != wanted:
            raise ConfigError(f"{path}: {key} is {values[key]}, only {wanted} is supported")
    if values.get("num_moe_experts"):
        raise ConfigError(f"{path}: num_moe_experts is not supported for NeMo folders")
    activation = values.get("activation_func")
    if isinstance(activation, dict) and activation.get("_target_") != "torch.nn.functional.silu":
        raise ConfigError(f"{path}: activation_func is {activation.get('_target_')}, only silu is supported")
    heads = int(values["num_attention_heads"])
    family = "qwen3" if values.get("qk_layernorm") else "qwen2" if values.get("add_qkv_bias") else "llama"
    return ModelConfig(
        family=family,
        layers=int(values["num_layers"]),
        hidden=int(values["hidden_size"]),
        heads=heads,
        kv_heads=int(values.get("num_query_groups") or heads),
        head_dim=int(values.get("kv_channels") or values["hidden_size"] // heads),
        ffn=int(values["ffn_hidden_size"]),
        vocab=int(values["vocab_size"]),
        max_positions=int(values["seq_length"]),
        rope_theta=float(values["rotary_base"]),
        rope_scaling=_scaling_of(values),
        rotary_fraction=float(values.get("rotary_percent", 1.0)),
        norm_eps=float(values["layernorm_epsilon"]),
        tied=bool(values.get("share_embeddings_and_output_weights", False)),
        qkv_bias=bool(values.get("add_qkv_bias", False)),
        qk_norm=bool(values.get("qk_layernorm", False)),
    )


def _scaling_of(values: dict[str, Any]) -> RopeScaling | None:
    """That of Llama 3.1 and later, which NeMo keeps in settings of its own."""
    if not values.get("scale_factor"):
        return None
    return RopeScaling(
        "llama3",
        factor=float(values["scale_factor"]),
        original_max_positions=int(values["old_context_len"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
    )


def open_nemo(folder: Path) -> Source:
    """Open a NeMo 2 folder. A tensor's layers are stacked, so what was read once is kept."""

    stored = cache(DistributedTensors(folder / "weights").get)
    config = read_settings(
        folder / "context" / "model.yaml", lambda: stored("module.embedding.word_embeddings.weight").shape[0]
    )

    def tensor(name: str) -> torch.Tensor:
        key, layer = _stacked_key(name)
        full = stored(key)
        if layer is not None:
            if layer >= full.shape[0]:
                raise ConfigError(
                    f"{folder}: '{key}' has {full.shape[0]} layers, context/model.yaml says {config.layers}"
                )
            full = full[layer]
        if name in VOCABULARIES:
            full = full[: config.vocab]
            full = torch.nn.functional.pad(full, (0, 0, 0, config.padded_vocab - full.shape[0]))
        return full

    return Source("nemo", folder, config, tensor)


def write_nemo(source: Source, out: Path) -> None:
    """Write a model's weights and settings as a NeMo 2 folder."""

    refused = {
        "experts": source.config.experts,
        "value heads": source.value_heads,
        f"model.block: {source.config.block}": source.config.block != "llama",
        "model.rotary_interleaved": source.config.rotary_interleaved,
    }
    for what, found in refused.items():
        if found:
            raise ConfigError(f"{source.path}: models with {what} are not supported for NeMo folders")
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in parameter_names(source.config):
        stacks.setdefault(_stacked_key(name)[0], []).append(weight(source, name))
    with whole_folder(out) as partial, one_rank():
        from megatron.core import dist_checkpointing

        state = {}
        for key, parts in stacks.items():
            full = torch.stack(parts) if ".layers." in key else parts[0]
            state[key] = dist_checkpointing.ShardedTensor.from_rank_offsets(key, full.contiguous())
        dist_checkpointing.save(state, str(make_folder(partial / "weights")))
        settings = yaml.safe_dump({"config": model_settings(source.config)}, sort_keys=False)
        write_atomic(make_folder(partial / "context") / "model.yaml", settings)
