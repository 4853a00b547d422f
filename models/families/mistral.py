"""Mistral without a sliding window: Llama's layers under another name."""

from typing import Any

from .base import Family


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    window = hf.get("sliding_window")
    if window is not None and window < hf["max_position_embeddings"]:
        raise ValueError(
            f"sliding_window: {window} is below max_position_embeddings; sliding-window attention is not supported"
        )
    return {}


MISTRAL = Family("mistral", "MistralForCausalLM", read=_read, write=lambda config: {"sliding_window": None})
