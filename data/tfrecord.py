"""TFRecord files and tf.train.Example records, read without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from .errors import ShardError

Feature = list[bytes] | np.ndarray

_POLYNOMIAL = 0x82F63B78
_LANE = 256  # bytes


@cache
def _table() -> np.ndarray:
    value = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        value = np.where(value & 1, (value >> 1) ^ np.uint32(_POLYNOMIAL), value >> 1).astype(np.uint32)
    return value


@cache
def _shift_tables() -> list[list[int]]:
    """Tables that append a lane of zero bytes to a checksum: one for each of its four bytes."""
    table = _table()
    basis = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(_LANE):
        basis = table[basis & 0xFF] ^ (basis >> np.uint32(8))
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return [
        np.bitwise_xor.reduce(np.where(bits, basis[8 * b : 8 * b + 8], 0), axis=1).astype(np.uint32).tolist()
        for b in range(4)
    ]


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum. Long data is summed in lanes side by side, which are then joined."""
    table = _table()
    crc, lanes = 0xFFFFFFFF, len(data) // _LANE
    if lanes >= 16:
        rows = np.frombuffer(data, np.uint8, lanes * _LANE).reshape(lanes, _LANE)
        sums = np.zeros(lanes, np.uint32)
        sums[0] = crc
        for column in np.ascontiguousarray(rows.T):
            sums = table[(sums ^ column) & 0xFF] ^ (sums >> np.uint32(8))
        a, b, c, d = _shift_tables()
        crc = int(sums[0])
        for part in sums[1:].tolist():
            crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ part
        data = data[lanes * _LANE :]
    listed = table.tolist() if len(data) > 64 else table
    for byte in data:
        crc = int(listed[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The form in which TFRecord stores a checksum."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset after it, record) from byte `start` on; a torn or damaged file is a ShardError that names the record."""
    with open(path, "rb") as stream:
        stream.seek(start)
        number = 0
        while head := stream.read(12):
            where = f"{number} after byte {start}"
            if len(head) < 12:
                raise ShardError("the file ends inside a record's header", shard=str(path), sample=where)
            size, stated = struct.unpack("<QI", head)
            if masked(crc32c(head[:8])) != stated:
                raise ShardError(
                    "the checksum of a length differs: not a TFRecord file, or damaged", shard=str(path), sample=where
                )
            body = stream.read(size + 4)
            if len(body) < size + 4:
                raise ShardError("the file ends inside a record", shard=str(path), sample=where)
            data = body[:size]
            if masked(crc32c(data)) != struct.unpack("<I", body[size:])[0]:
                raise ShardError("the checksum of a record differs", shard=str(path), sample=where)
            number += 1
            yield stream.tell(), data


def parse_example(data: bytes) -> dict[str, Feature]:
    """The features of a serialized tf.train.Example: lists of bytes, float32 arrays or int64 arrays."""
    features: dict[str, Feature] = {}
    for field, value in _fields(memoryview(data)):
        if field != 1:
            continue
        for inner, entry in _fields(_message(value)):
            if inner == 1:
                parts = dict(_fields(_message(entry)))
                features[bytes(_message(parts[1])).decode("utf-8")] = _feature(_message(parts[2])) if 2 in parts else []
    return features


def _feature(data: memoryview) -> Feature:
    for field, value in _fields(data):
        items = [v for number, v in _fields(_message(value)) if number == 1]
        if field == 1:
            return [bytes(_message(v)) for v in items]
        if field == 2:
            # packed values come as one run of bytes, unpacked ones as 4 bytes each: the same bytes in the end
            return np.frombuffer(b"".join(bytes(_message(v)) for v in items), "<f4")
        if field == 3:
            values = [n for v in items for n in ([v] if isinstance(v, int) else _varints(v))]
            return np.array(values, dtype=np.uint64).astype(np.int64)
    return []


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("not a tf.train.Example: a number where a message belongs")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, varint or bytes) of a protocol buffer message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"not a tf.train.Example: wire type {wire}")
        if at + size > len(data):
            raise ValueError("not a tf.train.Example: a field runs past the end")
        yield field, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("not a tf.train.Example: a broken number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value
