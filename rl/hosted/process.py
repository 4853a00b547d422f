"""A child process with one socket: started, called with time limits, and killed with everything it started."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from .wire import HEADER, LARGEST_MESSAGE, send_frame, unpack_in_host

_CODE = """
import sys
sys.path[:] = sys.argv[3:]
from terrella.rl.hosted.child import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""
STARTING_S = 60.0
# bytes that all rewards and environments of a process, a rank of a run or a check, may print: a loop of prints fills a
# disk in minutes
MOST_PRINTS = 16_000_000
LAST_PRINTS = 2_000  # bytes of what is left out that are shown all the same: the last ones say where a child was


class Lost(Exception):
    """The child did not answer: it is late, or dead. The message continues a sentence that names the call."""


class Late(Lost):
    """The child is still running at its deadline."""


@functools.cache
def _starter(process: int) -> ThreadPoolExecutor:
    """A thread that starts children. They die with the thread that started them, so it must live as long as the
    process.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="hosted")


class Prints:
    """What children print goes to this process's stderr, up to a bound over all of them."""

    def __init__(self) -> None:
        self.shown, self._lock = 0, threading.Lock()

    def show(self, part: bytes) -> bytes:
        """Write as much as the bound allows; returns the rest."""
        with self._lock:  # two children at once would both see the same remaining space
            room = max(MOST_PRINTS - self.shown, 0)
            self.shown += len(part[:room])
        _write_stderr(part[:room])
        return part[room:]

    def follow(self, pipe: IO[bytes], name: str) -> None:
        """Read until the pipe is closed, even output that is dropped: a full pipe would block the child."""
        left_out, last = 0, b""
        if sys.platform == "linux":
            with suppress(OSError):  # over the user's limit: the usual 64 kB cost 16 times the context switches
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        with pipe:
            while part := pipe.read(1 << 20):
                rest = self.show(part)
                if rest and not left_out:
                    limit = f"{MOST_PRINTS:,} bytes of prints are shown"
                    _write_stderr(f"\nprints by {name} are left out from here on: {limit}\n".encode())
                left_out, last = left_out + len(rest), (last + rest)[-LAST_PRINTS:]
        if left_out:
            said = f"\n{left_out:,} bytes of prints by {name} were left out; the last of them:\n"
            _write_stderr(said.encode() + last + b"\n")


PRINTS = Prints()


def _write_stderr(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # a full disk or a closed terminal must not block the child
        pass


class ChildProcess:
    """A fresh interpreter, not a fork: the parent has threads and may use a GPU."""

    def __init__(self, environ: Mapping[str, str], name: str) -> None:
        self.wire, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-X",
                "faulthandler",
                "-c",
                _CODE,
                str(theirs.fileno()),
                str(os.getpid()),
                *sys.path,
            ]
            start = functools.partial(
                subprocess.Popen,
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is for the parent; and the group can be killed as one
            )
            self.process: subprocess.Popen[bytes] = _starter(os.getpid()).submit(start).result(STARTING_S)
        self.reader = threading.Thread(target=PRINTS.follow, args=(self.process.stderr, name), daemon=True)
        self.reader.start()

    @property
    def alive(self) -> bool:
        """Whether the child is still running."""
        return self.process.poll() is None

    def send(self, blob: bytes, limit_s: float) -> None:
        """One message to the child."""
        try:
            self.wire.settimeout(limit_s)
            send_frame(self.wire, blob)
        except TimeoutError as error:
            raise Lost(f"did not begin within {limit_s:g} s; its process was killed") from error
        except OSError as error:
            raise Lost(self._death()) from error

    def receive(self, limit_s: float) -> Any:
        """The next message of the child, within the limit."""
        end = time.monotonic() + limit_s
        (size,) = HEADER.unpack(self._exactly(HEADER.size, end, limit_s))
        if size > LARGEST_MESSAGE:
            raise Lost(f"wrote into descriptors that are not its own: a message of {size:,} bytes")
        blob = self._exactly(size, end, limit_s)
        try:
            return unpack_in_host(blob)
        except Exception as error:
            raise Lost(f"wrote into descriptors that are not its own: {type(error).__name__}: {error}") from error

    def _exactly(self, size: int, end: float, limit_s: float) -> bytes:
        got = bytearray()
        while len(got) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise Late(f"did not finish within {limit_s:g} s; its process was killed")
            self.wire.settimeout(min(left, 0.5))  # a fork of the child may keep the wire open after the child's death
            try:
                part = self.wire.recv(min(1 << 20, size - len(got)))
            except TimeoutError:
                if self.alive:
                    continue
                raise Lost(self._death()) from None
            except OSError as error:
                raise Lost(self._death()) from error
            if not part:
                raise Lost(self._death())
            got += part
        return bytes(got)

    def _death(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed the descriptor that its results go through; its process was killed"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"ended its process by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def kill(self, say_where: bool = False) -> None:
        """End the child and its process group; where it was first, in the log, if that is of use."""
        if say_where and self.alive:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:  # the group is empty
            self.process.kill()
        self.process.wait(30)
        self.reader.join(1.0)  # what it printed last; a process that left the group may hold the pipe for longer
        self.wire.close()
