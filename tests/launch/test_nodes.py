"""Several machines in one run: they meet, compare themselves, share one lease, or say why not."""

import asyncio
import json
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from terrella.core import lease as leases
from terrella.core.errors import ConfigError, DeadlineError, StorageError
from terrella.core.ports import free_port
from terrella.core.secret import make_secret, read_secret
from terrella.launch import nodes
from terrella.launch.nodes import Place, choose_interface, disagreement, gather, introduce, join, require_shared
from terrella.rl.rollout.server_auth import Guard
from terrella.tests.sampling import in_turn

SECRET = b"s" * 64


def meet(others: list[dict], reply: dict) -> tuple[list, list]:
    """The first node and some others, in threads; what each got or raised."""
    coordinator = f"127.0.0.1:{free_port()}"
    answers: list = [None] * len(others)

    def call(i: int) -> None:
        try:
            answers[i] = join(Place(i + 1, len(others) + 1, coordinator), others[i], SECRET, 30)
        except ConfigError as error:
            answers[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(others))]
    for thread in threads:
        thread.start()
    place = Place(0, len(others) + 1, coordinator)
    try:
        first: list = gather(place, introduce(place, "d"), reply, SECRET, 30)
    except ConfigError as error:
        first = [error]
    for thread in threads:
        thread.join(30)
    return first, answers


def hello(node: int, digest: str = "d") -> dict:
    return introduce(Place(node, 3), digest)


def test_nodes_meet_and_get_the_lease_and_the_port() -> None:
    first, answers = meet([hello(1), hello(2)], {"token": "t", "port": 5})
    assert {h["node"] for h in first} == {1, 2} and answers == [{"token": "t", "port": 5}] * 2


def test_gloo_uses_the_interface_over_which_the_nodes_met_unless_one_is_named(monkeypatch) -> None:
    others = [hello(1), hello(2)]
    meet(others, {"token": "t", "port": 5})
    assert [other["address"] for other in others] == ["127.0.0.1"] * 2
    for name in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", "ib0")
    assert choose_interface("127.0.0.1") == "met at 127.0.0.1; network interface of gloo: ib0, of NCCL: ib0"
    for name in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{name}_SOCKET_IFNAME")
    chosen = choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] in chosen and "NCCL_SOCKET_IFNAME" not in os.environ
    loopback = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in {entry.address for entry in loopback} and chosen.endswith("of NCCL: its own choice")


def test_other_settings_stop_all_nodes_with_the_same_words() -> None:
    first, answers = meet([hello(1), hello(2, "other")], {"token": "t", "port": 5})
    assert "node 2" in str(first[0]) and "other settings" in str(first[0])
    assert [str(a) for a in answers] == [str(first[0])] * 2


def test_what_must_agree() -> None:
    me = {**hello(0), "gpus": 8}
    other = {**hello(1), "gpus": 8, "time": 100.0, "heard": 100.0}
    assert disagreement(me, other) is None
    assert "sees 7 GPUs" in (disagreement(me, {**other, "gpus": 7}) or "")
    assert "clock is +60 s" in (disagreement(me, {**other, "time": 160.0}) or "")
    assert "install the same everywhere" in (
        disagreement(me, {**other, "versions": {**me["versions"], "torch": "1.0"}}) or ""
    )


def test_a_call_heard_late_is_no_wrong_clock(monkeypatch) -> None:
    clock, late = time.time, [-60.0, -60.0]
    monkeypatch.setattr(
        nodes.time,
        "time",
        lambda: clock() + (late.pop() if late and threading.current_thread().name == "late" else 0.0),
    )
    coordinator = f"127.0.0.1:{free_port()}"
    got: list = []
    caller = threading.Thread(
        target=lambda: got.append(join(Place(1, 2, coordinator), hello(1), SECRET, 60)), name="late"
    )
    caller.start()
    (first,) = gather(Place(0, 2, coordinator), hello(0), {"token": "t", "port": 1}, SECRET, 60)
    caller.join(60)
    assert got[0]["token"] == "t" and abs(first["time"] - first["heard"]) < 5 and not late
    late = [-60.0] * 99
    with pytest.raises(ConfigError, match="its clock is -60 s off"):
        caller = threading.Thread(target=lambda: got.append(attempt(coordinator)), name="late")
        caller.start()
        gather(Place(0, 2, coordinator), hello(0), {"token": "t", "port": 1}, SECRET, 60)
    caller.join(60)
    assert "its clock is -60 s off" in got[1]


def attempt(coordinator: str) -> str:
    with pytest.raises(ConfigError) as error:
        join(Place(1, 2, coordinator), hello(1), SECRET, 60)
    return str(error.value)


def test_waits_have_deadlines_that_name_what_is_missing() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError, match=r"nodes \[1, 2\] of 3 did not call"):
        gather(Place(0, 3, coordinator), hello(0), {}, SECRET, 0.3)
    with pytest.raises(DeadlineError, match=f"first node did not answer at {coordinator}"):
        join(Place(1, 3, coordinator), hello(1), SECRET, 0.3)


STRANGERS = [
    b"GET / HTTP/1.1\n",
    b"{}\n",
    b"[]\n",
    b"null\n",
    b"\xff\xfe\n",
    b"x" * 70_000,
    b'{"hello": "{}", "mac": "0"}\n',
    b'{"hello": 3, "mac": null}\n',
    b"[" * 50_000 + b"\n",
    json.dumps(introduce(Place(1, 3), "d")).encode() + b"\n",  # all is right but the signature
    b"",
]


