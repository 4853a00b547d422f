"""Requests among servers: the next turn finds its prefix, groups stay together, and no server is crowded. And
connections that are kept.
"""

import json
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from terrella.rl.rollout.routing import Routing
from terrella.rl.rollout.vllm_client import Remote


@pytest.mark.parametrize("servers", [2, 8, 16])
def test_turns_find_their_prefix_and_the_load_is_even(servers: int) -> None:
    rng = random.Random(0)
    common = [rng.randrange(1000) for _ in range(200)]  # every task begins alike
    episodes = [common + [rng.randrange(1000) for _ in range(rng.randint(210, 600))] for _ in range(256)]
    routing, before, found, asked = Routing(servers), {}, 0, 0
    for _turn in range(5):
        dealt = [routing.take(ids) for ids in episodes]
        load = Counter(dealt)
        assert max(load.values()) <= 1.3 * len(episodes) / servers + 9
        for i, server in enumerate(dealt):
            routing.done(server)
            found, asked = found + (before.get(i) == server), asked + (i in before)
            before[i] = server
            episodes[i] = episodes[i] + [rng.randrange(1000) for _ in range(rng.randint(20, 150))]
    assert asked == 4 * 256 and found / asked > 0.95
    group = [routing.take(episodes[0]) for _ in range(8)]
    assert len(set(group)) == 1


def test_equal_calls_are_dealt_alike_and_new_weights_forget() -> None:
    prompts = [[i, i + 1] * 40 for i in range(50)]
    one, other = ([routing.take(ids) for ids in prompts] for routing in (Routing(3), Routing(3)))
    assert one == other and max(Counter(one).values()) <= 17
    routing = Routing(2)
    routing.done(routing.take(prompts[0]))
    assert routing.known
    routing.forget()
    assert not routing.known


def test_a_connection_is_kept_and_one_that_was_closed_is_made_anew() -> None:
    callers: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            callers.append(self.client_address)
            self.rfile.read(int(self.headers["Content-Length"]))
            text = json.dumps({"n": len(callers)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            # the server hangs up after its third answer, without a word
            self.close_connection = len(callers) == 3

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        remote = Remote(f"http://127.0.0.1:{server.server_address[1]}", key="k")
        assert [remote.post("/x", {}, 30, again=True)["n"] for _ in range(4)] == [1, 2, 3, 4]
        assert callers[0] == callers[1] == callers[2] != callers[3]
        remote.post("/x", {}, 30)  # what must not be asked twice has a connection of its own
        assert callers[4] != callers[3]
    finally:
        server.shutdown()
