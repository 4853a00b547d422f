"""Sampling from vLLM servers over HTTP: concurrent requests with deadlines; a dead server is restarted and its requests
are sent again.

Each request has its own seed, so that it gives the same tokens whichever server answers, and however often it is sent.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...core.errors import ConfigError, NumericsError, SyncError, WorkerError
from ...core.http import fetch
from ...data.trajectory import Invalid
from .forced_spans import Piece, Plain, generate_in_spans
from .routing import Routing
from .sampler import Sample, SampleRequest, Unpublished
from .server_auth import KEY_VARIABLE, header
from .stream import Stream, Ticket
from .vllm_config import VllmSettings, noted, request_arguments
from .vllm_server import VllmServer

log = logging.getLogger("terrella")
IMPOSSIBLE = -9999.0  # what the server writes for minus infinity


class Remote:
    """One server by URL, as target of weight sync. `server` is set if we may restart its process; the key of servers
    that we did not start is in the environment.
    """

    def __init__(self, url: str, server: VllmServer | None = None, key: str | None = None) -> None:
        self.fixed_url, self.server = url, server
        self.version: int | None = None
        self.key = server.key if server else os.environ.get(KEY_VARIABLE, "") if key is None else key
        self.idle: list[http.client.HTTPConnection] = []  # idle connections, for the next requests
        self.adapter: str | None = None  # the adapter to request, if only adapters are synchronised

    @property
    def name(self) -> str:
        return self.server.url if self.server else self.fixed_url

    def post(self, path: str, body: dict[str, Any], timeout_s: float, *, again: bool = False) -> Any:
        """One POST; a status other than 200 is an OSError with the server's message. A request that may be sent `again`
        uses a kept connection, and a fresh one if the server has closed that meanwhile.
        """
        kept = None
        if again:
            with suppress(IndexError):  # another thread may have taken the last one
                kept = self.idle.pop()
        if kept is not None:
            try:
                return self._post(kept, path, body, timeout_s, keep=True)
            except (ConnectionError, http.client.HTTPException):
                pass
        parts = urlsplit(self.name)
        fresh = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
        try:
            return self._post(fresh, path, body, timeout_s, keep=again)
        except http.client.HTTPException as error:
            raise OSError(f"{path}: {type(error).__name__}: {error}") from error

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any], timeout_s: float, keep: bool
    ) -> Any:
        whole = False
        try:
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **header(self.key)})
            answer = connection.getresponse()
            text = answer.read()
            whole = answer.status == 200 and not answer.will_close
            if answer.status == 401:
                raise ConfigError(
                    f"{self.name}{path}: the server asks for another key; set {KEY_VARIABLE} to the one it was "
                    "started with"
                )
            if answer.status == 400:
                raise ConfigError(f"{self.name}{path}: vllm refuses the request: {text[:500].decode(errors='replace')}")
            if answer.status != 200:
                raise OSError(f"{path}: status {answer.status}: {text[:300].decode(errors='replace')}")
            return json.loads(text) if text.startswith((b"{", b"[")) else None
        finally:
            if keep and whole:
                self.idle.append(connection)
            else:
                connection.close()

    def call(self, method: str, *args: str, timeout_s: float) -> list[dict[str, Any]]:
        """Call a method of the weight receiver on every worker."""
        body = {"method": method, "args": list(args), "timeout": timeout_s}
        return self.post("/collective_rpc", body, timeout_s)["results"]

    def accept(self, version: int | None, timeout_s: float) -> None:
        """Serve this version from now on; None serves nothing."""
        self.version = version
        if version is not None:
            self.post("/reset_prefix_cache", {}, timeout_s)

    def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        """Load an adapter under its version's name, and unload the previous one."""
        before, self.adapter = self.adapter, adapter_name(version)
        if before == self.adapter:  # a retry; the first attempt may not have loaded it
            with suppress(OSError, ConfigError):
                self.post("/v1/unload_lora_adapter", {"lora_name": before}, timeout_s)
        self.post("/v1/load_lora_adapter", {"lora_name": self.adapter, "lora_path": folder}, timeout_s)
        if before not in (None, self.adapter):
            self.post("/v1/unload_lora_adapter", {"lora_name": before}, timeout_s)


def adapter_name(version: int) -> str:
    """The name of a version's adapter, the same on every rank."""
    return f"v{version}"


