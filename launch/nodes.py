"""Several machines in one run: every node starts a launcher, the first one holds the lease, and none starts before all
are compatible.

The first node listens at the coordinator's address. Each other node introduces itself (host, versions, settings, clock,
GPUs). Once all have arrived and agree they get the lease's token and the rendezvous port of the ranks, otherwise the
reason for the refusal. Both sides sign their messages with the run's secret (core/secret.py), a file in the shared run
directory; callers without it are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..core import lease as leases
from ..core.environment import versions
from ..core.errors import ConfigError, DeadlineError, StorageError
from ..core.ports import is_loopback
from ..core.secret import sign, signed

GATHER_S = 300.0
CLOCK_SKEW_S = 5.0
DOUBTS = 3  # how often a clock must seem wrong before it is refused
HEAR_S = 10.0  # for a caller to introduce itself
AT_ONCE = 256  # callers handled at a time
LINE_BYTES = 1 << 20
SHARED_S = 30.0  # until a lease written on one node is visible on another; network file systems cache


@dataclass(frozen=True)
class Place:
    """Which of the run's machines this is."""

    node: int = 0
    nodes: int = 1
    coordinator: str = "127.0.0.1:29400"  # host:port of the first node

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ConfigError(f"--node-rank: {self.node} is not between 0 and {self.nodes - 1}")
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--coordinator: '{self.coordinator}' must be host:port of the first node")

    @property
    def leads(self) -> bool:
        return self.node == 0

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    def ranks_here(self, ranks: int) -> int:
        """Processes on this machine of `ranks` in all."""
        if ranks % self.nodes:
            raise ConfigError(
                f"ranks: {ranks} processes cannot be spread evenly over {self.nodes} nodes; change ranks or --nodes"
            )
        return ranks // self.nodes


def introduce(place: Place, digest: str) -> dict[str, Any]:
    """What a node tells the first node about itself."""
    return {
        "node": place.node,
        "host": socket.gethostname(),
        "digest": digest,
        "versions": versions(),
        "gpus": count_gpus(),
        "time": time.time(),
    }


def count_gpus() -> int:
    """GPUs that the driver lists on this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def disagreement(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why two nodes cannot train together, or None."""
    who = f"node {other['node']} ({other['host']})"
    if other["digest"] != first["digest"]:
        return (
            f"{who} has other settings than the first node ({first['host']}): the recipe file differs between the "
            "machines"
        )
    wrong = sorted(k for k in first["versions"] if other["versions"].get(k) != first["versions"][k])
    if wrong:
        theirs, ours = other["versions"].get(wrong[0], "none"), first["versions"][wrong[0]]
        return f"{who} has {wrong[0]} {theirs}, the first node ({first['host']}) {ours}; install the same everywhere"
    if other["gpus"] != first["gpus"]:
        return (
            f"{who} sees {other['gpus']} GPUs, the first node ({first['host']}) {first['gpus']}; drain the node "
            "or check its driver"
        )
    if abs(other["time"] - other["heard"]) > CLOCK_SKEW_S:
        return (
            f"{who}: its clock is {other['time'] - other['heard']:+.0f} s off the first node's; start a time "
            "service there"
        )
    return None


def gather(
    place: Place, me: dict[str, Any], reply: dict[str, Any], secret: bytes, timeout_s: float = GATHER_S
) -> list[dict[str, Any]]:
    """On the first node: wait for all others, compare them, and admit them or tell them why not. Callers without the
    secret are ignored.
    """
    deadline = time.monotonic() + timeout_s
    waiting: dict[int, tuple[dict[str, Any], str, socket.socket]] = {}
    doubts: list[int] = []  # nodes whose clock seemed wrong
    heard: queue.SimpleQueue[tuple[dict[str, Any], str, socket.socket] | None] = queue.SimpleQueue()
    talking, strangers = 0, 0
    with _listen(place) as server:
        server.settimeout(0.05)
        while len(waiting) < place.nodes - 1:
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, place.nodes)) - set(waiting))
                wrong = f"; {strangers} callers did not know the run's secret" if strangers else ""
                raise DeadlineError(
                    f"nodes {missing} of {place.nodes} did not call {place.coordinator} within {timeout_s:.0f} s{wrong}"
                )
            with contextlib.suppress(OSError):  # a timeout, or a caller that left at once
                caller, _ = server.accept()
                if talking < AT_ONCE:
                    talking += 1
                    threading.Thread(target=_hear, args=(caller, secret, place.nodes, heard), daemon=True).start()
                else:
                    caller.close()  # it calls again
            while not heard.empty():
                talking -= 1
                call = heard.get()
                if call is None:
                    strangers += 1
                    continue
                hello, nonce, caller = call
                if abs(hello["time"] - hello["heard"]) > CLOCK_SKEW_S and doubts.count(hello["node"]) < DOUBTS:
                    doubts.append(hello["node"])
                    # it calls again: a busy machine may just be slow, a wrong clock stays wrong
                    caller.close()
                    continue
                waiting[hello["node"]] = hello, nonce, caller
    for _, _, caller in [*waiting.values()][:1]:
        me["address"] = caller.getsockname()[0]  # its own host name may resolve to loopback here
    problem = next(filter(None, (disagreement(me, hello) for hello, _, _ in waiting.values())), None)
    answer = json.dumps({"error": problem} if problem else reply)
    for _, nonce, caller in waiting.values():
        with caller, contextlib.suppress(OSError):
            caller.sendall(
                json.dumps({"answer": answer, "mac": sign(secret, "answer", nonce, answer)}).encode() + b"\n"
            )
    if problem:
        raise ConfigError(problem)
    return [hello for hello, _, _ in waiting.values()]


