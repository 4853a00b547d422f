"""The error of a damaged or foreign shard."""

from __future__ import annotations

from ..core.errors import StorageError


class ShardError(StorageError):
    """Names the shard, the sample and the field, as far as they are known."""

    def __init__(self, reason: str, *, shard: str, sample: str | None = None, field: str | None = None) -> None:
        self.reason, self.shard, self.sample, self.field = reason, shard, sample, field
        where = [shard]
        if sample is not None:
            where.append(f"sample {sample}")
        if field is not None:
            where.append(f"field {field}")
        super().__init__(": ".join([*where, reason]))

    def __reduce__(self) -> tuple:
        # worker processes send it to their parent
        return _rebuild, (self.reason, self.shard, self.sample, self.field)


def _rebuild(reason: str, shard: str, sample: str | None, field: str | None) -> ShardError:
    return ShardError(reason, shard=shard, sample=sample, field=field)
