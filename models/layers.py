"""Our layer specification for megatron-core: RMSNorm that knows sequence parallelism, rotary attention over packed
documents.

Shape suffixes: T local tokens, H hidden, F feed-forward width, D head dimension, R half of the rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    all_gather_last_dim_from_tensor_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from .. import kernels
from ..core.errors import ConfigError
from ..core.layout import DocumentLayout
from ..kernels.batch_invariant import is_batch_invariant
from . import fp8, fused_layer
from .attention import packed_attention
from .expert_dispatch import choose_dispatcher
from .experts import GroupedExperts
from .fused_layer import weight_gradient
from .replay import Balance, attach_replay
from .rope import rotate


@dataclass(frozen=True)
class PackedInput:
    """What every layer of one forward pass shares. Megatron hands it through as `packed_seq_params`."""

    layout: DocumentLayout
    table_T2R: torch.Tensor  # fp32: cosines, then sines of every token
    rows_T: torch.Tensor  # 0 .. T-1
    interleaved: bool
    local_T2R: torch.Tensor | None = None  # the table of sliding layers, where there are some
    experts_TLK: torch.Tensor | None = None  # given choices, for the tokens of this tensor rank where they are shared
    balance: Balance | None = None
    qkv_format: str = "sbhd"

    def table(self, sliding: bool) -> torch.Tensor:
        """The table of a layer."""
        return self.local_T2R if sliding and self.local_T2R is not None else self.table_T2R

    def rotate(self, x_THD: torch.Tensor, sliding: bool = False) -> torch.Tensor:
        """Queries or keys turned by their tokens' positions."""
        table_T2R = self.table(sliding)
        if x_THD.is_cuda and not self.interleaved:
            return kernels.rope(x_THD, table_T2R, self.rows_T)
        cos_T1R, sin_T1R = table_T2R.to(x_THD.dtype)[:, None, :].chunk(2, -1)
        return rotate(x_THD, cos_T1R, sin_T1R, self.interleaved)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose gradient is summed over tensor ranks when the sequence is spread over them. Weights
    around zero (Gemma) are taken plus one, in fp32.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps, self.around_zero = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_residual(x)[0]

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum). Going on from the returned sum lets one kernel join the two gradients on the
        way back.
        """
        if self.around_zero:
            total = x if residual is None else x + residual
            weight = 1.0 + self.weight.float()
            return F.rms_norm(total.float(), weight.shape, weight, self.eps).to(total.dtype), total
        if x.is_cuda:
            return kernels.rmsnorm(x, self.weight, residual, eps=self.eps)
        total = x if residual is None else x + residual
        return F.rms_norm(total, self.weight.shape, self.weight, self.eps), total


class _GatedOutput(torch.autograd.Function):
    """silu(gate) * up, then the output projection. The product is not kept: the backward kernel of the gate makes it
    again.
    """

    @staticmethod
    def forward(ctx, x_T2F: torch.Tensor, weight_HF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_T2F, weight_HF)
        return kernels.swiglu(x_T2F) @ weight_HF.T

    @staticmethod
    def backward(ctx, grad_TH: torch.Tensor):
        x_T2F, weight_HF = ctx.saved_tensors
        dx_T2F, y_TF = kernels.swiglu_backward(x_T2F, grad_TH @ weight_HF)
        return dx_T2F, weight_gradient(weight_HF, y_TF, grad_TH)


class GatedMLP(MLP):
    """Megatron's dense feed-forward block with the gate in one kernel."""

    def forward(self, hidden_states, per_token_scale=None, **_: object):
        x, _ = self.linear_fc1(hidden_states)
        fc2: Any = self.linear_fc2
        if not isinstance(fc2, RowParallelLinear) or not fc2.weight.requires_grad:
            return fc2(kernels.swiglu(x))
        out = _GatedOutput.apply(x.view(-1, x.shape[-1]), fc2.weight).view(*x.shape[:-1], -1)
        gather = (
            reduce_scatter_to_sequence_parallel_region
            if fc2.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return gather(out, group=fc2.tp_group), None


class GeluMLP(MLP):
    """The same with Gemma's gate."""

    def forward(self, hidden_states, per_token_scale=None, **_: object):
        x, _ = self.linear_fc1(hidden_states)
        gate, up = x.chunk(2, -1)
        return self.linear_fc2(F.gelu(gate, approximate="tanh") * up)


def _context_group(config: Any) -> Any:
    return parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None


class PackedAttention(MegatronModule):
    """Megatron's core attention slot: rotary embedding, then attention within documents."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_: object) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, *, packed_seq_params
    ):
        packed: PackedInput = packed_seq_params
        query, key, value = packed.rotate(query.squeeze(1)), packed.rotate(key.squeeze(1)), value.squeeze(1)
        out_THD = packed_attention(query, key, value, packed.layout, self.scale, _context_group(self.config))
        return out_THD.reshape(out_THD.shape[0], 1, -1)


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with all that lies between its two projections in our hands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.linear_qkv: Any
        tensor: int = self.config.tensor_model_parallel_size
        groups: Any = self.config.num_query_groups
        self.sharers = tensor // groups if groups < tensor else 1  # ranks that use the same key and value head
        if self.sharers > 1:  # Megatron counts the queries of the whole group
            self.num_attention_heads_per_partition = self.config.num_attention_heads // tensor
        # the kernel that cuts the heads adds it, but where ranks share them each has rows of the bias for another's
        self.linear_qkv.skip_bias_add = self.sharers == 1

    def forward(self, hidden_states, attention_mask=None, *, packed_seq_params, **_: object):
        x, bias = self.linear_qkv(hidden_states)
        x_TC = self._own_heads(x).squeeze(1) if self.sharers > 1 else x.squeeze(1)
        out_TA = self.attend(x_TC, bias, packed_seq_params)
        return self.linear_proj(out_TA[:, None])

    def _own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's queries with their key and value, from the projections of all tensor ranks.

        More ranks than key heads: no weight is there twice. The rows of the projection are cut evenly, wherever a head
        ends, and what they give is gathered; on the way back the gradients of all ranks that used it are summed.
        """
        whole = all_gather_last_dim_from_tensor_parallel_region(x, group=self.tp_group)
        groups: Any = self.config.num_query_groups
        own, (group, place) = self.num_attention_heads_per_partition, divmod(self.tp_group.rank(), self.sharers)
        heads = whole.view(*x.shape[:-1], groups, own * self.sharers + 2, -1)[..., group, :, :]
        return torch.cat([heads[..., place * own : (place + 1) * own, :], heads[..., -2:, :]], -2).flatten(-2)

    def attend(self, x_TC: torch.Tensor, bias: torch.Tensor | None, packed: PackedInput) -> torch.Tensor:
        """What lies between the projections: (T, A)."""
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        window: Any = self.config.window_size
        every: Any = self.config.window_attn_skip_freq
        sliding = is_layer_window_attention(window, every, self.layer_number)
        if self.q_layernorm is None and not packed.interleaved:
            query, key, value = kernels.qkv_rope(x_TC, bias, packed.table(sliding), heads, groups)
        else:
            query, key, value = kernels.cut_heads(x_TC, bias, heads, groups)
            if self.q_layernorm is not None and self.k_layernorm is not None:
                query, key = self.q_layernorm(query), self.k_layernorm(key)
            query, key = packed.rotate(query, sliding), packed.rotate(key, sliding)
        seen = window[0] + 1 if sliding else 0
        scale, context_group = self.config.softmax_scale, _context_group(self.config)
        return packed_attention(query, key, value, packed.layout, scale, context_group, seen).flatten(1)


class Layer(TransformerLayer):
    """Megatron's layer with each residual addition inside the norm that follows it."""

    in_halves: bool | None = None  # None: on a GPU, where nothing forbids it
    low: fp8.LayerWeights | None = None  # where its products are in fp8, copies of its weights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choose_dispatcher(self.mlp)
        self.replay = attach_replay(self.mlp)
        self.sandwiched = self.config.layernorm_zero_centered_gamma
        if self.sandwiched:
            size, eps = self.config.hidden_size, self.config.layernorm_epsilon
            self.post_attention_norm = RMSNorm(self.config, size, eps)
            self.post_mlp_norm = RMSNorm(self.config, size, eps)

    def forward(self, hidden_states, attention_mask=None, *, packed_seq_params, **_: object):
        if self.low is not None:
            if is_batch_invariant():
                raise ConfigError("batch_invariant: products in fp8 have no invariant form; set precision.fp8: false")
            return self._by_halves(hidden_states, packed_seq_params), None
        if self._whole_weights() and (hidden_states.is_cuda if self.in_halves is None else self.in_halves):
            return self._by_halves(hidden_states, packed_seq_params), None
        normed, residual = self.input_layernorm.with_residual(hidden_states)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packed_seq_params)
        if self.sandwiched:
            normed, residual = self.pre_mlp_layernorm.with_residual(self.post_attention_norm(attended), residual)
            return residual + self.post_mlp_norm(self.mlp(normed)[0]), None
        normed, residual = self.pre_mlp_layernorm.with_residual(attended, residual)
        if self.replay is not None:  # every time: a recomputed pass comes after others
            given_TLK = packed_seq_params.experts_TLK
            self.replay.given_TK = None if given_TLK is None else given_TLK[:, self.layer_number - 1]
            self.replay.balance = packed_seq_params.balance
        out, _ = self.mlp(normed)
        return residual + out, None

    def _whole_weights(self) -> bool:
        """Whether the functions of models/fused_layer.py do what the modules would: a dense block, no other tensor
        ranks, no adapters.
        """
        if self.config.tensor_model_parallel_size > 1 or not isinstance(self.mlp, GatedMLP) or is_batch_invariant():
            return False
        return not any("lora" in linear._modules for linear in self._linears())

    def _linears(self) -> tuple[Any, Any, Any, Any]:
        """Those of a dense layer."""
        attention: Any = self.self_attention
        mlp: Any = self.mlp
        return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2

    def cast_weights(self) -> None:
        """Make the fp8 copies, where there are any, from the weights as they are now."""
        if self.low is not None:
            places = (self.low.qkv, self.low.out, self.low.up, self.low.down)
            for place, linear in zip(places, self._linears(), strict=True):
                place.cast(linear.weight)

    def _by_halves(self, hidden: torch.Tensor, packed: PackedInput) -> torch.Tensor:
        attention: Any = self.self_attention
        first, second = self.input_layernorm, self.pre_mlp_layernorm
        before, after, low = (
            (fused_layer.before_attention, fused_layer.after_attention, ())
            if self.low is None
            else (fp8.before_attention, fp8.after_attention, (self.low,))
        )
        qkv, out, up, down = (linear.weight for linear in self._linears())
        x_TC, residual_TH = before(hidden.squeeze(1), first.weight, qkv, first.eps, *low)
        attended_TA = attention.attend(x_TC, attention.linear_qkv.bias, packed)
        return after(attended_TA, residual_TH, out, second.weight, up, down, second.eps, *low)[:, None]


def layer_spec(config) -> ModuleSpec:
    """One layer of ours: dense or with experts, with or without query and key norms."""
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    spec.module = Layer
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.module = PackedSelfAttention
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = IdentityOp
    if config.num_moe_experts:
        spec.submodules.mlp.submodules.experts.module = GroupedExperts
    else:
        spec.submodules.mlp.module = GeluMLP if config.layernorm_zero_centered_gamma else GatedMLP
    # none rather than Megatron's identity, so that the kernel for heads without norms is taken
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else None
    return spec


def block_spec(layer: ModuleSpec, layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and the final norm."""
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)  # type: ignore[arg-type]
