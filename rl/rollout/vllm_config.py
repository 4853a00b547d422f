"""Settings of a vLLM rollout engine, and what they allow a request to ask; importable without torch and vllm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...core.errors import ConfigError
from ...data.trajectory import Routing
from .sampler import SampleRequest

EXTENSION = "terrella.rl.sync.receiver.WeightReceiver"
BATCHED_TOKENS = 16_384  # prompt tokens read at once


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes that a graph is recorded for: at most a third of a batch is padding."""
    sizes = sorted({base << shift for base in (1, 3) for shift in range(20) if base << shift != 3})
    return [s for s in sizes if s < largest] + [largest]


def use_newest_runner(notes: bool = False) -> None:
    """Let vLLM on a GPU use its newer model runner, unless the environment says which. It draws every request's random
    numbers at once; the older one does so request by request, which takes longer than the model itself when hundreds
    are decoded together. The newer one alone notes the experts that were chosen."""
    import torch

    if notes:
        check_notes()
    if torch.cuda.is_available():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")


def check_notes() -> None:
    """Refuse to ask for the experts that were chosen where vLLM cannot tell them."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "rollouts.replay_routing: vLLM on a CPU cannot tell which experts it chose; set replay_routing: false, or "
            "sampler.kind: embedded"
        )


@dataclass(frozen=True)
class VllmSettings:
    """One vLLM engine.

    vLLM reports either the model's own log-probs (`raw`: right at temperature 0 and 1, with any truncation) or those
    after temperature and truncation (`processed`: right at any temperature without truncation). What cannot be reported
    right is refused.
    """

    model: str  # a Hugging Face folder; its weights are used unless load = dummy
    load: Literal["auto", "dummy"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    logprobs: Literal["raw", "processed"] = "raw"
    tensor: int = 1
    max_length: int = 2048  # prompt and continuation
    max_sequences: int = 256  # decoded at once
    gpu_memory: float = 0.5  # share of the GPU's memory
    eager: bool = False  # no compilation, no CUDA graphs
    sleep: bool = False  # the engine can give its memory back between rollouts
    lora_rank: int = 0  # above 0: adapters of this rank are loaded beside fixed weights
    notes: bool = False  # answers tell the experts that were chosen
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.max_length < 2 or self.max_sequences < 1 or not 0 < self.gpu_memory <= 1:
            raise ValueError(f"max_length: sizes must be positive and gpu_memory in (0, 1], not {self}")

    def engine_arguments(self) -> dict[str, Any]:
        """As vLLM's engine takes them."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "load_format": self.load,
            "dtype": self.dtype,
            "logprobs_mode": f"{self.logprobs}_logprobs",
            "tensor_parallel_size": self.tensor,
            "max_model_len": self.max_length,
            "max_num_seqs": self.max_sequences,
            "gpu_memory_utilization": self.gpu_memory,
            "enforce_eager": self.eager,
            "seed": self.seed,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "worker_extension_cls": EXTENSION,
        }
        if self.notes:
            arguments["enable_return_routed_experts"] = True
        if self.sleep:
            arguments["enable_sleep_mode"] = True
        if self.lora_rank:
            arguments |= {"enable_lora": True, "max_lora_rank": self.lora_rank, "max_loras": 1}
        if not self.eager:  # graphs for large batches too, and fewer of them, since each takes time to record
            arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(self.max_sequences)}
            arguments["max_num_batched_tokens"] = max(BATCHED_TOKENS, self.max_length)
        return arguments

    def check(self, request: SampleRequest) -> None:
        """Refuse what vLLM would answer with log-probs of another distribution, or cut short."""
        p = request.params
        if request.length > self.max_length:
            raise ConfigError(
                f"a prompt with its continuation takes {request.length} tokens, above max_length = {self.max_length} "
                "of vllm"
            )
        bent = p.top_p < 1 or p.top_k > 0 or p.allowed is not None or p.repetition_penalty != 1
        if self.logprobs == "processed" and bent:
            raise ConfigError(
                "vllm.logprobs = processed: top_p, top_k, allowed ranges and penalties change the reported log-probs; "
                "leave them out, or sample at temperature 1 with vllm.logprobs = raw"
            )
        if self.logprobs == "raw" and p.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"temperature: {p.temperature} needs vllm.logprobs = processed; raw log-probs are those at "
                "temperature 1"
            )


def noted(chosen_TLK: Any, tokens: int, engine: str) -> Routing:
    """The experts that an engine chose for `tokens` tokens, the last of which it did not read."""
    if chosen_TLK is None or len(chosen_TLK) not in (tokens - 1, tokens):
        raise ConfigError(
            f"rollouts.replay_routing: {engine} tells the experts of {0 if chosen_TLK is None else len(chosen_TLK)} "
            f"tokens, not of {tokens - 1}; this vLLM cannot, set replay_routing: false"
        )
    whole = np.full((tokens, *chosen_TLK.shape[1:]), -1, np.int16)
    whole[:-1] = chosen_TLK[: tokens - 1]
    return Routing.of(whole)


def request_arguments(request: SampleRequest, ids: tuple[int, ...], limit: int, seed: int) -> dict[str, Any]:
    """One plain continuation as vLLM's sampling parameters: ends only at our stop ids or the limit."""
    p = request.params
    arguments: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "repetition_penalty": p.repetition_penalty,
        "stop_token_ids": list(p.stop_ids),
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,
    }
    return arguments | ({"allowed_token_ids": list(range(*p.allowed))} if p.allowed is not None else {})
