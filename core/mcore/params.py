"""Global names and shards of parameters: what makes checkpoints, exports and weight sync independent of the layout.

A global name is Megatron's, with global layer and expert numbers. A parameter may be cut over tensor ranks along one
dimension; a gated fc1 is two stacked halves, each cut on its own. Layer specs say so through attributes set by `mark`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import ConfigError

TIED_HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Shard:
    """Which part of a global tensor a rank holds. `dim` None means all of it."""

    dim: int | None
    rank: int
    size: int
    halves: int = 1  # 2 for gated fc1: the stacked halves are cut separately

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the full tensor."""
        if self.dim is None or self.size == 1:
            return full
        return torch.cat(
            [half.chunk(self.size, self.dim)[self.rank] for half in full.chunk(self.halves, self.dim)], self.dim
        )

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the parts of all tensor ranks."""
        if self.dim is None or self.size == 1:
            return parts[0]
        halves = zip(*[part.chunk(self.halves, self.dim) for part in parts], strict=True)
        return torch.cat([torch.cat(list(half), self.dim) for half in halves], self.dim)

    def full_shape(self, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the global tensor, given that of a part."""
        return tuple(n * (self.size if i == self.dim else 1) for i, n in enumerate(local))


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank under its global name."""

    name: str
    param: torch.nn.Parameter
    shard: Shard
    expert: bool  # spread over expert ranks instead of replicated
    tied_copy: bool  # the last stage's copy of a tied embedding

    def require_shape(self, found: tuple[int, ...]) -> None:
        """Refuse a whole tensor that is not of this parameter's size."""
        expected = self.shard.full_shape(self.param.shape)
        if tuple(found) != expected:
            raise ConfigError(f"{self.name}: has shape {tuple(found)}, the model wants {expected}")


def mark_halves(param: torch.nn.Parameter) -> None:
    """Say that a parameter is two stacked halves (gate and up), each cut over tensor ranks."""
    param.terrella_halves = 2  # type: ignore[attr-defined]


def tensor_rank() -> int:
    """This rank's place among those that share each layer's matrices."""
    from megatron.core import parallel_state as state

    return state.get_tensor_model_parallel_rank()


def named_parameters(chunks: list[torch.nn.Module]) -> list[NamedParameter]:
    """This rank's parameters, in order, with global names and shards."""
    from megatron.core import parallel_state as state

    found = []
    for chunk in chunks:
        offset = chunk.layer_offset  # type: ignore[attr-defined]
        experts = getattr(chunk.config, "num_moe_experts", None) or 0  # type: ignore[attr-defined]
        expert_offset = state.get_expert_model_parallel_rank() * (
            experts // state.get_expert_model_parallel_world_size()
        )
        for local_name, param in chunk.named_parameters():
            name = _renumber(local_name, "decoder.layers.", offset)
            name = _renumber(name, "local_experts.", expert_offset)
            for fused, plain in _FUSED.items():
                name = name.replace(fused, plain)
            expert = not getattr(param, "allreduce", True)
            dim = (
                getattr(param, "partition_dim", -1)
                if getattr(param, "tensor_model_parallel", False) and not expert
                else -1
            )
            shard = Shard(
                dim if dim >= 0 else None,
                state.get_tensor_model_parallel_rank() if dim >= 0 else 0,
                state.get_tensor_model_parallel_world_size() if dim >= 0 else 1,
                getattr(param, "terrella_halves", 1),
            )
            tied = bool(getattr(chunk, "share_embeddings_and_output_weights", False)) and name == TIED_HEAD
            found.append(NamedParameter(EMBEDDING if tied else name, param, shard, expert, tied))
    return found


def _renumber(name: str, prefix: str, offset: int) -> str:
    return re.sub(rf"{re.escape(prefix)}(\d+)\.", lambda m: f"{prefix}{int(m[1]) + offset}.", name)


# TransformerEngine fuses norms into the linear that follows; the global name is that of the plain norm.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def gather(parameters: list[NamedParameter], tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors on every rank of the model-parallel group, one at a time, in one global order. Collective.

    `tensors` are this rank's parts, one for each of `parameters`.
    """
    from megatron.core import parallel_state as state

    # Owners differ between pipeline stages and, for experts, between expert ranks.
    tensor_group = state.get_tensor_model_parallel_group()
    group = (
        dist.group.WORLD
        if state.get_expert_model_parallel_world_size() > 1
        else state.get_pipeline_model_parallel_group()
    )
    ranks = dist.get_process_group_ranks(group)
    held = {p.name: (p, tensor) for p, tensor in zip(parameters, tensors, strict=True) if not p.tied_copy}
    listings: list = [None] * len(ranks)
    dist.all_gather_object(
        listings, [(n, p.shard.full_shape(t.shape), t.dtype) for n, (p, t) in held.items()], group=group
    )
    owners: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, listing in zip(ranks, listings, strict=True):
        for name, shape, dtype in listing:
            owners.setdefault(name, (rank, shape, dtype))
    device = tensors[0].device if tensors else torch.device("cpu")
    for name in sorted(owners, key=_natural):
        owner, shape, dtype = owners[name]
        full = None
        if name in held:
            p, tensor = held[name]
            part = tensor.detach().contiguous()
            if p.shard.size > 1:
                parts = [torch.empty_like(part) for _ in range(p.shard.size)]
                dist.all_gather(parts, part, group=tensor_group)
                part = p.shard.join(parts)
            full = part
        if len(ranks) > 1:
            if full is None:
                full = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(full, owner, group=group)
        assert full is not None
        yield name, full


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
