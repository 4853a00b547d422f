"""The rendezvous store of the ranks. On one machine it listens on loopback only; torch's own would listen on all
interfaces.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from .ports import is_loopback


def open_store(
    host: str, port: int, is_leader: bool, timeout: timedelta, world: int | None = None, wait: bool = True
) -> TCPStore:
    """A TCPStore at host:port, listening on loopback only where the host is loopback."""
    if not is_leader or not is_loopback(host):
        return TCPStore(host, port, world, is_leader, timeout, wait_for_workers=wait)
    listener = socket.create_server((host, port), backlog=1024)
    # torch takes ownership of the descriptor
    return TCPStore(host, port, world, True, timeout, wait_for_workers=wait, master_listen_fd=listener.detach())
