"""vLLM inside this process: the colocated sampler. On GPU its weights are copied from the trainer's without leaving the device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from ...core.errors import ConfigError, NumericsError
from ...data.trajectory import Invalid
from .sampler import Sample, SampleRequest
from .spans import Piece, Plain, generate_in_spans
from .vllm_config import VllmSettings, request_arguments


class LocalVllm:
    """A vLLM engine of this process, as sampler and as target of weight sync."""

    name = "vllm"

    def __init__(self, settings: VllmSettings) -> None:
        if settings.tensor == 1:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core shares our process, so tensors need no transport
        from vllm import LLM

        self.settings = settings
        self.llm: Any = LLM(**settings.engine_arguments())
        self.version: int | None = 0 if settings.load == "auto" else None

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        if self.version is None:
            raise ConfigError("vllm: there are no whole weights to sample from; publish a version first")
        for request in requests:
            self.settings.check(request)
        return generate_in_spans(requests, self._generate, self.version)

    def _generate(self, plain: list[Plain]) -> list[Piece | Invalid]:
        from vllm import SamplingParams

        params = [SamplingParams(**request_arguments(p.request, p.ids, p.limit, p.seed), detokenize=False) for p in plain]
        outputs = self.llm.generate([{"prompt_token_ids": list(p.ids)} for p in plain], params, use_tqdm=False)
        return [self._piece(output.outputs[0]) for output in outputs]

    @staticmethod
    def _piece(output: Any) -> Piece | Invalid:
        if output.finish_reason not in ("stop", "length"):
            return Invalid(f"vllm: finish reason {output.finish_reason!r}")
        ids = tuple(output.token_ids)
        logprobs = tuple(float(found[token].logprob) for token, found in zip(ids, output.logprobs, strict=True))
        if not all(math.isfinite(p) for p in logprobs):
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        return Piece(ids, logprobs, output.finish_reason)

    def call(self, method: str, *args: str, timeout_s: float) -> list[dict[str, Any]]:
        """Call the weight receiver of every worker."""
        return self.llm.collective_rpc(method, timeout=timeout_s, args=args)

    def call_direct(self, method: str, weights: Iterable[tuple[str, Any]], version: int) -> list[dict[str, Any]]:
        """Hand tensors of this process to the worker of this process."""
        if self.settings.tensor != 1:
            raise ConfigError("vllm.tensor: tensors can be handed over directly only with 1; use broadcast")
        return self.llm.collective_rpc(method, args=(weights, version))

    def accept(self, version: int | None, timeout_s: float) -> None:
        """Serve this version from now on, or nothing."""
        self.version = version
        if version is not None and not self.llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be reset; requests are still running")

    def sleep(self, level: int = 1) -> None:
        """Give the GPU memory of weights and cache back to the trainer. Level 2 drops the weights: publish before generating."""
        self.llm.sleep(level=level)
        if level == 2:
            self.version = None

    def wake(self) -> None:
        """Take the memory again."""
        self.llm.wake_up()

    def close(self) -> None:
        """End the engine."""
        self.llm = None