def _listen(place: Place) -> socket.socket:
    """Listen at the coordinator's address only, unless its name resolves differently here than on the other nodes."""
    try:
        address = socket.gethostbyname(place.host)
        everywhere = is_loopback(address) and not is_loopback(place.host)
        return socket.create_server(("" if everywhere else address, place.port), backlog=place.nodes)
    except OSError as error:
        raise ConfigError(
            f"--coordinator: cannot listen at {place.coordinator} ({error}); it must name the first node"
        ) from error


def _hear(caller: socket.socket, secret: bytes, nodes: int, heard: queue.SimpleQueue) -> None:
    """Read and check one caller's introduction; None if it does not know the secret."""
    try:
        caller.settimeout(HEAR_S)
        nonce = secrets.token_hex(16)
        caller.sendall(json.dumps({"nonce": nonce}).encode() + b"\n")
        said = json.loads(_line(caller, HEAR_S))
        if not signed(secret, said["mac"], "hello", nonce, said["hello"]):
            raise ValueError("a wrong signature")
        hello = {**json.loads(said["hello"]), "heard": time.time()}
        kinds = {"node": int, "host": str, "digest": str, "versions": dict, "gpus": int, "time": int | float}
        if not all(isinstance(hello[key], kind) for key, kind in kinds.items()) or not 0 < hello["node"] < nodes:
            raise ValueError("not an introduction")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        caller.close()
        heard.put(None)
        return
    heard.put((hello, nonce, caller))


def join(place: Place, me: dict[str, Any], secret: bytes, timeout_s: float = GATHER_S) -> dict[str, Any]:
    """On every other node: introduce this node to the first one and wait for its answer."""
    deadline = time.monotonic() + timeout_s
    last = "nothing listens there"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((place.host, place.port), timeout=5.0) as line:
                nonce = json.loads(_line(line, HEAR_S))["nonce"]
                hello = json.dumps({**me, "time": time.time()})
                line.sendall(json.dumps({"hello": hello, "mac": sign(secret, "hello", nonce, hello)}).encode() + b"\n")
                said = json.loads(_line(line, max(0.01, deadline - time.monotonic())))
                if not signed(secret, said["mac"], "answer", nonce, said["answer"]):
                    raise ValueError("what answers there does not know the run's secret")
                answer = json.loads(said["answer"])
                if answer.get("error"):
                    raise ConfigError(answer["error"])
                me["address"] = line.getsockname()[0]
                return answer
        except (OSError, ValueError, KeyError, TypeError) as error:
            last = str(error)
            time.sleep(0.5)
    raise DeadlineError(f"the first node did not answer at {place.coordinator} within {timeout_s:.0f} s ({last})")


def choose_interface(address: str) -> str:
    """Let gloo use the network interface over which the nodes are connected, unless GLOO_SOCKET_IFNAME names one
    (`launch --interface`). Returns the choice, as text for the user.
    """
    cards = psutil.net_if_addrs()
    found = next((name for name, known in cards.items() if address in {entry.address for entry in known}), None)
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "its own choice") for name in ("GLOO", "NCCL"))
    return f"met at {address}; network interface of gloo: {gloo}, of NCCL: {nccl}"


def require_shared(
    folder: Path, token: str, wait_s: float = SHARED_S, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Check that the first node's lease is visible here: otherwise the run directory is not shared."""
    deadline = time.monotonic() + wait_s
    while not leases.holds(folder, token):
        if time.monotonic() > deadline:
            raise StorageError(
                f"{folder}: node {socket.gethostname()} does not see the first node's lease here; "
                "--run must lie on a file system that all nodes share"
            )
        sleep(0.5)


def _line(connection: socket.socket, timeout_s: float) -> str:
    """Read one line, bounded in time and length."""
    deadline, data = time.monotonic() + timeout_s, b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > LINE_BYTES:
            raise OSError("the other side sent no complete line")
        connection.settimeout(left)
        part = connection.recv(65536)
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data.decode()
