"""Encoded pictures to pixels and back: PNG by our own codec, JPEG and lossless WebP through Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from .png import decode_png


def encode_webp(pixels: np.ndarray) -> bytes:
    """Lossless WebP."""
    stream = io.BytesIO()
    # exact: without it the colours under full transparency are not kept
    _pillow().fromarray(pixels).save(stream, format="WEBP", lossless=True, exact=True)
    return stream.getvalue()


def decode_picture(value: Any) -> np.ndarray:
    """Pixels of a frame as a sample holds it: an array already (PNG), or the bytes of a JPEG or WebP."""
    if isinstance(value, np.ndarray):
        return value
    if bytes(value[:4]) == b"\x89PNG":
        return decode_png(value)
    return np.asarray(_pillow().open(io.BytesIO(value)))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("JPEG and WebP frames need Pillow; install terrella[data]") from error
    return Image
