"""Several machines in one run: every node starts a launcher, the first holds the lease, and none starts before all fit together.

The first node listens at the coordinator's address. Each other node says who it is (host, versions, settings, clock, GPUs); when all
have come and agree they get the lease's token and the port where the ranks meet, else the reason why not.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import lease as leases
from ..core.environment import versions
from ..core.errors import ConfigError, DeadlineError, StorageError

GATHER_S = 300.0
CLOCK_SKEW_S = 5.0
DOUBTS = 3  # how often a clock must seem wrong before it is called so
SHARED_S = 30.0  # until a lease written on one node is seen on another; network file systems cache


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
            raise ConfigError(f"ranks: {ranks} processes cannot be spread evenly over {self.nodes} nodes; change ranks or --nodes")
        return ranks // self.nodes


def introduce(place: Place, digest: str) -> dict[str, Any]:
    """What the first node must know of another before it lets it in."""
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
    """Why two nodes must not train together, or None."""
    who = f"node {other['node']} ({other['host']})"
    if other["digest"] != first["digest"]:
        return f"{who} has other settings than the first node ({first['host']}): the recipe file differs between the machines"
    wrong = sorted(k for k in first["versions"] if other["versions"].get(k) != first["versions"][k])
    if wrong:
        theirs, ours = other["versions"].get(wrong[0], "none"), first["versions"][wrong[0]]
        return f"{who} has {wrong[0]} {theirs}, the first node ({first['host']}) {ours}; install the same everywhere"
    if other["gpus"] != first["gpus"]:
        return f"{who} sees {other['gpus']} GPUs, the first node ({first['host']}) {first['gpus']}; drain the node or check its driver"
    if abs(other["time"] - other["heard"]) > CLOCK_SKEW_S:
        return f"{who}: its clock is {other['time'] - other['heard']:+.0f} s off the first node's; start a time service there"
    return None


def gather(place: Place, me: dict[str, Any], reply: dict[str, Any], timeout_s: float = GATHER_S) -> list[dict[str, Any]]:
    """On the first node: wait for all others, compare them, and let them in or say why not."""
    deadline = time.monotonic() + timeout_s
    waiting: dict[int, tuple[dict[str, Any], socket.socket]] = {}
    doubts: list[int] = []  # nodes whose clock seemed wrong
    with socket.create_server(("", place.port), backlog=place.nodes) as server:
        while len(waiting) < place.nodes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                caller, _ = server.accept()
                caller.settimeout(10.0)
                hello = json.loads(_line(caller))
            except TimeoutError:
                missing = sorted(set(range(1, place.nodes)) - set(waiting))
                if time.monotonic() < deadline:
                    continue
                raise DeadlineError(f"nodes {missing} of {place.nodes} did not call {place.coordinator} within {timeout_s:.0f} s") from None
            except (OSError, ValueError, KeyError):
                continue  # not one of ours
            hello["heard"] = time.time()
            if abs(hello["time"] - hello["heard"]) > CLOCK_SKEW_S and doubts.count(hello["node"]) < DOUBTS:
                doubts.append(hello["node"])
                caller.close()  # it calls again: a busy machine is slow to send or to hear, a wrong clock stays wrong
                continue
            waiting[int(hello["node"])] = (hello, caller)
    problem = next(filter(None, (disagreement(me, hello) for hello, _ in waiting.values())), None)
    for _, caller in waiting.values():
        with caller:
            caller.sendall(json.dumps({"error": problem} if problem else reply).encode() + b"\n")
    if problem:
        raise ConfigError(problem)
    return [hello for hello, _ in waiting.values()]


def join(place: Place, me: dict[str, Any], timeout_s: float = GATHER_S) -> dict[str, Any]:
    """On every other node: present oneself to the first and wait for its answer."""
    deadline = time.monotonic() + timeout_s
    last = "nothing listens there"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((place.host, place.port), timeout=5.0) as line:
                line.sendall(json.dumps({**me, "time": time.time()}).encode() + b"\n")
                line.settimeout(max(0.01, deadline - time.monotonic()))
                answer = json.loads(_line(line))
                if answer.get("error"):
                    raise ConfigError(answer["error"])
                return answer
        except (OSError, ValueError) as error:
            last = str(error)
            time.sleep(0.5)
    raise DeadlineError(f"the first node did not answer at {place.coordinator} within {timeout_s:.0f} s ({last})")


def require_shared(folder: Path, token: str, wait_s: float = SHARED_S, sleep: Callable[[float], None] = time.sleep) -> None:
    """The lease that the first node holds must be visible here too, or the run directory is not shared."""
    deadline = time.monotonic() + wait_s
    while not leases.holds(folder, token):
        if time.monotonic() > deadline:
            raise StorageError(
                f"{folder}: node {socket.gethostname()} does not see the first node's lease here; "
                "--run must lie on a file system that all nodes share"
            )
        sleep(0.5)


def _line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data.decode()
