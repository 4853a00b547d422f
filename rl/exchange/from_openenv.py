"""`env: openenv:URL`: an environment behind OpenEnv's WebSocket, one connection an episode."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import urlsplit

from ...core.errors import ConfigError
from ...core.http import fetch
from .common import LONGEST, Seeded, last_line, one_of, require, text_of

LARGEST = 4 * LONGEST + 1_000_000  # bytes of one message


class OpenEnvEnvironment(Seeded):
    """An action with one field is an answer as it is; of several fields it is a JSON object of them.

    A server that is late, raises or sends too much costs the episode, which becomes Invalid.
    """

    def __init__(
        self,
        id: str,
        action: str
        | None = None,  # the field of an action that the answer fills; default: the only one without a default
        fixed: dict[str, Any] | None = None,  # further fields of every action
        observation: str | None = None,  # the field that is shown; default: the only text in it, or all of it as JSON
        actions: list[str]
        | None = None,  # what random play draws from; default: what the schema or the first observation lists
        wait_s: float = 20.0,  # for one reply
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        parts = urlsplit(id)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"openenv:{id}: write the address of the server, as in openenv:http://localhost:8000")
        require("websockets")
        self.url, self.wait_s, self.shown, self.fixed = id.rstrip("/"), wait_s, observation, dict(fixed or {})
        schema = self._get("/schema").get("action", {})
        fields: dict[str, Any] = {
            k: v for k, v in schema.get("properties", {}).items() if k != "metadata" and k not in self.fixed
        }
        needed = [name for name in schema.get("required", []) if name in fields] or list(fields)
        if action is not None and action not in fields:
            raise ConfigError(
                f"action: openenv:{id} has no field '{action}' in its actions; they have {', '.join(fields) or 'none'}"
            )
        self.field, self.fields = action or (needed[0] if len(needed) == 1 else None), fields
        self.words = actions or self._listed()

    def _get(self, path: str) -> dict[str, Any]:
        try:
            return json.loads(fetch(f"{self.url}{path}", self.wait_s))
        except (OSError, ValueError) as error:
            raise ConfigError(f"openenv:{self.url}: {path} cannot be read ({error}); is the server running?") from error

    def _listed(self) -> list[str]:
        """The actions that the schema enumerates, or that the first observation lists under `actions`."""
        listed = self.fields.get(self.field or "", {}).get("enum")
        if listed:
            return [str(value) for value in listed]
        wire, first = self._open(), {}
        try:
            first = self._ask(wire, "reset", {"seed": 0})["observation"]
        finally:
            wire.close()
        given = first.get("actions") if isinstance(first, dict) else None
        return [str(value) for value in given] if isinstance(given, list) else []

    def how(self) -> str:
        if self.words:
            return one_of(self.words)
        if self.field is not None:
            return f"Answer with the {self.field} of your action."
        return f"Answer with a JSON object with the fields {', '.join(self.fields)}."

    def _open(self) -> Any:
        from websockets.sync.client import connect

        address = f"ws{self.url.removeprefix('http')}/ws"
        return connect(address, open_timeout=self.wait_s, close_timeout=1.0, max_size=LARGEST, compression=None)

    def _ask(self, wire: Any, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        wire.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(wire.recv(timeout=self.wait_s))
        if reply.get("type") == "error":
            raise RuntimeError(f"the server answered {kind} with an error: {str(reply.get('data'))[:300]}")
        return reply["data"]

    def begin(self, seed: int) -> tuple[Any, str]:
        wire = self._open()
        try:
            return wire, self._seen(self._ask(wire, "reset", {"seed": seed}))
        except BaseException:
            wire.close()
            raise

    def _seen(self, data: dict[str, Any]) -> str:
        observation = data["observation"]
        if self.shown is not None:
            return text_of(observation[self.shown])
        read = {k: v for k, v in observation.items() if k not in ("metadata", "picture")}  # pictures are no text
        texts = [value for value in read.values() if isinstance(value, str) and value]
        return text_of("\n".join(texts)) if texts else text_of(read)

    def act(self, episode: Any, answer: Any) -> tuple[str, float, bool]:
        data = self._ask(episode, "step", answer)
        return self._seen(data), float(data.get("reward") or 0.0), bool(data.get("done"))

    def read(self, answer: str) -> Any:
        if self.field is None:
            try:
                made = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
            except (ValueError, RecursionError) as error:
                raise ValueError("that is no JSON object") from error
            if not isinstance(made, dict) or not set(made) <= set(self.fields):
                raise ValueError(f"the fields are {', '.join(self.fields)}")
            return {**made, **self.fixed}
        kind = self.fields[self.field].get("type", "string")
        text = last_line(answer) if self.words or kind != "string" else answer.strip()
        if kind == "string":
            return {self.field: text, **self.fixed}
        try:
            return {self.field: json.loads(text), **self.fixed}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{text[:80]!r} is no {kind}") from error

    def random_answer(self, rng: random.Random) -> str:
        if self.words:
            return rng.choice(self.words)
        kinds = {name: self.fields[name].get("type") for name in ([self.field] if self.field else self.fields)}
        drawn = {name: _drawn(kind, self.fields[name], rng) for name, kind in kinds.items()}
        return str(drawn[self.field]) if self.field else json.dumps(drawn)

    def end(self, episode: Any) -> None:
        episode.close()


def _drawn(kind: str | None, field: dict[str, Any], rng: random.Random) -> Any:
    """A value of a field of this type, within the limits that its schema names."""
    if field.get("enum"):
        return rng.choice(field["enum"])
    low = field.get("minimum", min(0, field.get("maximum", 0)))
    high = field.get("maximum", max(9, low))
    if kind == "integer":
        return rng.randint(int(low), int(high))
    return (
        rng.uniform(low, high)
        if kind == "number"
        else rng.random() < 0.5
        if kind == "boolean"
        else str(rng.randint(0, 9))
    )
