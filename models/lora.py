"""Low-rank adapters on the linear layers of attention and dense feed-forward blocks; everything else is frozen.

A fused linear (queries with keys and values, gate with up) has an A for each of its Hugging Face parts, stacked, and
one B whose rows each read the A of their part: what PEFT trains, and what a PEFT folder holds.
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


def is_added(name: str) -> bool:
    """Whether a parameter is ours beyond the public model: an adapter or a value head."""
    return ".lora." in name or name.startswith("value_head.")


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

    own_RP1: torch.Tensor

    def __init__(
        self, name: str, weight: torch.Tensor, model: ModelConfig, config: LoraConfig, sequence_parallel: bool
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        from ..core.mcore.params import mark_halves, tensor_rank

        self.column = column = name in ("linear_qkv", "linear_fc1")
        self.scale, self.sequence_parallel = config.scale, sequence_parallel
        own_RP1 = own_parts(name, weight.shape[0], model, tensor_rank()).to(weight.dtype)
        self.register_buffer("own_RP1", own_RP1, persistent=False)
        self.a = nn.Parameter(torch.empty(own_RP1.shape[1] * config.rank, weight.shape[1], dtype=weight.dtype))
        self.b = nn.Parameter(torch.empty(weight.shape[0], config.rank, dtype=weight.dtype))
        cut, whole = (self.b, self.a) if column else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if column else 1, 1)
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        if name == "linear_fc1":
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
        low = low if self.scale == 1 else low * self.scale  # here, where it is narrow
        return low @ spread(self.b, self.own_RP1).T


def own_parts(name: str, rows: int, model: ModelConfig, rank: int = 0) -> torch.Tensor:
    """(rows, parts, 1): 1 where a row of a linear, or of a tensor rank's share of one, belongs to that Hugging Face
    part.
    """
    if name == "linear_qkv":
        group = torch.tensor([0] * (model.heads // model.kv_heads) + [1, 2]).repeat_interleave(model.head_dim)
        part_R, parts = group.repeat(model.kv_heads)[rank * rows : (rank + 1) * rows], 3
    elif name == "linear_fc1" and not FAMILIES[model.family].fused_mlp:
        part_R, parts = torch.arange(2).repeat_interleave(rows // 2), 2
    else:
        part_R, parts = torch.zeros(rows, dtype=torch.int64), 1
    return nn.functional.one_hot(part_R, parts)[..., None]


def spread(b_RK: torch.Tensor, own_RP1: torch.Tensor) -> torch.Tensor:
    """B over the stacked A of all parts: each row beside the A of its part, zeros beside the others."""
    return b_RK if own_RP1.shape[1] == 1 else (own_RP1 * b_RK[:, None]).flatten(1)


def _add_adapter(module: nn.Module, inputs: tuple, output: tuple) -> tuple:
    return output[0] + module.lora(inputs[0]), *output[1:]  # type: ignore[operator]


def attach(chunk: nn.Module, config: LoraConfig, sequence_parallel: bool) -> None:
    """Freeze a model chunk (a `GPT`) and give its target linears adapters."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for param in chunk.parameters():
        param.requires_grad_(False)
    model: ModelConfig = chunk.model  # type: ignore[assignment]
    for name, module in list(chunk.named_modules()):
        last = name.rsplit(".", 1)[-1]
        if last in config.targets and ".experts." not in name:
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                raise ConfigError("lora: TransformerEngine's layers take no adapters; set precision.layers: ours")
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            module.lora = Adapter(last, weight, model, config, sequence_parallel)
            module.register_forward_hook(_add_adapter)


def initial_adapter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A is random, B zero: the adapted model starts as the base model."""
    if name.endswith(".lora.b"):
        return torch.zeros(shape)
    return torch.empty(shape).normal_(0.0, 1.0 / math.sqrt(shape[1]), generator=generator)


def merged(
    parameters: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, config: LoraConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of full parameters with each adapter folded into its weight; adapters must come before their weight."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if ".lora." in name:
            waiting[name] = tensor
            continue
        base = name.removesuffix(".weight")
        if f"{base}.lora.a" in waiting and name.endswith(".weight"):
            a, b = waiting.pop(f"{base}.lora.a").float(), waiting.pop(f"{base}.lora.b").float()
            if len(a) > config.rank:
                b = spread(b, own_parts(base.rsplit(".", 1)[-1], len(b), model).to(b))
            tensor = (tensor.float() + config.scale * (b @ a)).to(tensor.dtype)
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
        by_head = which == "b" and base.endswith("linear_qkv")
        parts = split_qkv(model, tensor) if by_head else list(tensor.chunk(len(targets)))
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
