"""Triton kernels beside their plain-torch references; every op picks by device. Imports torch and triton only."""

from .adam import adam_update
from .advantage import bilevel_gae, gae, group_advantage, spread_rows, variance_filter
from .fp8 import (
    cast_both,
    cast_columns,
    cast_rows,
    rmsnorm_scaled,
    scaled_product,
    swiglu_backward_columns,
    swiglu_backward_rows,
    swiglu_scaled,
)
from .fsq import fsq_dequantize, fsq_quantize
from .linear_logprob import linear_logprob
from .logprob import token_logprob
from .policy import PolicyOutput, PolicySettings, PolicyTerms
from .policy_loss import linear_policy_loss
from .qkv import cut_heads, qkv_rope
from .rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_forward
from .rope import rope, rope_table
from .rows import sum_rows
from .scaled import Scaled
from .swiglu import swiglu, swiglu_backward, weighted_swiglu, weighted_swiglu_backward

__all__ = [
    "PolicyOutput",
    "PolicySettings",
    "PolicyTerms",
    "Scaled",
    "adam_update",
    "bilevel_gae",
    "cast_both",
    "cast_columns",
    "cast_rows",
    "cut_heads",
    "fsq_dequantize",
    "fsq_quantize",
    "gae",
    "group_advantage",
    "linear_logprob",
    "linear_policy_loss",
    "qkv_rope",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "rmsnorm_scaled",
    "rope",
    "rope_table",
    "scaled_product",
    "spread_rows",
    "sum_rows",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_columns",
    "swiglu_backward_rows",
    "swiglu_scaled",
    "token_logprob",
    "variance_filter",
    "weighted_swiglu",
    "weighted_swiglu_backward",
]
