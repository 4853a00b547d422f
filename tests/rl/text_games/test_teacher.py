"""A teacher behind a real local server: answers, reasoning, retries, faults; and what is kept of its answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from terrella.data.convert.text_game import is_gold, pair_of
from terrella.data.trajectory import Invalid
from terrella.rl.language import read_pair
from terrella.rl.text_games.crawl import GAMES, bare_prompt, crawl
from terrella.rl.text_games.teacher import Harvest, Teacher, reasoned_samples


class Handler(BaseHTTPRequestHandler):
    failures = 0
    seen: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(body)
        prompt = body["messages"][-1]["content"]
        if prompt == "refuse" or (prompt == "busy" and type(self).failures < 1):
            type(self).failures += 1
            self.send_error(400 if prompt == "refuse" else 503)
            return
        message = {"role": "assistant", "content": prompt.upper(), "reasoning_content": "hm. "}
        blob = json.dumps({"choices": [{"message": message}]}).encode() if prompt != "odd" else b"<html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(blob)))
        self.end_headers()
        self.wfile.write(blob)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def teacher():
    Handler.failures, Handler.seen = 0, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Teacher(f"http://127.0.0.1:{server.server_port}/v1/", "m", pause_s=0.01, timeout_s=20)
    server.shutdown()
    server.server_close()


def test_answers_and_faults(teacher: Teacher) -> None:
    assert teacher.ask_all(["a", "busy", "c"]) == ["hm. A", "hm. BUSY", "hm. C"]  # a busy server is asked again
    assert Handler.seen[0]["model"] == "m" and Handler.seen[0]["messages"][0]["role"] == "system"
    before = len(Handler.seen)
    refused = teacher.ask("refuse")
    assert isinstance(refused, Invalid) and "HTTP 400" in refused.reason and len(Handler.seen) == before + 1
    assert isinstance(teacher.ask("odd"), Invalid)
    nobody = Teacher("http://127.0.0.1:9/v1", "m", pause_s=0.01, tries=2, timeout_s=5)
    assert isinstance(nobody.ask("x"), Invalid)


def test_what_is_kept() -> None:
    rows = list(crawl(GAMES["weigh-stones"], range(1)))
    gold, plain = next(r for r in rows if is_gold(r)), next(r for r in rows if not is_gold(r))
    pairs = [
        (sample, read_pair(sample))
        for row in (gold, gold, gold, gold, plain)
        for sample in [pair_of(row, bare_prompt, "train")]
    ]
    right, same = f"So. {pairs[0][1].answer}", pairs[4][1].answer
    harvest = Harvest()
    kept = list(
        reasoned_samples(
            pairs, [right, "no", "x" * 9000 + right, Invalid("gone"), same], len, harvest, keep_unchanged=0.0
        )
    )
    assert [k["extra.json"]["response"] for k in kept] == [right]
    assert harvest == Harvest(asked=5, kept=1, wrong=1, too_long=1, left_out=1, invalid=1)
    assert len(list(reasoned_samples(pairs[4:], [same], len, Harvest(), keep_unchanged=1.0))) == 1
