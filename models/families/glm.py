"""GLM-4-9B: partial rotary embedding in neighbouring pairs; today's `Glm` names and the older ChatGLM ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from .base import VOCABULARIES, Family, Get, join_qkv

if TYPE_CHECKING:
    import torch

GLM = Family(
    "glm",
    "GlmForCausalLM",
    read=lambda hf: {
        "qkv_bias": bool(hf.get("attention_bias", True)),
        "rotary_fraction": float(
            (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("partial_rotary_factor", 0.5))
        ),
        "rotary_interleaved": True,
    },
    write=lambda config: {"attention_bias": config.qkv_bias, "partial_rotary_factor": config.rotary_fraction},
    fused_mlp=True,
)


def read_chatglm_config(hf: dict[str, Any]) -> ModelConfig:
    """config.json of the releases that carried their own code (model_type chatglm)."""
    fixed = {
        "rmsnorm": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
    }
    for key, wanted in fixed.items():
        if hf.get(key, wanted) != wanted:
            raise ValueError(f"{key}: only {wanted} is supported")
    heads = int(hf["num_attention_heads"])
    return ModelConfig(
        family="glm",
        layers=int(hf["num_layers"]),
        hidden=int(hf["hidden_size"]),
        heads=heads,
        kv_heads=int(hf["multi_query_group_num"]) if hf.get("multi_query_attention") else heads,
        head_dim=int(hf.get("kv_channels", hf["hidden_size"] // heads)),
        ffn=int(hf["ffn_hidden_size"]),
        vocab=int(hf["padded_vocab_size"]),
        max_positions=int(hf.get("seq_length", 8192)),
        rope_theta=10000.0 * float(hf.get("rope_ratio", 1.0)),
        rotary_fraction=0.5,
        rotary_interleaved=True,
        norm_eps=float(hf.get("layernorm_epsilon", 1.5625e-07)),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=bool(hf.get("add_qkv_bias", True)),
    )


_CHATGLM = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attention.query_key_value.weight",
    "self_attention.linear_qkv.bias": "self_attention.query_key_value.bias",
    "self_attention.linear_proj.weight": "self_attention.dense.weight",
    "mlp.linear_fc1.weight": "mlp.dense_h_to_4h.weight",
    "mlp.linear_fc2.weight": "mlp.dense_4h_to_h.weight",
}
_CHATGLM_TOP = {
    "embedding.word_embeddings.weight": "transformer.embedding.word_embeddings.weight",
    "output_layer.weight": "transformer.output_layer.weight",
    "decoder.final_layernorm.weight": "transformer.encoder.final_layernorm.weight",
}


def chatglm_name(name: str) -> str:
    """The ChatGLM tensor of a global tensor."""
    if name in _CHATGLM_TOP:
        return _CHATGLM_TOP[name]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _CHATGLM:
        raise KeyError(f"{name}: no ChatGLM tensor corresponds to it")
    return f"transformer.encoder.layers.{match[1]}.{_CHATGLM[match[2]]}"


def from_chatglm(config: ModelConfig, name: str, get: Get) -> torch.Tensor:
    """A global tensor from its ChatGLM tensor, where all queries stand before all keys and values."""
    import torch

    tensor = get(chatglm_name(name))
    if "linear_qkv" in name:
        sizes = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
        return join_qkv(config, *tensor.split(sizes))
    if name in VOCABULARIES:
        return torch.nn.functional.pad(tensor, (0, 0, 0, config.padded_vocab - tensor.shape[0]))
    return tensor
