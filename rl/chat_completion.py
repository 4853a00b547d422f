"""One chat completion of a model behind an OpenAI-compatible address."""

from __future__ import annotations

import json
from typing import Any

from ..core.http import fetch


def complete(url: str, body: dict[str, Any], key: str, deadline_s: float) -> dict[str, Any]:
    """The message that answers `body` at `url`, such as http://host:8000/v1; the whole answer has one deadline.

    Raises OSError (HTTPError and TimeoutError are such), ValueError, KeyError, IndexError or TypeError where none came.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = fetch(f"{url.rstrip('/')}/chat/completions", deadline_s, body, headers)
    return json.loads(answer)["choices"][0]["message"]


NO_ANSWER = (OSError, ValueError, KeyError, IndexError, TypeError)  # what `complete` raises
