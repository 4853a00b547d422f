"""A model to convert, whatever its files are: its config and its full tensors by global name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ..core.errors import ConfigError
from .config import ModelConfig
from .heads import ValueHead
from .lora import LoraConfig, merged


@dataclass(frozen=True)
class Source:
    """A model to convert: its config and its full tensors by global name."""

    kind: str
    path: Path
    config: ModelConfig
    tensor: Callable[[str], torch.Tensor]
    lora: LoraConfig | None = None
    carry_from: Path | None = None  # where tokenizer and generation files are
    value_head: ValueHead = "none"
    value_heads: dict[str, torch.Tensor] = field(default_factory=dict)  # its tensors


def adapters(source: Source, name: str) -> tuple[str, str] | None:
    """Names of a weight's adapter, where it has one."""
    prefix, _, last = name.rpartition(".")
    if (
        source.lora is None
        or last != "weight"
        or ".experts." in name
        or prefix.rsplit(".", 1)[-1] not in source.lora.targets
    ):
        return None
    return f"{prefix}.lora.a", f"{prefix}.lora.b"


def weight(source: Source, name: str) -> torch.Tensor:
    """A full tensor with its adapter folded in."""
    pair = adapters(source, name)
    if pair is None or source.lora is None:
        return source.tensor(name)
    parts = [(part, source.tensor(part)) for part in (*pair, name)]
    return dict(merged(parts, source.config, source.lora))[name]


@contextmanager
def one_rank() -> Iterator[None]:
    """A world of one rank, where the process has none yet."""
    from ..core.mcore import setup, shim

    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("conversion runs in one process; start it without torchrun")
    if not torch.cuda.is_available():
        shim.install()
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        setup.start_process_group(init_method=f"file://{folder}/store", rank=0, world=1)
        try:
            yield
        finally:
            setup.stop_parallel()
            dist.destroy_process_group()