class ServedVllm:
    """A sampler over one or many servers."""

    def __init__(
        self,
        settings: VllmSettings,
        servers: Sequence[VllmServer | Remote],
        *,
        request_s: float = 600.0,
        attempts: int = 3,
        resync: Callable[[Remote], None] | None = None,
        together: bool = False,
        ours_elsewhere: bool = False,
    ) -> None:
        """A restarted server gets its weights by `resync`, or with the next publish if all ranks send them `together`.
        With `ours_elsewhere` another trainer rank owns the servers; it may be done sampling, and then notices a loss
        only when weights are published.
        """
        self.together, self.ours_elsewhere, self._streams = together, ours_elsewhere, False
        self.settings, self.request_s, self.attempts, self.resync = settings, request_s, attempts, resync
        self.targets = [s if isinstance(s, Remote) else Remote(s.url, s) for s in servers]
        for target in self.targets:
            target.version = 0 if settings.load == "auto" else None
        self._routed: int | None = None  # version of the last requests
        self.routing = Routing(len(self.targets))
        self.restarts = 0
        self.reissued = 0
        self._asked: int | None = None  # in a stream: the version that the servers last reported
        self._asking, self._mending = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start our servers concurrently and wait until all serve."""
        ours = [t.server for t in self.targets if t.server]
        for server in ours:
            server.start()
        for server in ours:
            server.wait()

    def close(self) -> None:
        """End our servers."""
        for target in self.targets:
            if target.server:
                target.server.stop()

    def serve(self, stream: Stream) -> None:
        """Answer a stream's tickets as they arrive, each by its own request, until it is closed. Weights change only
        while no request is in flight: all tokens of a request have one version.
        """
        pool = ThreadPoolExecutor(self.settings.max_sequences * len(self.targets))
        self._streams = True
        try:
            while (tickets := stream.take(wait=True)) is not None:
                for ticket in tickets:
                    pool.submit(self._answer, stream, ticket)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # requests in flight end by their own deadlines

    def _answer(self, stream: Stream, ticket: Ticket) -> None:
        try:
            with stream.turn():
                version = self._version([ticket.request])
                with self._asking:
                    if self._asked != version:
                        self._require(version)
                        self._asked = version
                (sample,) = generate_in_spans([ticket.request], self._generate, version)
            stream.give([(ticket, sample)])
        except BaseException as error:
            stream.fail(error)

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        version = self._version(requests)
        self._require(version)
        return generate_in_spans(requests, self._generate, version)

    def _version(self, requests: list[SampleRequest]) -> int:
        """The version that all servers hold, after checking that they can answer these requests."""
        versions = {t.version for t in self.targets}
        if None in versions or len(versions) != 1:
            raise ConfigError(
                f"vllm: the servers hold versions {sorted(map(str, versions))}; publish one to all of them first"
            )
        for request in requests:
            self.settings.check(request)
        (version,) = versions
        assert version is not None
        if version != self._routed:
            self.routing.forget()
        self._routed = version
        return version

    def _require(self, version: int) -> None:
        """Ask the servers which version they hold: nobody else may have changed it. A server that does not answer is
        restarted when it is sampled from.
        """
        for target in self.targets:
            try:
                held = {worker["version"] for worker in target.call("terrella_state", timeout_s=30.0)}
            except (OSError, ValueError, KeyError):
                continue
            if target.adapter is None and held != {version} and not self._as_started(version, held):
                if held == {None} and (self.together or self.ours_elsewhere):
                    self._mend()  # it was restarted, and has no weights yet
                    continue
                raise SyncError(
                    f"vllm server {target.name} holds version {sorted(map(str, held))}, not {version}; who else "
                    "writes to it?"
                )

    def _generate(self, plain: list[Plain]) -> list[Piece | Invalid]:
        results: list[Piece | Invalid | None] = [None] * len(plain)
        pending = list(range(len(plain)))
        with ThreadPoolExecutor(min(len(plain), self.settings.max_sequences * len(self.targets))) as pool:
            for attempt in range(self.attempts):
                dealt = [self.routing.take(plain[i].ids) for i in pending]
                answers = list(pool.map(lambda i, server: self._one(plain[i], server), pending, dealt))
                for i, answer in zip(pending, answers, strict=True):
                    results[i] = answer
                pending = [i for i, answer in zip(pending, answers, strict=True) if isinstance(answer, Invalid)]
                if not pending or attempt + 1 == self.attempts:
                    break
                self._mend()
                self.reissued += len(pending)
                log.warning(
                    "vllm: %d requests are sent again, the first because of: %s", len(pending), results[pending[0]]
                )
        return [r for r in results if r is not None]

    def _one(self, plain: Plain, server: int) -> Piece | Invalid:
        target = self.targets[server]
        body = {
            "model": target.adapter or self.settings.model,
            "prompt": list(plain.ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **request_arguments(plain.request, plain.ids, plain.limit, plain.seed),
        }
        try:
            choice = target.post("/v1/completions", body, self.request_s, again=True)["choices"][0]
        except (OSError, ValueError, KeyError) as error:
            return Invalid(f"vllm server {target.name}: {type(error).__name__}: {error}")
        finally:
            self.routing.done(server)
        if choice["finish_reason"] not in ("stop", "length"):
            return Invalid(f"vllm server {target.name}: finish reason {choice['finish_reason']!r}")
        logprobs = tuple(float(p) for p in choice["logprobs"]["token_logprobs"])
        ids = tuple(choice["token_ids"])
        if len(ids) != len(logprobs):
            return Invalid(f"vllm server {target.name}: {len(ids)} tokens with {len(logprobs)} log-probs")
        if not all(math.isfinite(p) and p > IMPOSSIBLE for p in logprobs):
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        experts = None
        if self.settings.notes:
            packed = choice.get("routed_experts")
            chosen = None if packed is None else np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
            experts = noted(chosen, len(plain.ids) + len(ids), f"vllm server {target.name}")
        return Piece(ids, logprobs, choice["finish_reason"], experts)

    def _mend(self) -> None:
        """Restart those of our servers that died or stopped answering; wait for servers that others own. All must then
        hold the same version as before.
        """
        with self._mending:
            version = max((t.version for t in self.targets if t.version is not None), default=None)
            # an error would end the stream, so wait for the owner instead
            if self.together or (self.ours_elsewhere and not self._streams):
                lost = [
                    f"{target.name} ({fault})" for target in self.targets if (fault := self._fault(target, version))
                ]
                if lost:
                    raise Unpublished(f"vllm server {', '.join(lost)}: its weights of version {version} are lost")
                return
            for target in self.targets:
                if target.server is None:
                    self._await(target, version)
                elif not (target.server.alive() and target.server.healthy()):
                    self._restart(target, target.server, version)

    def revive(self) -> int:
        """Restart those of our servers that died, before weights are sent to all; returns how many."""
        before = self.restarts
        for target in self.targets:
            if target.server and not (target.server.alive() and target.server.healthy(30.0)):
                start = time.monotonic()
                self._begin_again(target, target.server)
                log.warning("vllm server %s was restarted in %.1f s", target.name, time.monotonic() - start)
        return self.restarts - before

    def _begin_again(self, target: Remote, server: VllmServer) -> None:
        target.version = target.adapter = None
        server.stop()
        server.start()
        server.wait()
        self.restarts += 1

    def _restart(self, target: Remote, server: VllmServer, version: int | None) -> None:
        start = time.monotonic()
        self._begin_again(target, server)
        if version == 0 and self.settings.load == "auto" and not self.settings.lora_rank:
            target.version = 0
        elif self.resync is None:
            raise WorkerError(
                f"vllm server {target.name} was restarted but there is nothing to bring it back to version {version}"
            )
        else:
            self.resync(target)
        log.warning("vllm server %s was restarted in %.1f s", target.name, time.monotonic() - start)

    def _as_started(self, version: int | None, held: set[int | None]) -> bool:
        """Whether a server that has received no weights yet already serves this version from its folder."""
        return version == 0 and held == {None} and self.settings.load == "auto"

    def _fault(self, target: Remote, version: int | None, timeout_s: float = 60.0) -> str:
        """Why a server cannot sample with a version; empty if it can."""
        try:
            held = {worker["version"] for worker in target.call("terrella_state", timeout_s=timeout_s)}
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        if target.adapter is not None:
            return _adapter_fault(target, timeout_s)
        if held == {version} or self._as_started(version, held):
            return ""
        return f"it holds version {held}, not {version}"

    def _await(self, target: Remote, version: int | None) -> None:
        """Wait for the process that owns this server to bring it back with the right weights."""
        end = time.monotonic() + self.request_s
        while True:
            reason = self._fault(target, version, 10.0)
            if not reason:
                return
            if time.monotonic() > end:
                who = (
                    "; it is started again by the first rank alone, and only while that samples: continue the run, or "
                    "set rollouts.independent to false and rollouts.ahead to 0"
                    if self.ours_elsewhere
                    else ""
                )
                raise WorkerError(
                    f"vllm server {target.name} did not come back within {self.request_s:.0f} s (sampler.request_s): "
                    f"{reason}{who}"
                )
            time.sleep(1.0)


def _adapter_fault(target: Remote, timeout_s: float) -> str:
    """Like `_fault`, for a server with fixed weights and an adapter."""
    try:
        served = json.loads(fetch(f"{target.name}/v1/models", timeout_s, headers=header(target.key)))
        names = [str(model["id"]) for model in served["data"]]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if target.adapter in names else f"it holds no adapter {target.adapter}"
