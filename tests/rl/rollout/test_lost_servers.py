"""What a rank that does not own the servers makes of one that is lost: it says so at once, so that all ranks together
start it again, and waits only where it cannot say so."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from terrella.core.errors import SyncError, WorkerError
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams, Unpublished
from terrella.rl.rollout.stream import Stream
from terrella.rl.rollout.vllm_client import Remote, ServedVllm
from terrella.rl.rollout.vllm_config import VllmSettings

ASKED = [SampleRequest((1, 2), (0, 0, 0, 0), SamplingParams(1))]
VERSION = 3


class Served(ThreadingHTTPServer):
    """Speaks as a vLLM server does; `answers` says what it makes of the next requests for tokens."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.version: int | None = VERSION
        self.adapters: list[str] = []
        self.refused = 0  # requests for tokens that are still to fail


class Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        self._say({"data": [{"id": name} for name in self.server.adapters]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/collective_rpc":
            self._say({"results": [{"version": self.server.version}]})
        elif self.server.refused:
            self.server.refused -= 1
            self._say({}, 500)
        else:
            choice = {"finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}
            self._say({"choices": [choice]})

    def _say(self, answer: object, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Served]:
    made = Served()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def sampler_on(server: Served, request_s: float = 600.0, *, owned_elsewhere: bool = True) -> ServedVllm:
    remote = Remote(f"http://127.0.0.1:{server.server_address[1]}", key="k")
    settings = VllmSettings(model="m", dtype="float32", max_length=8, max_sequences=2)
    sampler = ServedVllm(settings, [remote], request_s=request_s, ours_elsewhere=owned_elsewhere)
    remote.version = VERSION
    return sampler


def test_a_dead_server_of_another_rank_is_told_of_at_once(server: Served) -> None:
    sampler = sampler_on(server)
    (sample,) = sampler.generate(ASKED)
    assert isinstance(sample, Sample) and sample.ids == (5,)
    server.shutdown()
    server.server_close()
    begun = time.monotonic()
    with pytest.raises(Unpublished, match="its weights of version 3 are lost"):
        sampler.generate(ASKED)
    assert time.monotonic() - begun < 60  # of request_s = 600


def test_one_that_was_started_again_is_not_asked_before_it_has_weights(server: Served) -> None:
    server.version = None
    with pytest.raises(Unpublished, match=r"holds version {None}, not 3"):
        sampler_on(server).generate(ASKED)
    with pytest.raises(SyncError, match="who else writes to it"):  # nobody of ours would start this one again
        sampler_on(server, owned_elsewhere=False).generate(ASKED)


def test_a_refused_request_alone_is_no_loss_with_adapters_neither(server: Served) -> None:
    sampler = sampler_on(server)
    server.refused = 1
    assert isinstance(sampler.generate(ASKED)[0], Sample) and sampler.reissued == 1
    server.version, server.adapters, server.refused = None, ["m", "v3"], 1  # adapters lie beside weights of no version
    sampler.targets[0].adapter = "v3"
    assert isinstance(sampler.generate(ASKED)[0], Sample) and sampler.reissued == 2
    server.adapters, server.refused = ["m"], 1
    with pytest.raises(Unpublished, match="no adapter v3"):
        sampler.generate(ASKED)


def test_a_request_opens_a_connection_where_another_took_the_last_that_was_kept(server: Served) -> None:
    class Taken(list):
        """Says that it has one, as it did before another thread took it."""

        def __bool__(self) -> bool:
            return True

    sampler = sampler_on(server)
    sampler.targets[0].idle = Taken()
    assert sampler.generate(ASKED)[0].ids == (5,)


def test_a_stream_waits_for_the_owner_and_then_says_who_that_is(server: Served) -> None:
    server.version = None
    stream = Stream(sampler_on(server, request_s=60.0))
    answer = stream.submit(ASKED[0])
    time.sleep(0.3)
    assert not answer.done()
    server.version = VERSION  # its owner has sent the weights
    assert isinstance(answer.result(30.0), Sample)
    stream.close()
    server.version = None
    stream = Stream(sampler_on(server, request_s=0.1))
    with pytest.raises(WorkerError, match=r"within 0 s \(sampler.request_s\).*started again by the first rank alone"):
        stream.submit(ASKED[0]).result(30.0)
    stream.close()
