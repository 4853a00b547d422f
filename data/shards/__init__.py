"""WebDataset shards: written whole or not at all, read exactly once an epoch, resumed exactly."""

from ..errors import ShardError
from .dataset import ShardSet
from .index import ShardIndex
from .order import BlendOrder, RatioOrder, ShuffledOrder
from .reader import Reader, ReaderState, merge_states
from .writer import ShardWriter

__all__ = [
    "BlendOrder",
    "RatioOrder",
    "Reader",
    "ReaderState",
    "ShardError",
    "ShardIndex",
    "ShardSet",
    "ShardWriter",
    "ShuffledOrder",
    "merge_states",
]
