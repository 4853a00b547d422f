"""Ports for services of this machine."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError

FIRST, LAST = 20_000, 32_768
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def free_port() -> int:
    """A port of this machine that is free now. It lies below those that the kernel gives to outgoing connections:
    whoever is to listen there may need many seconds to start, and meanwhile no connection gets it by chance."""
    try:
        last = min(LAST, int(OUTGOING.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        last = LAST
    draw = random.SystemRandom()
    for port in [draw.randrange(FIRST, last) for _ in range(50)] if last > FIRST else []:
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                return port
        except OSError:
            continue
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def listening_at(host: str, port: int) -> Iterator[None]:
    """A block that listens where the options --host and --port say; an address that cannot be had is named by them."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error}); --port 0 takes a free port"
        ) from error
