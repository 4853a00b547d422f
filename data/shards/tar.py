"""The tar side of a shard: headers with fixed metadata, and a scan of anybody's tar."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

from ..errors import ShardError
from .store import Bytes

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_NAME = 100
MAX_SIZE = 8**11 - 1

# mode 0444, uid 0, gid 0; between size and checksum the modification time 0
_OWNER = b"0000444\0" + b"0000000\0" + b"0000000\0"
_TIME = b"00000000000\0"
_TAIL = (
    b"0"
    + bytes(100)
    + b"ustar\0"
    + b"00"
    + bytes(32)
    + bytes(32)
    + b"0000000\0"
    + b"0000000\0"
    + bytes(155)
    + bytes(12)
)
_TAIL_SUM = sum(_TAIL)


def tar_header(name: str, size: int) -> bytes:
    """A ustar header of a plain file: the same bytes for the same name and size, always."""
    encoded = name.encode("utf-8")
    if len(encoded) > MAX_NAME:
        raise ValueError(f"member name {name!r} is longer than {MAX_NAME} bytes; use a shorter key or field")
    if size > MAX_SIZE:
        raise ValueError(f"member {name!r} has {size} bytes, more than a tar header can say; split it")
    front = encoded.ljust(MAX_NAME, b"\0") + _OWNER + b"%011o\0" % size + _TIME
    total = sum(front) + 8 * 0x20 + _TAIL_SUM
    return front + b"%06o\0 " % total + _TAIL


def padding(size: int) -> int:
    """Zero bytes after a member of this size."""
    return -size % BLOCK


def split_name(name: str) -> tuple[str, str] | None:
    """Key and field of a member by WebDataset's rule (the name's first dot divides); None for what is no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    if not dot or not stem or stem.startswith("__"):
        return None
    return folder + slash + stem, field.lower()


def scan_tar(data: Bytes, shard: str) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every plain file of a tar, in order. A torn tar is a ShardError."""
    last = None
    try:
        with tarfile.open(fileobj=_Reading(data), mode="r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                end = member.offset_data + member.size
                if end > len(data):
                    raise ShardError(
                        f"the tar ends inside it: {len(data)} bytes, {end} needed", shard=shard, sample=member.name
                    )
                last = member.name
                yield member.name, member.offset_data, member.size
            end = archive.offset  # where the first empty block lies: behind the last member of any type
    except tarfile.TarError as error:
        raise ShardError(f"not a whole tar ({error}); last whole member: {last}", shard=shard) from error
    if bytes(data[end : end + BLOCK]).strip(b"\0") or len(data) < end + BLOCK:
        raise ShardError(f"the end-of-archive mark is missing; last whole member: {last}", shard=shard)


class _Reading(io.RawIOBase):
    """A file over mapped or fetched bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        stop = len(self._data) if size < 0 else min(self._at + size, len(self._data))
        part = bytes(self._data[self._at : stop])
        self._at = max(stop, self._at)
        return part

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0 if whence == 0 else self._at if whence == 1 else len(self._data))
        return self._at
