"""What ranks run in the conversion tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine


def from_any(**kwargs: Any) -> dict[str, Any]:
    from terrella.models import convert

    return convert.from_any(**kwargs)


def to_hf(**kwargs: Any) -> dict[str, Any]:
    from terrella.models import convert

    return convert.to_hf(**kwargs)


def import_logits(folder: str, parallel: dict) -> torch.Tensor:
    from terrella.models import hf
    from terrella.models.gpt import build_gpt

    config = hf.read_config(folder)
    engine = Engine(build_gpt(config), ParallelConfig(**parallel), None, PrecisionConfig())
    hf.import_hf(engine, folder)
    return hf.engine_logits(engine, hf.proof_batch(config))


def train_lora(folder: str, out: str, parallel: dict) -> None:
    """Train adapters on a base model for two steps and save."""
    from terrella.models import hf
    from terrella.models.gpt import build_gpt
    from terrella.tests.parallel import jobs

    config = hf.read_config(folder)
    engine = Engine(
        build_gpt(config, lora=jobs.LORA), ParallelConfig(**parallel), OptimizerConfig(lr=1e-2), PrecisionConfig()
    )
    hf.import_hf(engine, folder)
    frozen = {p.name: p.param.clone() for p in engine.local_parameters() if ".lora." not in p.name}
    for _ in range(2):
        engine.step(jobs.share(engine, jobs.batches(4)), jobs.cross_entropy)
    for p in engine.local_parameters():
        assert ".lora." in p.name or torch.equal(p.param, frozen[p.name]), f"{p.name} is frozen but moved"
    engine.save(Path(out))


def save_critic(out: str, value_head: Any) -> None:
    """A checkpoint of a model with value heads."""
    from terrella.tests.parallel import jobs

    jobs.make_engine({}, value_head=value_head).save(Path(out))


def twin_values(folder: str) -> torch.Tensor:
    """Load a converted critic into an engine with twin heads and read its values."""
    from terrella.core.checkpoint import CheckpointReader
    from terrella.models import hf
    from terrella.models.config import ModelConfig
    from terrella.models.gpt import build_gpt

    described = CheckpointReader(Path(folder)).manifest["model"]
    config = ModelConfig.from_dict(described["model"])
    engine = Engine(build_gpt(config, value_head=described["value_head"]), ParallelConfig(), None, PrecisionConfig())
    engine.load(folder)
    return engine.score([hf.proof_batch(config)], lambda hidden, head, batch: {"values": head.values_T})[0]["values"]


def write_verl_fsdp(folder: str, out: str) -> None:
    """Each rank saves its part of every tensor as a DTensor, as FSDP's sharded state dict has them."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = load_file(Path(folder) / "model.safetensors")
    parts = {k: distribute_tensor(v, mesh, [Shard(0) if v.dim() > 1 else Replicate()]) for k, v in state.items()}
    Path(out).mkdir(exist_ok=True)
    torch.save(parts, Path(out) / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
