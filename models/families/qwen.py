"""Qwen2 and Qwen2.5 (and distilled models of their shape), Qwen3, Qwen3 with experts."""

from typing import Any

from ..config import ModelConfig
from .base import Family


def _no_window(hf: dict[str, Any]) -> None:
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window: sliding-window attention is not supported")


def _read_qwen2(hf: dict[str, Any]) -> dict[str, Any]:
    _no_window(hf)
    return {"qkv_bias": True}


def _read_qwen3(hf: dict[str, Any]) -> dict[str, Any]:
    _no_window(hf)
    return {"qkv_bias": bool(hf.get("attention_bias", False)), "qk_norm": True}


def _read_moe(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        raise ValueError(
            "decoder_sparse_step, mlp_only_layers: only models whose every layer has experts are supported"
        )
    return {
        **_read_qwen3(hf),
        "experts": int(hf.get("num_experts", hf.get("num_local_experts", 0))),
        "experts_per_token": int(hf["num_experts_per_tok"]),
        "expert_ffn": int(hf["moe_intermediate_size"]),
        "expert_weights_sum_to_one": bool(hf.get("norm_topk_prob", False)),
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "use_sliding_window": False}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_qwen3(config),
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn,
        "norm_topk_prob": config.expert_weights_sum_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read=_read_qwen2, write=lambda config: {"use_sliding_window": False})
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read=_read_qwen3, write=_write_qwen3)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read=_read_moe, write=_write_moe)
