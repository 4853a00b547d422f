"""One chat completion of a model behind an OpenAI-compatible address."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

LARGEST = 4_000_000  # bytes of an answer


def complete(url: str, body: dict[str, Any], key: str, deadline_s: float) -> dict[str, Any]:
    """The message that answers `body` at `url`, such as http://host:8000/v1; the whole answer has one deadline.

    Raises OSError (HTTPError and TimeoutError are such), ValueError, KeyError, IndexError or TypeError where none came.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    end, data = time.monotonic() + deadline_s, b""
    with urllib.request.urlopen(request, timeout=deadline_s) as answer:
        while part := answer.read1(65536):  # the socket's timeout alone would let an answer drip for ever
            data += part
            if time.monotonic() > end or len(data) > LARGEST:
                raise TimeoutError(f"the answer was not whole within {deadline_s:g} s and {LARGEST:,} bytes")
    return json.loads(data)["choices"][0]["message"]


NO_ANSWER = (OSError, ValueError, KeyError, IndexError, TypeError)  # what `complete` raises
