"""What a family says of its Hugging Face form, and the tensor mapping most families share.

A global tensor maps to one or several Hugging Face tensors. Queries, keys and values are packed per key head: its
queries, its key, its value; gate and up projections are stacked. Rows that pad the vocabulary exist only on our side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ..config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    import torch

Get = Callable[[str], "torch.Tensor"]
Tensors = Iterable[tuple[str, "torch.Tensor"]]  # by global name


@dataclass(frozen=True)
class Family:
    """A model type of transformers: how its config reads and how its layers are named."""

    model_type: str
    architecture: str
    read: Callable[[dict[str, Any]], dict[str, Any]]  # ModelConfig fields beyond the common ones
    write: Callable[[ModelConfig], dict[str, Any]]  # config.json fields beyond the common ones
    fused_mlp: bool = False  # gate and up are one tensor
    renamed: dict[str, str] = field(default_factory=dict)  # tensors of a layer with names of its own


_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


def hf_names(family: Family, name: str) -> list[str]:
    """Hugging Face tensors that make up a global tensor, in the order they are stacked."""
    if name in _TOP:
        return [_TOP[name]]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(f"{name}: no Hugging Face tensor corresponds to it")
    prefix, inner = f"model.layers.{match[1]}.", match[2]
    if inner in family.renamed or inner in _PLAIN:
        return [prefix + (family.renamed.get(inner) or _PLAIN[inner])]
    kind = inner.rsplit(".", 1)[1]
    if inner.startswith("self_attention.linear_qkv."):
        return [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
    if inner == "mlp.linear_fc1.weight":
        return (
            [f"{prefix}mlp.gate_up_proj.weight"]
            if family.fused_mlp
            else [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]
        )
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", inner)
    if expert:
        parts = ("gate", "up") if expert[2] == "1" else ("down",)
        return [f"{prefix}mlp.experts.{expert[1]}.{part}_proj.weight" for part in parts]
    raise KeyError(f"{name}: no Hugging Face tensor corresponds to it")


VOCABULARIES = ("embedding.word_embeddings.weight", "output_layer.weight")


def hf_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The shape of a Hugging Face tensor, by the config."""
    part, kind = name.split(".")[-2:]
    ffn = config.expert_ffn if ".experts." in name else config.ffn
    rows, columns = {
        "embed_tokens": (config.vocab, config.hidden),
        "lm_head": (config.vocab, config.hidden),
        "q_proj": (config.heads * config.head_dim, config.hidden),
        "k_proj": (config.kv_heads * config.head_dim, config.hidden),
        "v_proj": (config.kv_heads * config.head_dim, config.hidden),
        "o_proj": (config.hidden, config.heads * config.head_dim),
        "gate": (config.experts, config.hidden),
        "gate_proj": (ffn, config.hidden),
        "up_proj": (ffn, config.hidden),
        "gate_up_proj": (2 * ffn, config.hidden),
        "down_proj": (config.hidden, ffn),
        "q_norm": (config.head_dim, 0),
        "k_norm": (config.head_dim, 0),
    }.get(part, (config.hidden, 0))
    return (rows, columns) if columns and kind == "weight" else (rows,)


