"""Llama, SmolLM2 and the video transformers."""

from .base import Family

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    read=lambda hf: {"qkv_bias": bool(hf.get("attention_bias", False))},
    write=lambda config: {"attention_bias": config.qkv_bias, "mlp_bias": False},
)
