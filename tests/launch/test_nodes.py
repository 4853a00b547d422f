"""Several machines in one run: they meet, compare themselves, share one lease, or say why not."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from terrella.core import lease as leases
from terrella.core.errors import ConfigError, DeadlineError, StorageError
from terrella.core.ports import free_port
from terrella.launch import nodes
from terrella.launch.nodes import Place, disagreement, gather, introduce, join, require_shared


def meet(others: list[dict], reply: dict) -> tuple[list, list]:
    """The first node and some others, in threads; what each got or raised."""
    coordinator = f"127.0.0.1:{free_port()}"
    answers: list = [None] * len(others)

    def call(i: int) -> None:
        try:
            answers[i] = join(Place(i + 1, len(others) + 1, coordinator), others[i], 30)
        except ConfigError as error:
            answers[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(others))]
    for thread in threads:
        thread.start()
    place = Place(0, len(others) + 1, coordinator)
    try:
        first: list = gather(place, introduce(place, "d"), reply, 30)
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
    assert "install the same everywhere" in (disagreement(me, {**other, "versions": {**me["versions"], "torch": "1.0"}}) or "")


def test_a_call_heard_late_is_no_wrong_clock(monkeypatch) -> None:
    clock, late = time.time, [-60.0, -60.0]
    monkeypatch.setattr(nodes.time, "time", lambda: clock() + (late.pop() if late and threading.current_thread().name == "late" else 0.0))
    coordinator = f"127.0.0.1:{free_port()}"
    got: list = []
    caller = threading.Thread(target=lambda: got.append(join(Place(1, 2, coordinator), hello(1), 60)), name="late")
    caller.start()
    (first,) = gather(Place(0, 2, coordinator), hello(0), {"token": "t", "port": 1}, 60)
    caller.join(60)
    assert got[0]["token"] == "t" and abs(first["time"] - first["heard"]) < 5 and not late
    late = [-60.0] * 99
    with pytest.raises(ConfigError, match="its clock is -60 s off"):
        caller = threading.Thread(target=lambda: got.append(attempt(coordinator)), name="late")
        caller.start()
        gather(Place(0, 2, coordinator), hello(0), {"token": "t", "port": 1}, 60)
    caller.join(60)
    assert "its clock is -60 s off" in got[1]


def attempt(coordinator: str) -> str:
    with pytest.raises(ConfigError) as error:
        join(Place(1, 2, coordinator), hello(1), 60)
    return str(error.value)


def test_waits_have_deadlines_that_name_what_is_missing() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError, match=r"nodes \[1, 2\] of 3 did not call"):
        gather(Place(0, 3, coordinator), hello(0), {}, 0.3)
    with pytest.raises(DeadlineError, match=f"first node did not answer at {coordinator}"):
        join(Place(1, 3, coordinator), hello(1), 0.3)


def test_a_stranger_at_the_door_is_ignored() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    place = Place(0, 2, coordinator)
    result: list = []
    thread = threading.Thread(target=lambda: result.append(gather(place, hello(0), {"token": "t", "port": 1}, 30)))
    thread.start()
    while True:
        try:
            with socket.create_connection((place.host, place.port), timeout=1) as line:
                line.sendall(b"GET / HTTP/1.1\n")
            break
        except ConnectionRefusedError:
            continue
    assert join(Place(1, 2, coordinator), hello(1), 30)["token"] == "t"
    thread.join(30)
    assert len(result[0]) == 1


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
