"""WebDataset shards of other programs, read as their pipelines read them: brace-expanded paths and URLs, several lists
joined by `::`, `pipe:` commands, tars plain or packed.

The webdataset library opens, expands and groups; a shard that ends early, which it takes for a short one, is refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from webdataset.gopen import gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys, tar_file_expander

from ...core.errors import ConfigError
from ..errors import ShardError
from ..shards.tar import BLOCK
from .base import Item

PACKED = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}  # by a file's first bytes
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def shard_urls(source: str) -> list[str]:
    """The shards that a folder holds, or that paths and URLs with braces name."""
    if Path(source).is_dir():
        found = sorted(str(p) for p in Path(source).iterdir() if p.name.endswith(ENDINGS))
        if not found:
            raise ConfigError(f"{source}: no {', '.join(ENDINGS)} file here")
        return found
    urls = expand_urls(source)
    missing = [url for url in urls if ":" not in url and not Path(url).is_file()]
    if missing:
        raise ConfigError(f"{missing[0]}: not there ({len(missing)} of {len(urls)} shards are missing)")
    return urls


def read(source: str | Path, cursor: list[int] | None, keys: str = "theirs") -> Iterator[Item]:
    """Every sample as bytes, shard by shard; `keys` numbers calls them by their place, where shards repeat keys."""
    if keys not in ("theirs", "numbers"):
        raise ConfigError(f"-o keys={keys}: expected theirs or numbers")
    urls = shard_urls(str(source))
    first, taken = cursor or (0, 0)
    for number, url in enumerate(urls[first:], first):
        for i, sample in enumerate(_samples(url), 1):
            if number == first and i <= taken:
                continue
            members = {name: value for name, value in sample.items() if not name.startswith("__")}
            theirs = sample["__key__"]
            key = theirs if keys == "theirs" else f"{number:06d}-{i - 1:09d}"
            yield Item([number, i], members, key, where=f"{url}: sample {theirs}", done=(number + 0.5) / len(urls))


def _samples(url: str) -> Iterator[dict[str, Any]]:
    """The samples of one shard; what is wrong with it is a ShardError that names it."""
    try:
        with gopen(url) as opened, _unpacked(opened) as stream:
            whole = _Ending(stream)
            yield from group_by_keys(tar_file_expander(iter([{"url": url, "stream": whole}])))
            if whole.last().strip(b"\0") or len(whole.last()) < BLOCK:
                raise ShardError("the end-of-archive mark is missing: the shard is not whole", shard=url)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise ShardError(f"cannot be read: {error}", shard=url) from error


def _unpacked(opened: Any) -> Any:
    stream = io.BufferedReader(_Raw(opened))
    unpack = PACKED.get(stream.peek(2)[:2])
    return stream if unpack is None else unpack(stream)


class _Raw(io.RawIOBase):
    """A stream for objects that only have `read`, such as the output of a command."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Ending:
    """Passes a stream through and remembers how it ended: tarfile stops at the first empty block, and also accepts a
    truncated tar without one.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._last = stream, b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._last = (self._last + data)[-BLOCK:]
        return data

    def last(self) -> bytes:
        """The last block, after reading the rest."""
        while self.read(1 << 20):
            pass
        return self._last