def to_hf(family: Family, config: ModelConfig, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A global tensor as its Hugging Face tensors."""
    names = hf_names(family, name)
    if name in VOCABULARIES:
        return {names[0]: tensor[: config.vocab]}
    if "linear_qkv" in name:
        return dict(zip(names, split_qkv(config, tensor), strict=True))
    return dict(zip(names, tensor.chunk(len(names)), strict=True))


def check_hf(config: ModelConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a Hugging Face tensor that is not what the config makes it."""
    wanted = hf_shape(config, name)
    if shape != wanted or not dtype.is_floating_point:
        raise ConfigError(
            f"tensor '{name}' is {dtype} {list(shape)}, config.json makes it a float of {list(wanted)}; one of the two "
            "is wrong"
        )


def from_hf(family: Family, config: ModelConfig, name: str, get: Get) -> torch.Tensor:
    """A global tensor from its Hugging Face tensors."""
    import torch

    parts = []
    for hf in hf_names(family, name):
        parts.append(get(hf))
        check_hf(config, hf, tuple(parts[-1].shape), parts[-1].dtype)
    if name in VOCABULARIES:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, config.padded_vocab - parts[0].shape[0]))
    if "linear_qkv" in name:
        return join_qkv(config, *parts)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def join_qkv(config: ModelConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Pack per key head."""
    import torch

    rows = [x.reshape(config.kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(rows, 1).reshape(-1, *q.shape[1:])


def split_qkv(config: ModelConfig, packed: torch.Tensor) -> list[torch.Tensor]:
    """Undo `join_qkv`."""
    queries = config.heads // config.kv_heads * config.head_dim
    grouped = packed.reshape(config.kv_heads, -1, *packed.shape[1:])
    return [x.reshape(-1, *packed.shape[1:]) for x in grouped.split([queries, config.head_dim, config.head_dim], 1)]


@cache
def qkv_runs(heads: int, kv_heads: int, head_dim: int, rank: int, size: int) -> list[tuple[int, int, int]]:
    """What one of `size` equal shares of a packed tensor consists of, in order: which of queries, keys and values, and
    its rows from one to another. Where there are more shares than key heads they begin and end within heads.
    """
    queries, each = heads // kv_heads * head_dim, (heads + 2 * kv_heads) * head_dim // size
    start, runs = 0, []
    for group in range(kv_heads):
        for part, rows in enumerate((queries, head_dim, head_dim)):
            low, high = max(start, rank * each), min(start + rows, (rank + 1) * each)
            if low < high:
                runs.append((part, group * rows + low - start, group * rows + high - start))
            start += rows
    return runs


def parameter_names(config: ModelConfig) -> list[str]:
    """Global names of all parameters of a plain decoder."""
    names = ["embedding.word_embeddings.weight"]
    for i in range(config.layers):
        inner = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
        inner += ["self_attention.linear_qkv.bias"] if config.qkv_bias else []
        inner += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if config.qk_norm else []
        inner += ["self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"]
        inner += ["post_attention_norm.weight", "post_mlp_norm.weight"] if config.block == "gemma" else []
        if config.experts:
            inner.append("mlp.router.weight")
            for e in range(config.experts):
                inner += [f"mlp.experts.local_experts.{e}.linear_fc{n}.weight" for n in (1, 2)]
        else:
            inner += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        names += [f"decoder.layers.{i}.{name}" for name in inner]
    names.append("decoder.final_layernorm.weight")
    return names if config.tied else [*names, "output_layer.weight"]


def read_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of either generation of config.json."""
    parameters = dict(hf.get("rope_parameters") or {})
    # Gemma 3 has one set for each kind of layer
    rope = dict(hf.get("rope_scaling") or {}) | dict(parameters.get("full_attention") or parameters)
    kind = rope.get("rope_type", rope.get("type", "default"))
    usual = 1e6 if hf.get("model_type") == "gemma3_text" else 10000.0
    theta = float(rope.get("rope_theta", hf.get("rope_theta", usual)))
    scaling = None
    if kind in ("linear", "llama3", "yarn"):
        scaling = RopeScaling(
            kind=kind,
            factor=float(rope["factor"]),
            original_max_positions=int(
                rope.get("original_max_position_embeddings", hf.get("max_position_embeddings", 0))
            ),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=rope.get("attention_factor"),
            truncate=bool(rope.get("truncate", True)),
        )
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            raise ValueError("rope_scaling.mscale: not supported by this reader")
    elif kind != "default":
        raise ValueError(f"rope_scaling.rope_type: '{kind}' is not supported (linear, llama3 and yarn are)")
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary settings of config.json: `rope_parameters`, and where positions are scaled also `rope_scaling`, which
    is the only one that transformers 4 reads."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rotary_fraction != 1.0:
        out["partial_rotary_factor"] = config.rotary_fraction
    s = config.rope_scaling
    if config.block == "gemma":
        if s is not None:
            out |= {"rope_type": s.kind, "factor": s.factor}
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        both = {"full_attention": out, "sliding_attention": local}
        return {"rope_parameters": both, "rope_scaling": {"rope_type": s.kind, "factor": s.factor} if s else None}
    if s is None:
        return {"rope_parameters": out}
    out |= {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "llama3":
        out |= {
            "original_max_position_embeddings": s.original_max_positions,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
        }
    if s.kind == "yarn":
        out |= {
            "original_max_position_embeddings": s.original_max_positions,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
        }
        out |= {"truncate": s.truncate} if not s.truncate else {}
        out |= {"attention_factor": s.attention_factor} if s.attention_factor is not None else {}
    return {"rope_parameters": out, "rope_scaling": {key: value for key, value in out.items() if key != "rope_theta"}}
