"""Messages between a host and its child. Plain values are sent as they are; others stay sealed outside the child."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import reprlib
import socket
import struct
from dataclasses import dataclass
from types import NoneType
from typing import Any

LARGEST_MESSAGE = 100_000_000
HEADER = struct.Struct("!Q")  # the length of what follows
_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, tuple, list, dict, set, frozenset})
_METHODS = {"scores": "score", "start": "play", "answer": "play", "replay": "play"}


@dataclass(frozen=True)
class Sealed:
    """A value of a user's class. The host passes it back unopened, so it never imports user code."""

    blob: bytes
    shown: str  # how the child shows it, cut short

    def __repr__(self) -> str:
        return f"Sealed({self.shown})"


class _ChildPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return None if type(obj) in _PLAIN else (pickle.dumps(obj), show(obj))


class _HostPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.blob if type(obj) is Sealed else None


class _ChildUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pickle.loads(pid)  # noqa: S301  # made by this child or the one before it


class _HostUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return Sealed(*pid)

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"the message names {module_name}.{global_name}, and opening it could run code")


def _pack(pickler: type[pickle.Pickler], value: Any) -> bytes:
    stream = io.BytesIO()
    pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def pack_in_host(value: Any) -> bytes:
    """The bytes of a value for the child; sealed values unchanged."""
    return _pack(_HostPickler, value)


def pack_in_child(value: Any) -> bytes:
    """The bytes of a value for the host; values that are not plain are sealed."""
    return _pack(_ChildPickler, value)


def unpack_in_host(blob: bytes) -> Any:
    """A value from a child. Only plain values are built: no class is looked up."""
    return _HostUnpickler(io.BytesIO(blob)).load()


def unpack_in_child(blob: bytes) -> Any:
    """A value from the host, with sealed values opened."""
    return _ChildUnpickler(io.BytesIO(blob)).load()


def send_frame(wire: socket.socket, blob: bytes) -> None:
    """Send one message; the socket's timeout applies to each of its two parts."""
    wire.sendall(HEADER.pack(len(blob)))
    wire.sendall(blob)


class ChildWire:
    """The child's end. A fork of the process made by user code exits here: it must neither read nor answer."""

    def __init__(self, descriptor: int) -> None:
        self.socket, self.owner = socket.socket(fileno=descriptor), os.getpid()
        self.socket.settimeout(None)
        os.set_inheritable(descriptor, False)

    def send(self, blob: bytes) -> None:
        """One message to the host."""
        if os.getpid() != self.owner:
            os._exit(0)
        send_frame(self.socket, blob)

    def reply(self, place: int, answer: tuple[Any, ...], target: str) -> None:
        """Send the answer to a call, or the reason if it cannot be pickled or is too large."""
        try:
            blob = pack_in_child((place, answer))
            why = f"{len(blob):,} bytes; at most {LARGEST_MESSAGE:,} are carried" if len(blob) > LARGEST_MESSAGE else ""
        except Exception as error:
            blob, why = b"", f"what cannot be pickled: {type(error).__name__}: {error}"
        self.send(pack_in_child((place, ("invalid", f"{target}: gave {why}"))) if why else blob)

    def receive(self) -> bytes | None:
        """The next message; None when the host has gone."""
        header = self._exactly(HEADER.size)
        return None if header is None else self._exactly(HEADER.unpack(header)[0])

    def _exactly(self, size: int) -> bytes | None:
        got = bytearray()
        while len(got) < size:
            part = self.socket.recv(min(1 << 20, size - len(got)))
            if not part:
                return None
            got += part
        return bytes(got)


def name_call(target: str, kind: str) -> str:
    """The name of the user's function that a call runs, for error messages."""
    method = _METHODS.get(kind, kind)
    return target if method == "score" else f"{target}.{method}"


def digest(said: Any) -> bytes:
    """A short fingerprint of a prompt, to compare a replay with."""
    return hashlib.blake2b(repr(said).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def show(value: Any) -> str:
    """A value for an error message, cut short."""
    text = reprlib.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
