"""A request has a whole answer or an OSError, however the other side behaves."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from terrella.core.http import fetch

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def answering(*parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """The address of a server that says these words to one request and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        caller, _ = listener.accept()
        with caller, suppress(OSError):  # who asked may have had enough
            caller.recv(65536)
            for part in parts:
                caller.sendall(part)
                time.sleep(pause_s)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    thread.join(30)
    listener.close()


@pytest.mark.parametrize(
    "said",
    [
        OK + b"Content-Length: 2\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"\r\n{}",
    ],
    ids=["length", "chunked", "until the end"],
)
def test_a_whole_answer(said: bytes) -> None:
    with answering(said) as url:
        assert fetch(url, 30) == b"{}"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (OK + b"Content-Length: 100\r\n\r\n{}", "the answer broke off 98 bytes before its end"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", "not whole: IncompleteRead"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", "not whole: IncompleteRead"),
        (b"hello\r\n\r\n", "not whole: BadStatusLine: hello"),
        (b"", "without response"),
    ],
    ids=["length", "chunked", "no chunk", "no HTTP", "nothing"],
)
def test_an_answer_that_breaks_off(said: bytes, words: str) -> None:
    with answering(said) as url, pytest.raises(ConnectionError, match=words):
        fetch(url, 30)


def test_an_answer_that_drips() -> None:
    with answering(OK + b"\r\n", *[b"x"] * 8, pause_s=0.2) as url, pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        fetch(url, 0.5)
