"""A small lossless PNG codec for 8-bit grey and RGB frames: enough to store video without an imaging library."""

from __future__ import annotations

import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_PIXELS = 1 << 26  # 8,192 x 8,192
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}


def encode_png(image: np.ndarray) -> bytes:
    """uint8 [H, W] or [H, W, 3] as PNG. Each row is stored as its difference to the row above, which suits camera
    pictures.
    """
    image = np.asarray(image)
    _check_frame(image)
    return _SIGNATURE + _head(image) + _chunk(b"IDAT", _filtered(image)) + _chunk(b"IEND", b"")


def encode_apng(frames: np.ndarray, delay_ms: int) -> bytes:
    """uint8 [T, H, W, 3] as an animated PNG that plays for ever; a reader without animation shows the first frame."""
    frames = np.asarray(frames)
    _check_frame(frames[0])
    height, width = frames.shape[1:3]
    out = [_SIGNATURE, _head(frames[0]), _chunk(b"acTL", struct.pack(">II", len(frames), 0))]
    number = 0
    for i, frame in enumerate(frames):
        out.append(_chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, 0, 0, delay_ms, 1000, 0, 0)))
        number += 1
        body = _filtered(frame)
        if i == 0:
            out.append(_chunk(b"IDAT", body))
        else:
            out.append(_chunk(b"fdAT", struct.pack(">I", number) + body))
            number += 1
    return b"".join([*out, _chunk(b"IEND", b"")])


def _check_frame(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise ValueError(f"a frame must be uint8 [H, W] or [H, W, 1|3|4], not {image.dtype} {image.shape}")


def _head(image: np.ndarray) -> bytes:
    channels = 1 if image.ndim == 2 else image.shape[2]
    colour = {1: 0, 3: 2, 4: 6}[channels]
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, colour, 0, 0, 0))


def _filtered(image: np.ndarray) -> bytes:
    """Rows as differences to the row above, compressed."""
    rows = image.reshape(image.shape[0], -1)
    filtered = np.empty((rows.shape[0], rows.shape[1] + 1), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return zlib.compress(filtered.tobytes())


def decode_png(data: memoryview | bytes) -> np.ndarray:
    """The pixels of an 8-bit, non-interlaced PNG (grey, RGB, with or without alpha); other kinds are refused by
    name.
    """
    raw = bytes(data)
    if raw[:8] != _SIGNATURE:
        raise ValueError("not a PNG")
    at, packed, head = 8, [], None
    while at + 12 <= len(raw):
        size, kind = struct.unpack(">I4s", raw[at : at + 8])
        body = raw[at + 8 : at + 8 + size]
        if at + 12 + size > len(raw) or struct.unpack(">I", raw[at + 8 + size : at + 12 + size])[0] != zlib.crc32(
            kind + body
        ):
            raise ValueError(f"PNG chunk {kind.decode('latin-1')} is damaged")
        if kind == b"IHDR":
            if size != 13:
                raise ValueError("PNG header is damaged")
            head = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed.append(body)
        at += 12 + size
    if head is None:
        raise ValueError("PNG without a header")
    width, height, depth, colour, _, _, interlace = head
    if depth != 8 or colour not in _CHANNELS or interlace:
        raise ValueError(
            f"PNG of depth {depth}, colour type {colour}, interlace {interlace} is not read; store 8-bit grey or RGB"
        )
    channels = _CHANNELS[colour]
    size = height * (width * channels + 1)
    if not 0 < height * width <= MOST_PIXELS:
        raise ValueError(f"PNG of {width} x {height} pixels; at most {MOST_PIXELS} are read")
    unpack = zlib.decompressobj()
    try:
        found = unpack.decompress(b"".join(packed), size + 1)  # a few kilobytes may claim to be gigabytes
    except zlib.error as error:
        raise ValueError(f"PNG pixels are damaged: {error}") from error
    if len(found) != size:
        raise ValueError(f"PNG of {width} x {height} pixels holds {'more' if len(found) > size else 'fewer'} of them")
    rows = np.frombuffer(found, np.uint8).reshape(height, width * channels + 1)
    pixels = _unfilter(rows[:, 0], rows[:, 1:], channels)
    return pixels.reshape(height, width) if channels == 1 else pixels.reshape(height, width, channels)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _unfilter(filters: np.ndarray, rows: np.ndarray, channels: int) -> np.ndarray:
    if (filters == 2).all():
        return np.cumsum(rows, axis=0, dtype=np.uint8)
    out = np.zeros(rows.shape, np.uint8)
    above = np.zeros(rows.shape[1], np.uint8)
    for y, (how, row) in enumerate(zip(filters.tolist(), rows, strict=True)):
        if how == 0:
            out[y] = row
        elif how == 1:
            out[y] = np.cumsum(row.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
        elif how == 2:
            out[y] = row + above
        elif how in (3, 4):
            out[y] = _predicted_row(how, row.astype(int), above.astype(int), channels)
        else:
            raise ValueError(f"PNG row filter {how} does not exist")
        above = out[y]
    return out


def _predicted_row(how: int, row: np.ndarray, above: np.ndarray, channels: int) -> np.ndarray:
    """The average (3) and Paeth (4) filters need the pixel to the left, so they go pixel by pixel."""
    line = row.reshape(-1, channels)
    upper = above.reshape(-1, channels)
    left = corner = np.zeros(channels, int)
    for x in range(len(line)):
        up = upper[x]
        if how == 3:
            guess = (left + up) // 2
        else:
            base = left + up - corner
            a, b, c = abs(base - left), abs(base - up), abs(base - corner)
            guess = np.where((a <= b) & (a <= c), left, np.where(b <= c, up, corner))
        line[x] = (line[x] + guess) & 255
        left, corner = line[x], up
    return line.reshape(-1)
