"""Access control for a vLLM server. Its endpoints change weights and run methods, and vLLM's own key covers only some
of them; so every request except the health check must carry the server's key."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "TERRELLA_SERVER_KEY"  # the key of servers that the run did not start
GUARD = "terrella.rl.rollout.server_auth.Guard"
OPEN = ("/health",)


class Guard:
    """ASGI middleware: 401 for whoever does not know the key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app, self.key = app, os.environ.get(KEY_VARIABLE, "")
        if not self.key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set; a server without a key would serve anybody")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._knows(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": b"the server's key is missing or wrong"})

    def _knows(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope.get("headers", []) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {self.key}".encode())


def header(key: str) -> dict[str, str]:
    """The headers of a request to a server."""
    return {"Authorization": f"Bearer {key}"} if key else {}
