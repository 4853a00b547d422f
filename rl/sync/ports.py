"""Ports for local services."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]
