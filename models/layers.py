"""Our layer specification for megatron-core: RMSNorm that knows sequence parallelism, rotary attention over packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..core.layout import DocumentLayout
from .attention import packed_attention
from .rope import rotate


@dataclass(frozen=True)
class PackedInput:
    """What every layer of one forward pass shares. Megatron hands it through as `packed_seq_params`."""

    layout: DocumentLayout
    cos_T11R: torch.Tensor
    sin_T11R: torch.Tensor
    interleaved: bool
    qkv_format: str = "sbhd"


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose gradient is summed over tensor ranks when the sequence is spread over them."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Megatron's core attention slot: rotary embedding, then attention within documents."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_: object) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        packed: PackedInput = packed_seq_params
        query = rotate(query, packed.cos_T11R, packed.sin_T11R, packed.interleaved)
        key = rotate(key, packed.cos_T11R, packed.sin_T11R, packed.interleaved)
        context_group = parallel_state.get_context_parallel_group() if self.config.context_parallel_size > 1 else None
        out_THD = packed_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed.layout, self.scale, context_group)
        return out_THD.reshape(out_THD.shape[0], 1, -1)


def layer_spec(config) -> ModuleSpec:
    """One layer of ours: dense or with experts, with or without query and key norms."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config, layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and the final norm."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * layers, layer_norm=RMSNorm)
