"""A checksum of a tensor's bytes that is the same on CPU and GPU, exact in integers, and sensitive to order."""

from __future__ import annotations

import torch

_CHUNK = 1 << 22  # words at a time, so that the int64 copy stays small
_PERIOD = 65521
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """Sixteen hex digits: 32-bit words weighted by their place, summed modulo 2^64, with the number of bytes mixed in."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    total = data.numel() * 0x9E3779B97F4A7C15
    words = data[:whole].view(torch.int32) if data.data_ptr() % 4 == 0 else data[:whole].clone().view(torch.int32)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device) % _PERIOD + 1
        total += int((part * place).sum())
    for place, byte in enumerate(data[whole:].tolist(), 1):
        total += (byte + 1) * place << 40
    return f"{total & _MASK:016x}"
