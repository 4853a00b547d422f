"""A sampler on the weights of a Hugging Face folder, for commands that ask a model without training it."""

from __future__ import annotations

from pathlib import Path

import torch

from ...models.config import ModelConfig
from ...models.families import parameter_names
from ...models.hf import read_config, weight_source
from .embedded import EmbeddedSampler


def folder_sampler(folder: Path) -> tuple[EmbeddedSampler, ModelConfig]:
    """The sampler, on a GPU if there is one, and the model's config. On CPUs it computes in fp32: many emulate bf16
    many times slower.
    """
    config = read_config(folder)
    source, _ = weight_source(folder, config)
    gpu = torch.cuda.is_available()
    weights = {name: source(name).cuda() if gpu else source(name).float() for name in parameter_names(config)}
    return EmbeddedSampler(lambda: weights, config), config
