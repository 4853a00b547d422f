"""The run's shared secret: a file that only the run's owner can read. Processes that can read it belong to the run."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from .errors import StorageError
from .files import make_folder, storage_errors

FILE = "secret"


def make_secret(run: Path) -> bytes:
    """The secret of a run directory, written on its first start."""
    path = make_folder(run) / FILE
    with storage_errors(path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return read_secret(run)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
    return read_secret(run)


def read_secret(run: Path, wait_s: float = 0.0) -> bytes:
    """The secret that the first node wrote; on a network file system it may take a while to appear."""
    path, deadline = run / FILE, time.monotonic() + wait_s
    while True:
        text = path.read_text() if path.is_file() else ""
        if len(text) == 64:
            break
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{path}: missing or incomplete; the first node writes it, and --run must lie on a file system that "
                "all nodes share"
            )
        time.sleep(0.5)
    if path.stat().st_mode & 0o077:
        raise StorageError(f"{path}: others may read it; chmod 600 it, or delete it and start all nodes again")
    return text.encode()


def sign(secret: bytes, *parts: str) -> str:
    """An HMAC over some texts."""
    return hmac.new(secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def signed(secret: bytes, mac: object, *parts: str) -> bool:
    """Whether a signature is valid."""
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(), sign(secret, *parts).encode())
