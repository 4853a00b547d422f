"""Counter-based randomness: a number depends only on its key, never on batch, rank or what was drawn before.

A key is a tuple of integers such as (seed, prompt id, sample index, turn); a counter is a position.
The mixing function is splitmix64's finaliser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def fold(*parts: int) -> int:
    """One 64-bit key from several integers; the order matters."""
    key = 0
    for part in parts:
        key = _mix(key ^ (part & _MASK))
    return key


def uniform(*parts: int) -> float:
    """A number in [0, 1) that belongs to this key."""
    return (fold(*parts) >> 11) * 2.0**-53


def permutation(n: int, *parts: int) -> list[int]:
    """A permutation of range(n) that belongs to this key."""
    key = fold(*parts)
    return sorted(range(n), key=lambda i: (_mix(key ^ i), i))


@lru_cache(maxsize=4)
def _epoch(count: int, seed: int, number: int) -> list[int]:
    return permutation(count, seed, number)


def shuffled(count: int, seed: int, place: int) -> int:
    """Which of `count` items comes at a place of an endless stream: every pass over them is a fresh permutation."""
    return _epoch(count, seed, place // count)[place % count]


def signed(x: int) -> int:
    """A 64-bit key as the int64 with the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def key_tensor(keys: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """Folded keys as int64, ready for `uniform_tensor`."""
    import torch

    return torch.tensor([signed(fold(*key)) for key in keys], dtype=torch.int64, device=device)


def uniform_tensor(keys_B: torch.Tensor, counters_B: torch.Tensor) -> torch.Tensor:
    """`uniform(*key, counter)` for many keys at once, as float64; equal to the scalar form bit for bit."""
    import torch

    return _shift(_mix_tensor(keys_B ^ counters_B.to(torch.int64)), 11).to(torch.float64) * 2.0**-53


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # >> keeps the sign; the mask makes it logical


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = x + signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(_FIRST)
    x = (x ^ _shift(x, 27)) * signed(_SECOND)
    return x ^ _shift(x, 31)
