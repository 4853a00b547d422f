"""TransformerEngine's layers in the same decoder: fused norm and linear, its attention over packed documents, fp8."""

from __future__ import annotations

from functools import cache
from typing import Any

from .layers import GatedMLP, PackedAttention, PackedInput


@cache
def available() -> bool:
    """Whether TransformerEngine imports and a GPU is there to run it."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401  # type: ignore[import-not-found]
    except (ImportError, OSError):
        return False
    return True


def te_layer_spec(config):
    """One layer of TransformerEngine's modules. Under context parallelism our attention stays: it slices whole
    batches, not documents.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec: Any = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention if config.context_parallel_size > 1 else _packed_te_attention()
    if not config.num_moe_experts:
        spec.submodules.mlp.module = GatedMLP
    return spec


@cache
def _packed_te_attention():
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams

    class PackedTEAttention(TEDotProductAttention):
        """Rotary embedding, then TransformerEngine's attention in its packed (thd) format."""

        def forward(
            self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, *, packed_seq_params
        ):
            packed: PackedInput = packed_seq_params
            layout = packed.layout
            params = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=layout.cu_q,
                cu_seqlens_kv=layout.cu_k,
                max_seqlen_q=layout.max_q,
                max_seqlen_kv=layout.max_k,
            )
            out = super().forward(
                packed.rotate(query.squeeze(1)),
                packed.rotate(key.squeeze(1)),
                value.squeeze(1).contiguous(),
                None,
                attn_mask_type=attn_mask_type,  # type: ignore[arg-type]
                packed_seq_params=params,
            )
            return out.reshape(out.shape[0], 1, -1)

    return PackedTEAttention
