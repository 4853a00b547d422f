"""One HTTP request with a deadline for the complete response."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

LARGEST = 4_000_000  # bytes of a response


def fetch(url: str, deadline_s: float, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The response to a GET, or with a body to a POST of it as JSON.

    Raises an OSError unless a complete response arrives: HTTPError for an error status, TimeoutError past the deadline
    or LARGEST, ConnectionError if it breaks off.
    """
    data = None if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    end, answer = time.monotonic() + deadline_s, b""
    request = urllib.request.Request(url, data, {**kind, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=deadline_s) as reply:
            while part := reply.read1(65536):  # the socket timeout alone would let it trickle in for ever
                answer += part
                if time.monotonic() > end or len(answer) > LARGEST:
                    raise TimeoutError(f"the answer was not whole within {deadline_s:g} s and {LARGEST:,} bytes")
            if missing := getattr(reply, "length", None):  # compared to the announced length
                raise ConnectionError(f"the answer broke off {missing} bytes before its end")
    except HTTPException as error:  # not an OSError: a truncated chunk, or a response that is not HTTP
        raise ConnectionError(f"the answer is not whole: {type(error).__name__}: {error}") from error
    return answer
