"""The engine's weights under the names a rollout engine knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.engine import Engine
from ...models.families import FAMILIES, to_hf
from ...models.lora import is_added, merged


def engine_weights(engine: Engine, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Full Hugging Face tensors, one after the other, on the engine's device; adapters merged, value heads left out.
    Collective.
    """
    builder: Any = engine.build
    family, lora = FAMILIES[builder.model.family], getattr(builder, "lora", None)
    for name, tensor in merged(engine.parameters(), builder.model, lora) if lora else engine.parameters():
        if not is_added(name):
            for hf, value in to_hf(family, builder.model, name, tensor).items():
                yield hf, value.detach().to(dtype or value.dtype).contiguous()


def adapter_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters alone, under the engine's names. Collective."""
    return ((name, tensor.detach()) for name, tensor in engine.parameters() if ".lora." in name)


def base_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights beside the adapters, under the engine's names. Collective."""
    return ((name, tensor.detach()) for name, tensor in engine.parameters() if not is_added(name))
