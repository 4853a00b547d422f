"""Gemma 3's text model: sliding and global layers with a rotary base each, norms around both halves of a layer."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from .base import Family

GLOBAL, SLIDING = "full_attention", "sliding_attention"
NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "post_mlp_norm.weight": "post_feedforward_layernorm.weight",
}


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "attention_bias"):
        if hf.get(key):
            raise ValueError(f"{key}: {hf[key]} is not supported")
    if (act := hf.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation: '{act}' is not supported (gelu_pytorch_tanh is)")
    every = _global_every(hf)
    rope = hf.get("rope_parameters") or {}
    local = float((rope.get(SLIDING) or {}).get("rope_theta", hf.get("rope_local_base_freq", 10000.0)))
    return {
        "tied": bool(hf.get("tie_word_embeddings", True)),
        "qk_norm": True,
        "block": "gemma",
        "sliding_window": int(hf["sliding_window"]) if every > 1 else 0,
        "global_every": every,
        "local_rope_theta": local,
        "query_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
    }


def _global_every(hf: dict[str, Any]) -> int:
    """Every how many-th layer attends to all of its document."""
    layers, stated = int(hf["num_hidden_layers"]), hf.get("layer_types")
    if stated is None:
        return int(hf.get("sliding_window_pattern", 6))
    every = stated.index(GLOBAL) + 1 if GLOBAL in stated else layers + 1
    if stated != layer_types(layers, every):
        raise ValueError(f"layer_types: only patterns with every so many-th layer {GLOBAL} are supported")
    return every


def layer_types(layers: int, every: int) -> list[str]:
    """The kinds of all layers, under the names of transformers."""
    return [SLIDING if (i + 1) % every else GLOBAL for i in range(layers)]


def _write(config: ModelConfig) -> dict[str, Any]:
    scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
    every = config.global_every if config.sliding_window else 1
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "sliding_window": config.sliding_window or config.max_positions,
        "layer_types": layer_types(config.layers, every),
        "rope_local_base_freq": config.local_rope_theta,
    }


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", read=_read, write=_write, renamed=NORMS)
