"""Encodes and decodes the members of a sample, by the extension of the field's name. Pickles are never written
or read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

try:  # several times as fast on long members
    import orjson
except ImportError:
    orjson = None

from .png import decode_png, encode_png

_NPY_HEADERS: dict[bytes, tuple[np.dtype, tuple[int, ...], bool]] = {}
_MAGIC = b"\x93NUMPY"


def encode_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def decode_json(data: memoryview | bytes) -> Any:
    """Parse JSON with orjson, and with Python what orjson refuses: integers beyond 64 bits, lone surrogates."""
    if orjson is not None:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
    return json.loads(bytes(data))


def encode_npy(array: np.ndarray) -> bytes:
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise ValueError("an array of Python objects would be pickled; give it a plain dtype")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def decode_npy(data: memoryview | bytes) -> np.ndarray:
    """A read-only array over the given bytes, without a copy. Parsed headers are cached, since samples share them."""
    # version 1 is what numpy writes unless the header is huge: magic, 1, 0, and two bytes of length
    size = 10 + data[8] + 256 * data[9] if len(data) > 10 and data[6] == 1 else 0
    header = bytes(data[:size])
    known = _NPY_HEADERS.get(header)
    if known is None:
        known, size = _parse_npy_header(data)
        if size == len(header):
            if len(_NPY_HEADERS) > 4096:
                _NPY_HEADERS.clear()
            _NPY_HEADERS[header] = known
    dtype, shape, fortran = known
    array = np.frombuffer(data, dtype, -1 if dtype.itemsize else 0, size)
    if len(shape) == 1 and shape[0] == array.size:
        return array
    return array.reshape(shape, order="F" if fortran else "C")


def _parse_npy_header(data: memoryview | bytes) -> tuple[tuple[np.dtype, tuple[int, ...], bool], int]:
    if bytes(data[:6]) != _MAGIC:
        raise ValueError("not an npy array")
    stream = io.BytesIO(bytes(data[: 1 << 16]))
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version} is not read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("the array is pickled; refused")
    return (dtype, shape, fortran), stream.tell()


def encode_text(value: str) -> bytes:
    return value.encode("utf-8")


def decode_text(data: memoryview | bytes) -> str:
    return str(data, "utf-8")


ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "json": encode_json,
    "npy": encode_npy,
    "txt": encode_text,
    "png": encode_png,
}
DECODERS: dict[str, Callable[[memoryview], Any]] = {
    "json": decode_json,
    "npy": decode_npy,
    "txt": decode_text,
    "png": decode_png,
}


def encoder(field: str) -> Callable[[Any], bytes] | None:
    """The encoder of a field's values; None if only bytes are allowed."""
    return ENCODERS.get(field.rpartition(".")[2])


def decoder(field: str) -> Callable[[memoryview], Any]:
    """The decoder of a field; unknown extensions stay bytes. pyd, pickle and pt are never opened."""
    return DECODERS.get(field.rpartition(".")[2], bytes)
