"""Ports under attack: what a stranger may say to the first node of a launch and to a vLLM server's door."""

from __future__ import annotations

import json
import random
import threading

import pytest

from terrella.core.ports import free_port
from terrella.core.secret import sign
from terrella.launch import nodes
from terrella.launch.nodes import Place, gather, join
from terrella.tests.launch.test_nodes import SECRET, STRANGERS, hello, knock

SEED = 20260917


def strangers(draw: random.Random) -> list[bytes]:
    """At least twenty: fixed ones, and introductions that are almost right."""
    told = json.dumps(hello(1))
    wrong = [
        {"hello": told, "mac": sign(b"w" * 64, "hello", "0", told)},
        {"hello": told, "mac": sign(SECRET, "hello", "an old nonce", told)},  # said again later
        {"hello": told, "mac": ""},
        {"hello": told, "mac": ["x"]},
        {"hello": json.loads(told), "mac": "0"},
        {"hello": told},
        {"mac": "0"},
    ]
    noise = [bytes(draw.randrange(256) for _ in range(draw.randrange(1, 200))) + b"\n" for _ in range(6)]
    return [*STRANGERS, *(json.dumps(said).encode() + b"\n" for said in wrong), *noise]


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "HEAR_S", 0.5)
    place = Place(0, 2, f"127.0.0.1:{free_port()}")
    result: list = []
    thread = threading.Thread(
        target=lambda: result.append(gather(place, hello(0), {"token": "the token"}, SECRET, 120))
    )
    thread.start()
    said = strangers(random.Random(SEED))
    assert len(said) >= 20
    for words in said:
        assert b"the token" not in knock(place, words)
    assert thread.is_alive()
    monkeypatch.setattr(nodes, "HEAR_S", 10.0)
    assert join(Place(1, 2, place.coordinator), hello(1), SECRET, 60)["token"] == "the token"
    thread.join(60)
    assert [node["node"] for node in result[0]] == [1]
