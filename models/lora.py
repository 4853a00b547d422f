"""Low-rank adapters on the linear layers of attention and dense feed-forward blocks; everything else is frozen.

A fused linear (queries with keys and values, gate with up) has one adapter. Cut into its Hugging Face parts, each part
has the same A and its rows of B, so a PEFT folder says exactly the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigError
from ..core.files import make_folder, save_tensors, write_json
from .config import ModelConfig
from .families import FAMILIES, hf_names
from .families.base import Tensors, split_qkv


@dataclass(frozen=True)
class LoraConfig:
    """Rank and scale of the adapters; the update is alpha / rank times B A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError("rank: must be at least 1")
        unknown = set(self.targets) - {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
        if unknown:
            raise ValueError(
                f"targets: '{sorted(unknown)[0]}' is not one of linear_qkv, linear_proj, linear_fc1, linear_fc2"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"targets": list(self.targets)}


class Adapter(nn.Module):
    """B A of one tensor-parallel linear. A column-parallel one cuts B over tensor ranks, a row-parallel one cuts A."""

    def __init__(
        self, linear: nn.Module, config: LoraConfig, column: bool, sequence_parallel: bool, halves: bool
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        from ..core.mcore.params import mark_halves

        weight: torch.Tensor = linear.weight  # type: ignore[assignment]
        self.column, self.scale, self.sequence_parallel = column, config.scale, sequence_parallel
        self.a = nn.Parameter(torch.empty(config.rank, weight.shape[1], dtype=weight.dtype))
        self.b = nn.Parameter(torch.empty(weight.shape[0], config.rank, dtype=weight.dtype))
        cut, whole = (self.b, self.a) if column else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if column else 1, 1)
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        if halves:
            mark_halves(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core import tensor_parallel as tp

        low = x @ self.a.T
        if self.column:
            low = (
                tp.gather_from_sequence_parallel_region(low)
                if self.sequence_parallel
                else tp.copy_to_tensor_model_parallel_region(low)
            )
        elif self.sequence_parallel:
            low = tp.reduce_scatter_to_sequence_parallel_region(low)
        else:
            low = tp.reduce_from_tensor_model_parallel_region(low)
        return (low @ self.b.T) * self.scale


def _add_adapter(module: nn.Module, inputs: tuple, output: tuple) -> tuple:
    return output[0] + module.lora(inputs[0]), *output[1:]  # type: ignore[operator]


def attach(chunk: nn.Module, config: LoraConfig, sequence_parallel: bool) -> None:
    """Freeze a model chunk and give its target linears adapters."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for param in chunk.parameters():
        param.requires_grad_(False)
    for name, module in list(chunk.named_modules()):
        if name.rsplit(".", 1)[-1] in config.targets and ".experts." not in name:
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                raise ConfigError("lora: adapters go with our layer specification, not with TransformerEngine's")
            module.lora = Adapter(
                module,
                config,
                isinstance(module, ColumnParallelLinear),
                sequence_parallel,
                halves=name.endswith("linear_fc1"),
            )
            module.register_forward_hook(_add_adapter)


def initial_adapter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A is random, B zero: the adapted model starts as the base model."""
    if name.endswith(".lora.b"):
        return torch.zeros(shape)
    return torch.empty(shape).normal_(0.0, 1.0 / math.sqrt(shape[1]), generator=generator)


def merged(parameters: Iterable[tuple[str, torch.Tensor]], config: LoraConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of full parameters with each adapter folded into its weight; adapters must come before their weight."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if ".lora." in name:
            waiting[name] = tensor
            continue
        base = name.removesuffix(".weight")
        if f"{base}.lora.a" in waiting and name.endswith(".weight"):
            a, b = waiting.pop(f"{base}.lora.a"), waiting.pop(f"{base}.lora.b")
            tensor = (tensor.float() + config.scale * (b.float() @ a.float())).to(tensor.dtype)
        yield name, tensor
    if waiting:
        raise ValueError(f"adapter '{next(iter(waiting))}' met no weight")


def peft_tensors(model: ModelConfig, parameters: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder from full adapter parameters."""
    family = FAMILIES[model.family]
    out: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if ".lora." not in name:
            continue
        base, which = name.rsplit(".lora.", 1)
        targets = [n.removesuffix(".weight") for n in hf_names(family, f"{base}.weight")]
        parts = [tensor] * len(targets)
        if which == "b" and len(targets) > 1:
            parts = split_qkv(model, tensor) if base.endswith("linear_qkv") else list(tensor.chunk(len(targets)))
        for target, part in zip(targets, parts, strict=True):
            out[f"base_model.model.{target}.lora_{which.upper()}.weight"] = part.detach().cpu().contiguous().clone()
    return out


def write_peft(
    folder: str | Path, model: ModelConfig, config: LoraConfig, parameters: Tensors, base_model: str
) -> Path:
    """Write adapters as a PEFT folder that `peft` and vLLM read."""
    folder = make_folder(Path(folder))
    tensors = peft_tensors(model, parameters)
    save_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}),
            "inference_mode": True,
        },
    )
    return folder