def knock(place: Place, said: bytes) -> bytes:
    """Say something at the first node's door; what it answers after its greeting."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            with socket.create_connection((place.host, place.port), timeout=5) as line:
                line.sendall(said)
                line.settimeout(15)
                got = b""
                while part := line.recv(4096):
                    got += part
                return got
        except ConnectionRefusedError:
            time.sleep(0.05)
        except OSError:
            return b""
    raise AssertionError("nobody listens")


def test_strangers_at_the_door_neither_get_in_nor_hold_it_up(monkeypatch) -> None:
    monkeypatch.setattr(nodes, "HEAR_S", 1.0)
    coordinator = f"127.0.0.1:{free_port()}"
    place = Place(0, 2, coordinator)
    result: list = []
    thread = threading.Thread(target=lambda: result.append(gather(place, hello(0), {"token": "the token"}, SECRET, 60)))
    thread.start()
    for said in STRANGERS:
        assert b"the token" not in knock(place, said)
    with pytest.raises(DeadlineError):
        join(Place(1, 2, coordinator), hello(1), b"w" * 64, 1.0)
    assert thread.is_alive()  # none of them ended the launch
    silent = [socket.create_connection((place.host, place.port)) for _ in range(20)]
    assert join(Place(1, 2, coordinator), hello(1), SECRET, 30)["token"] == "the token"
    thread.join(30)
    assert len(result[0]) == 1
    for line in silent:
        line.close()


@in_turn("strangers at the door")
def test_who_does_not_know_the_secret_is_no_first_node() -> None:
    place = Place(1, 2, f"127.0.0.1:{free_port()}")
    with socket.create_server((place.host, place.port)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.sendall(b'{"nonce": "0"}\n')
                line.recv(65536)
                line.sendall(b'{"answer": "{\\"token\\": \\"t\\", \\"port\\": 1}", "mac": "0"}\n')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(DeadlineError):
            join(place, hello(1), SECRET, 2.0)


def test_the_first_node_listens_at_its_own_address_only() -> None:
    with nodes._listen(Place(0, 2, f"127.0.0.1:{free_port()}")) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="--coordinator: cannot listen at"):
        nodes._listen(Place(0, 2, "192.0.2.1:29400"))


def test_the_secret_is_the_owners_alone(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the first node writes it"):
        read_secret(tmp_path)
    secret = make_secret(tmp_path)
    assert make_secret(tmp_path) == secret == read_secret(tmp_path) and len(secret) == 64
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(StorageError, match="others may read it"):
        read_secret(tmp_path)


def test_every_door_of_a_server_asks_for_its_key(monkeypatch) -> None:
    monkeypatch.setenv("TERRELLA_SERVER_KEY", "k")
    seen: list = []

    async def app(scope, receive, send) -> None:
        seen.append(scope["path"])

    async def send(message) -> None:
        seen.append(message.get("status", message.get("code")))

    def ask(path: str, *keys: str, kind: str = "http") -> list:
        seen.clear()
        headers = [(b"authorization", key.encode()) for key in keys]
        asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
        return seen[:1]

    assert ask("/collective_rpc", "Bearer k") == ["/collective_rpc"] and ask("/health") == ["/health"]
    for path in (
        "/collective_rpc",
        "/v1/completions",
        "/sleep",
        "/health/",
        "//health",
        "/server_info",
        "/v1/load_lora_adapter",
    ):
        assert ask(path) == ask(path, "Bearer x") == ask(path, "k") == ask(path, "Bearer k", "Bearer k") == [401]
    assert ask("/health2", kind="websocket") == [1008]
    monkeypatch.delenv("TERRELLA_SERVER_KEY")
    with pytest.raises(RuntimeError, match="TERRELLA_SERVER_KEY"):
        Guard(app)


def test_one_machine_is_reached_from_itself_only() -> None:
    """The store where ranks meet, and the gauges: torch's store and an empty host name would listen on all
    interfaces.
    """
    from terrella.core.sinks import Prometheus
    from terrella.core.store import open_store

    port = free_port()
    store = open_store("127.0.0.1", port, True, timedelta(seconds=30), wait=False)
    store.set("a", "b")
    assert open_store("127.0.0.1", port, False, timedelta(seconds=30), wait=False).get("a") == b"b"
    gauges = Prometheus("run")
    listening = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    addresses = {
        row[1].split(":")[0] for row in listening if row[3] == "0A" and int(row[1].split(":")[1], 16) in (port, 9464)
    }
    gauges.web.shutdown()
    assert addresses == {"0100007F"}


def test_a_run_directory_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    lease = leases.Lease.acquire(tmp_path)
    require_shared(tmp_path, lease.token, 0)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(StorageError, match="file system that all nodes share"):
        require_shared(tmp_path / "elsewhere", lease.token, 0, sleep=lambda _: None)
    lease.release()


def test_places_are_checked() -> None:
    assert Place(1, 4).ranks_here(32) == 8
    with pytest.raises(ConfigError, match="cannot be spread evenly over 3 nodes"):
        Place(0, 3).ranks_here(8)
    with pytest.raises(ConfigError, match="--node-rank: 4 is not between 0 and 3"):
        Place(4, 4)
    with pytest.raises(ConfigError, match="must be host:port"):
        Place(0, 1, "n1")
    assert json.dumps(introduce(Place(), "x")) and nodes.CLOCK_SKEW_S > 0
