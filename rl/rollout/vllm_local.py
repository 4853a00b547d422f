"""vLLM on the trainer's own device (colocated), in a child process.

Its scheduling overlaps with our work on its answers, and it may die or hang without taking us along: it is then
restarted, brought back to its version and asked again. Weights come through memory that both processes share.
"""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ...core.errors import ConfigError, DeadlineError, NumericsError, WorkerError
from ...data.trajectory import Invalid
from .forced_spans import Piece, Plain, generate_in_spans
from .sampler import Sample, SampleRequest
from .vllm_config import VllmSettings, noted, request_arguments, use_newest_runner

log = logging.getLogger("terrella")
T = TypeVar("T")


class EngineDied(Exception):
    """The engine's process has died."""


class LocalVllm:
    """A vLLM engine, a child of this process, as sampler and as target of weight sync."""

    name = "vllm"

    def __init__(
        self,
        settings: VllmSettings,
        *,
        request_s: float = 600.0,
        attempts: int = 2,
        resync: Callable[[LocalVllm], None] | None = None,
    ) -> None:
        self.settings, self.request_s, self.attempts, self.resync = settings, request_s, attempts, resync
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        use_newest_runner(self.settings.notes)
        from vllm import LLM

        before = set(multiprocessing.active_children())
        self.llm: Any = LLM(**self.settings.engine_arguments())
        self.children = [p for p in multiprocessing.active_children() if p not in before]
        self.llm.collective_rpc("terrella_end_with", args=(str(os.getpid()),))
        self.version: int | None = 0 if self.settings.load == "auto" else None
        self.asleep: list[str] = []  # parts that are asleep: waking a part twice is a driver error
        self.adapter: tuple[str, int] | None = None  # (folder, version), if only adapters are synchronised

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        for request in requests:
            self.settings.check(request)
        self.wake()
        for attempt in range(1, self.attempts + 1):
            if self.version is None:
                raise ConfigError("vllm: there are no whole weights to sample from; publish a version first")
            try:
                return generate_in_spans(requests, self._generate, self.version)
            except EngineDied as error:
                if attempt == self.attempts:
                    raise WorkerError(
                        f"vllm: the engine died {attempt} times in one rollout; the last reason: {error}"
                    ) from error
                self._restart()
        raise AssertionError("attempts is at least 1")

    def _watched(self, call: Callable[[], T]) -> T:
        """The call's result. EngineDied if the child dies meanwhile; a child that takes too long is killed, because
        vLLM would wait for ever.
        """
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box["value"] = call()
            except BaseException as error:
                box["error"] = error

        thread = threading.Thread(target=work, daemon=True, name="vllm")
        thread.start()
        end = time.monotonic() + self.request_s
        while thread.is_alive():
            thread.join(0.2)
            if time.monotonic() > end:
                for child in self.children:
                    child.kill()
                raise DeadlineError(
                    f"vllm: the engine did not finish a rollout within {self.request_s:.0f} s (request_s); it was ended"
                )
            if not all(child.is_alive() for child in self.children):
                thread.join(2.0)
                break
        error = box.get("error")
        if error is not None and type(error).__name__ != "EngineDeadError":
            raise error
        if "value" not in box:
            raise EngineDied(f"exit codes {[child.exitcode for child in self.children]}: {error or 'no word from it'}")
        return box["value"]

    def _restart(self) -> None:
        version = self.version
        log.warning("vllm: the engine died; restarting it")
        self.close()
        self._start()
        self.restarts += 1
        if self.version == version:
            return
        if self.resync is None:
            raise WorkerError(f"vllm was restarted but there is nothing to bring it back to version {version}")
        self.resync(self)

    def _generate(self, plain: list[Plain]) -> list[Piece | Invalid]:
        from vllm import SamplingParams

        # flat log-probs: one object per sample instead of one per token
        extra: dict[str, Any] = {"detokenize": False, "flat_logprobs": True}
        params = [SamplingParams(**request_arguments(p.request, p.ids, p.limit, p.seed), **extra) for p in plain]
        prompts = [{"prompt_token_ids": list(p.ids)} for p in plain]
        collecting = gc.isenabled()
        gc.disable()  # millions of small objects are created and none is garbage
        try:
            outputs = self._watched(lambda: self.llm.generate(prompts, params, use_tqdm=False, **self._adapter()))
            pairs = zip(plain, outputs, strict=True)
            return [self._piece(output.outputs[0], len(p.ids)) for p, output in pairs]
        finally:
            if collecting:
                gc.enable()

    def _adapter(self) -> dict[str, Any]:
        """The adapter to sample with, if only adapters are synchronised."""
        if self.adapter is None:
            return {}
        from vllm.lora.request import LoRARequest

        folder, version = self.adapter
        return {"lora_request": LoRARequest(f"v{version}", version + 1, folder)}  # its number must be above 0

    def _piece(self, output: Any, prompt: int) -> Piece | Invalid:
        if output.finish_reason not in ("stop", "length"):
            return Invalid(f"vllm: finish reason {output.finish_reason!r}")
        ids = tuple(output.token_ids)
        logprobs = tuple(output.logprobs.logprobs)
        if len(logprobs) != len(ids):
            return Invalid(f"vllm: {len(ids)} tokens with {len(logprobs)} log-probs")
        if not all(map(math.isfinite, logprobs)):
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        experts = noted(output.routed_experts, prompt + len(ids), "vllm") if self.settings.notes else None
        return Piece(ids, logprobs, output.finish_reason, experts)

    def call(self, method: str, *args: str, timeout_s: float) -> list[dict[str, Any]]:
        """Call a method of the weight receiver on every worker."""
        return self.llm.collective_rpc(method, timeout=timeout_s, args=args)

    def accept(self, version: int | None, timeout_s: float) -> None:
        """Serve this version from now on; None serves nothing."""
        if version is None:  # weights are about to arrive and need memory
            self._wake("weights")
        self.version = version
        if version is not None and not self.llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be reset; requests are still running")

    def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        """Sample with the adapter of this folder from now on."""
        if self.adapter is not None:
            self.llm.llm_engine.remove_lora(self.adapter[1] + 1)
        self.adapter = (folder, version)
        if not self.llm.llm_engine.add_lora(self._adapter()["lora_request"]):
            raise RuntimeError(f"vllm did not load the adapter of {folder}")

    def sleep(self, level: int) -> None:
        """Free the GPU memory of weights and cache. Level 1 keeps a copy of the weights in host memory; level 2 keeps
        none, so that a version must be published before the next rollout."""
        if self.asleep:
            return
        self.llm.sleep(level=level)
        self.asleep = ["weights", "kv_cache"]
        if level == 2:
            self.version = None

    def wake(self) -> None:
        """Allocate the memory again."""
        self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        tags = [part for part in self.asleep if part in parts]
        if tags:
            self.llm.wake_up(tags=tags)
            self.asleep = [part for part in self.asleep if part not in tags]

    def close(self) -> None:
        """End the engine and its processes."""
        self.llm = None
        for child in self.children:
            child.join(10.0)
            if child.is_alive():
                child.kill()
                child.join(10.0)
        self.children = []
