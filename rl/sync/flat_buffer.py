"""Tensors laid end to end in one buffer of bytes, each at the start of a row, and their checksums.

A checksum is exact in integers and the same on CPU and GPU. All checksums of a buffer come from a handful of operations
on it, and reading them back is the only wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

ROW = 2048  # bytes; every tensor begins a row, so that views are aligned to any dtype
_WORDS = ROW // 8
_CHUNK = 1 << 17  # rows at a time, which bounds the memory of the products to 256 MiB
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Entry = dict[str, Any]  # name, dtype, shape, offset; in transit also the checksum


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Entry], int]:
    """The place of each tensor, and the size of the buffer in bytes."""
    entries, offset = [], 0
    for name, tensor in tensors:
        entries.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
            }
        )
        offset += rows_of(tensor.numel() * tensor.element_size()) * ROW
    return entries, offset


def rows_of(size: int) -> int:
    """The number of rows that hold this many bytes."""
    return -(-size // ROW)


@torch.no_grad()
def flatten(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[Entry]]:
    """One buffer on the tensors' device, with zeros in the gaps, and its description for receivers."""
    entries, size = lay_out(tensors)
    device = tensors[0][1].device if tensors else torch.device("cpu")
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        view(flat, entry).copy_(tensor)
    return flat, entries


def view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """One tensor of the buffer, without a copy."""
    return (
        flat[entry["offset"] : entry["offset"] + size_of(entry)]
        .view(getattr(torch, entry["dtype"]))
        .view(entry["shape"])
    )


def size_of(entry: Entry) -> int:
    """Bytes of a tensor."""
    return math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize


@torch.no_grad()
def checksums(flat: torch.Tensor, entries: Sequence[Entry]) -> list[str]:
    """Sixteen hex digits for each tensor: 64-bit words weighted by their place in the buffer and summed modulo 2^64."""
    words = flat.view(torch.int64).view(-1, _WORDS)
    weights = torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64, device=flat.device)
    rows = [(words[start : start + _CHUNK] * weights).sum(1) for start in range(0, len(words), _CHUNK)]
    if not rows:
        return [f"{_start(entry):016x}" for entry in entries]
    place = torch.arange(1, len(words) + 1, dtype=torch.int64, device=flat.device)
    # bits are mixed between the two sums: else the places of a word in its row and of the row in the buffer could stand
    # in for each other
    mixed = torch.cat(rows)
    mixed = (mixed ^ ((mixed >> 29) & ((1 << 35) - 1))) * (2 * place * 0x1F123BB5 + 1)
    total = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
    bounds = [(e["offset"] // ROW, e["offset"] // ROW + rows_of(size_of(e))) for e in entries]
    edges = total[torch.tensor(bounds, dtype=torch.int64, device=flat.device)].tolist()
    return [f"{(end - begin + _start(entry)) & _MASK:016x}" for entry, (begin, end) in zip(entries, edges, strict=True)]


def _start(entry: Entry) -> int:
    """The part of a checksum for dtype and shape: tensors that differ only in those have different checksums."""
    value = len(entry["dtype"]) + sum(map(ord, entry["dtype"]))
    for extent in entry["shape"]:
        value = (value * 31 + extent + 1) * _GOLDEN & _MASK
    return value


def checksum(tensor: torch.Tensor) -> str:
    """The checksum of one tensor alone."""
    return checksums(*flatten([("", tensor)]))[0]
