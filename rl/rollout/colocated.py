"""A vLLM engine on the trainer's own device: each rank has one, samples its own prompts and sends it its weights
through shared memory.

The two take turns. While vLLM samples, the trainer can lie in host memory (`offload`); while the trainer works, vLLM
can sleep. What the device held in each turn is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.engine import Engine
from ...core.errors import ConfigError
from ...core.mesh import Mesh
from ...data.trajectory import Invalid
from ...models.config import ModelConfig
from ...models.lora import LoraConfig
from ..sync.adapter import AdapterTransport
from ..sync.names import adapter_weights, base_weights, engine_weights
from ..sync.publish import publish as send
from ..sync.transports import IpcTransport
from .config import Vllm
from .sampler import Sample, SampleRequest
from .vllm_config import VllmSettings
from .vllm_local import LocalVllm


class ColocatedSampler:
    """The sampler of one rank. The loop calls `rest` after sampling, before it trains."""

    def __init__(self, engine: Engine, local: LocalVllm, sleep: int, offload: bool) -> None:
        self.engine, self.local, self.level, self.offload = engine, local, sleep, offload
        self.parked = False
        self.memory: dict[str, float] = {}  # GiB in use on the device, while sampling and while training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        if self.offload and not self.parked:
            self.engine.offload()
            self.parked = True
        samples = self.local.generate(requests)
        self._measure("sampling")
        return samples

    def rest(self) -> dict[str, float]:
        """Hand the device to the trainer; returns the memory in use while sampling and while training."""
        if self.level:
            self.local.sleep(self.level)
        if self.parked:
            self.engine.reload()
            self.parked = False
        self._measure("training")
        return {f"time/gib_while_{turn}": value for turn, value in self.memory.items()}

    def _measure(self, turn: str) -> None:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.memory[turn] = (total - free) / 2**30


def lora_of(engine: Engine) -> LoraConfig:
    """The adapters' settings of an engine that has some."""
    lora = getattr(engine.build, "lora", None)
    if lora is None:
        raise ConfigError("sampler.adapters_only: the model has no adapters; leave it out, or train with lora")
    return lora


def write_base(engine: Engine, model: ModelConfig, folder: Path, writes: bool) -> None:
    """The frozen weights as a Hugging Face folder. Collective; one rank writes."""
    from ...models.hf import hf_tensors, write_folder

    precision = "bf16" if engine.precision.params == "bf16" else "fp32"
    tensors = hf_tensors(model, base_weights(engine), precision)
    if writes:
        write_folder(folder, model, tensors, precision, None, 1 << 30)
    else:
        for _ in tensors:
            pass


def open_colocated(
    config: Vllm, settings: VllmSettings, engine: Engine, model: ModelConfig, folder: Path, mesh: Mesh
) -> tuple[ColocatedSampler, Callable[[int], Any]]:
    """The sampler and its `publish(version)`; every rank calls both."""
    weights = engine_weights
    transport: Any = IpcTransport()
    if settings.lora_rank:
        # every rank writes the adapters for its own engine
        transport, weights = (
            AdapterTransport(folder / f"adapters-{mesh.rank}", model, lora_of(engine), settings.model),
            adapter_weights,
        )

    def publish(version: int) -> Any:
        gather, timeout_s = mesh.gather_all, config.sync_s
        return send(transport, [local], lambda: weights(engine), version, timeout_s=timeout_s, gather=gather)

    def resync(target: LocalVllm) -> None:
        if engine.parallel.model_size * engine.parallel.expert > 1:
            raise ConfigError(
                f"{target.name}: was restarted, but its weights lie on several ranks; start the run again"
            )
        if sampler.parked:
            engine.reload()
        send(transport, [target], lambda: weights(engine), engine.steps, timeout_s=config.sync_s)
        if sampler.parked:
            engine.offload()

    local = LocalVllm(settings, request_s=config.request_s, resync=resync)
    sampler = ColocatedSampler(engine, local, config.sleep, config.offload)
    return sampler, publish
