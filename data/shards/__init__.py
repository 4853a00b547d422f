"""WebDataset shards: written whole or not at all, read exactly once an epoch, resumed exactly."""

from ..errors import ShardError
from .dataset import ShardSet
from .index import ShardIndex
from .order import ShuffledOrder
from .reader import Reader, ReaderState, merge_states
from .writer import ShardWriter

__all__ = [
    "Reader",
    "ReaderState",
    "ShardError",
    "ShardIndex",
    "ShardSet",
    "ShardWriter",
    "ShuffledOrder",
    "merge_states",
]
