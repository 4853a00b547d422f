"""The one place where our settings become Megatron's TransformerConfig."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ..config import ParallelConfig, PrecisionConfig, check_layout
from .setup import expert_tensor_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(parallel: ParallelConfig, precision: PrecisionConfig, model: Any) -> Any:
    """Megatron's config for a `ModelConfig` (of models/, which core does not import). What Megatron would silently get
    wrong is set right here or refused.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.transformer_config import TransformerConfig

    check_layout(parallel, world=dist.get_world_size(), **model.cut_sizes)
    dtype = DTYPES[precision.params]
    cuda = torch.cuda.is_available()
    options: dict = {}
    sent = cuda if parallel.expert_dispatch == "auto" else parallel.expert_dispatch == "alltoall"
    if model.experts:
        options.update(
            num_moe_experts=model.experts,
            moe_router_topk=model.experts_per_token,
            moe_ffn_hidden_size=model.expert_ffn,
            moe_router_pre_softmax=not model.expert_weights_sum_to_one,
            moe_router_score_function="softmax",
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_aux_loss_coeff=0.0,
            moe_token_dispatcher_type="alltoall" if sent else "allgather",
            moe_grouped_gemm=False,
        )
    if model.sliding_window:
        options.update(window_size=(model.sliding_window - 1, 0), window_attn_skip_freq=model.global_every)
    if parallel.virtual_pipeline > 1:
        # With two pipeline ranks both neighbours are the same peer, and batched sends pair up wrongly: wrong gradients
        # and no error.
        options.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if parallel.recompute == "full":
        options.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if precision.fp8 and precision.layers == "te":
        options.update(fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max")
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        layernorm_zero_centered_gamma=model.block == "gemma",
        softmax_scale=model.query_scale,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Megatron's initialisers also set the sharding attributes, so they must run; the model's builder draws the
        # weights.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        sequence_parallel=parallel.sequence_parallel,
        bf16=precision.params == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        # The loss is a sum whose weights carry the normalisation: Megatron must not divide it by microbatches, context
        # or data ranks.
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=True,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        **options,
    )


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight
