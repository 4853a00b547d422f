"""Weights, gradients and optimizer state moved to host memory and back.

Megatron's parameters and gradients are views of a few large buffers. The storages of those buffers are emptied and
refilled in place, so that every view stays valid.
"""

from __future__ import annotations

import torch

from . import optimizer as adam

Parked = tuple[torch.UntypedStorage, torch.UntypedStorage | None, int]  # the device's storage, its copy, its size


def _storages(
    chunks: list[torch.nn.Module], wrapped: list[torch.nn.Module], optimizer
) -> list[tuple[torch.UntypedStorage, bool]]:
    """Every storage once, with whether its contents matter (gradients do not)."""
    found: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def add(tensor: torch.Tensor | None, keep: bool) -> None:
        if tensor is not None and tensor.numel():
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, keep))

    for chunk in chunks:
        for tensor in [*chunk.parameters(), *chunk.buffers()]:
            add(tensor.data, True)
    for ddp in wrapped:
        if hasattr(ddp, "ddp_config"):
            for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
                add(buffer.grad_data, False)
    if optimizer is not None:
        for part in adam.state_parts(optimizer):
            add(part.master.data, True)
            for name in adam.MOMENTS:
                add(part.state.get(name), True)
    return list(found.values())


def park(chunks: list[torch.nn.Module], wrapped: list[torch.nn.Module], optimizer) -> list[Parked]:
    """Empty the storages; returns what `restore` needs."""
    parked: list[Parked] = []
    for storage, keep in _storages(chunks, wrapped, optimizer):
        copy = None
        if keep:
            copy = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        parked.append((storage, copy, storage.nbytes()))
        storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return parked


def restore(parked: list[Parked]) -> None:
    """Fill the storages again; gradients come back as zeros."""
    for storage, copy, size in parked:
        storage.resize_(size)
        if copy is not None:
            storage.copy_(copy)
        else:
            storage.fill_(0)
