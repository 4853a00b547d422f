"""The two halves of a dense layer (models/fused_layer.py) with their matrix products in fp8: a scale for each token and
for each row of a weight, made anew every time, so that nothing is remembered between steps. The head's copies are kept
the same way; its products are in the loss kernel.

Norms, attention, residual sums and what is kept for the backward pass stay in bf16, sums in fp32. The weights' fp8
copies, one for each way a product reads them, are made once after every change of the weights and are never saved.

Shape suffixes: T tokens, H hidden, C columns of the projection to heads, A columns of attention's output, F
feed-forward width, N and K rows and columns of any weight.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..core.config import PrecisionConfig
from ..core.errors import ConfigError
from ..core.mcore.wgrad import is_zero
from ..kernels import (
    Scaled,
    cast_both,
    cast_columns,
    cast_rows,
    rmsnorm_backward,
    rmsnorm_scaled,
    scaled_product,
    swiglu_backward,
    swiglu_backward_columns,
    swiglu_backward_rows,
    swiglu_scaled,
)
from .config import ModelConfig
from .fused_layer import norm_gradient, weight_gradient

Products = Literal["forward", "dgrad", "all"]  # in fp8: forward, with the inputs' gradients, with the weights' too
# Tensor cores add up fp8 products with some 14 bits unless they are told to carry sums over to fp32 now and then. What
# is cut off is a bias, and long sums of gradients gather more of it.
FAST_FORWARD, FAST_GRADIENTS = True, False


def check_fp8(model: ModelConfig, tensor_ranks: int, adapters: bool, precision: PrecisionConfig) -> None:
    """Refuse what our fp8 layers cannot compute, naming the setting to change."""
    skip = precision.fp8_skip
    reasons = {
        "a model with experts (model.experts)": model.experts > 0,
        "the layers of model.block: gemma": model.block == "gemma",
        "tensor parallelism (parallel.tensor > 1)": tensor_ranks > 1,
        "adapters (lora)": adapters,
    }
    for what, found in reasons.items():
        if found:
            raise ConfigError(f"precision.fp8: our layers have no fp8 for {what}; set precision.fp8: false")
    if 2 * skip >= model.layers:
        raise ConfigError(
            f"precision.fp8_skip: {skip} at each end leaves none of the model's {model.layers} layers in fp8"
        )
    heads, groups = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = {"hidden": model.hidden, "ffn": model.ffn, "heads x head_dim": heads, "kv_heads x head_dim": groups}
    for name, size in sizes.items():
        if size % 16:
            raise ConfigError(f"model.{name}: {size} is no multiple of 16, which fp8 products need (precision.fp8)")
    if precision.fp8_head and model.padded_vocab % 16:
        raise ConfigError(
            f"model.vocab: {model.vocab} makes {model.padded_vocab} rows of the head, no multiple of 16, which fp8 "
            "products need; set precision.fp8_head: false"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError("precision.fp8: needs a GPU of compute capability 8.9 or later; set precision.fp8: false")


class Weight:
    """A parameter (N, K) and its copies in fp8: rows for the forward product, columns for the inputs' gradient."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self.rows: Scaled | None = None
        self.columns: Scaled | None = None

    @torch.no_grad()
    def cast(self, weight_NK: torch.Tensor) -> None:
        """Into the same memory every time, which CUDA graphs rely on."""
        if self.products == "forward":
            self.rows = cast_rows(weight_NK.data, self.rows)
        else:
            self.rows, self.columns = cast_both(weight_NK.data, self.rows, self.columns)

    def drop(self) -> None:
        """Free the copies."""
        self.rows = self.columns = None

    def by_rows(self) -> Scaled:
        """The copy that the forward product reads."""
        if self.rows is None:
            raise RuntimeError("fp8: the model's cast_weights() was not called after its weights were set")
        return self.rows

    def project(self, x_TK: Scaled) -> torch.Tensor:
        """x @ weight.T"""
        return scaled_product(x_TK, self.by_rows(), fast=FAST_FORWARD)

    def input_gradient(self, grads_TN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """grads @ weight"""
        return grads_TN @ weight_NK if self.columns is None else self.from_rows(cast_rows(grads_TN))

    def from_rows(self, grads_TN: Scaled) -> torch.Tensor:
        """The same of gradients that are in fp8 already."""
        assert self.columns is not None
        return scaled_product(grads_TN, self.columns, fast=FAST_GRADIENTS)

    def gradients(
        self, weight_NK: Any, inputs_TK: torch.Tensor, grads_TN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(grads @ weight; grads.T @ inputs, added to the weight's fp32 buffer where it has one)"""
        if self.products != "all":
            return self.input_gradient(grads_TN, weight_NK), weight_gradient(weight_NK, inputs_TK, grads_TN)
        low_TN, low_NT = cast_both(grads_TN)
        return self.from_rows(low_TN), self.from_columns(weight_NK, cast_columns(inputs_TK), low_NT)

    def from_columns(self, weight_NK: Any, inputs_KT: Scaled, grads_NT: Scaled) -> torch.Tensor:
        """The second of factors that are in fp8 already."""
        # only Hopper's products with such scales give fp32
        wide = not weight_NK.is_cuda or torch.cuda.get_device_capability() == (9, 0)
        kind = torch.float32 if wide else torch.bfloat16
        total = getattr(weight_NK, "main_grad", None)
        zero = total is not None and is_zero(weight_NK)
        into = total if zero and wide else None
        product_NK = scaled_product(grads_NT, inputs_KT, kind, fast=FAST_GRADIENTS, out=into)
        if total is None:
            return product_NK.to(weight_NK.dtype)
        if into is None:
            total.add_(product_NK)
        weight_NK.grad_added_to_main_grad = True
        return torch.empty_like(weight_NK)


class LayerWeights:
    """The four weights of a dense layer."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self.qkv, self.out, self.up, self.down = (Weight(products) for _ in range(4))

    def drop(self) -> None:
        """Free the copies."""
        for weight in (self.qkv, self.out, self.up, self.down):
            weight.drop()


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, norm_H, weight_CH, eps, low: LayerWeights):
        normed_TH, _, rstd_T, cast_TH = rmsnorm_scaled(x_TH, norm_H, None, eps)
        ctx.save_for_backward(x_TH, normed_TH, rstd_T, norm_H, weight_CH)
        ctx.low = low
        return low.qkv.project(cast_TH), x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx, grad_TC, residual_TH):
        x_TH, normed_TH, rstd_T, norm_H, weight_CH = ctx.saved_tensors
        dnormed_TH, dweight = ctx.low.qkv.gradients(weight_CH, normed_TH, grad_TC)
        dx_TH, dnorm_H = rmsnorm_backward(dnormed_TH, residual_TH, x_TH, norm_H, rstd_T)
        return dx_TH, norm_gradient(norm_H, dnorm_H), dweight, None, None


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attended_TA, residual_TH, out_HA, norm_H, up_2FH, down_HF, eps, low: LayerWeights):
        projected_TH = low.out.project(cast_rows(attended_TA))
        normed_TH, sum_TH, rstd_T, cast_TH = rmsnorm_scaled(projected_TH, norm_H, residual_TH, eps)
        gates_T2F = low.up.project(cast_TH)
        ctx.save_for_backward(attended_TA, sum_TH, normed_TH, rstd_T, gates_T2F, out_HA, norm_H, up_2FH, down_HF)
        ctx.low = low
        return sum_TH + low.down.project(swiglu_scaled(gates_T2F))

    @staticmethod
    def backward(ctx, grad_TH):
        attended_TA, sum_TH, normed_TH, rstd_T, gates_T2F, out_HA, norm_H, up_2FH, down_HF = ctx.saved_tensors
        low: LayerWeights = ctx.low
        if low.products == "all":
            low_TH, low_HT = cast_both(grad_TH)
            dgates_T2F, turned_2FT, gated_FT = swiglu_backward_columns(gates_T2F, low.down.from_rows(low_TH))
            dnormed_TH = low.up.from_rows(dgates_T2F)
            dup = low.up.from_columns(up_2FH, cast_columns(normed_TH), turned_2FT)
            ddown = low.down.from_columns(down_HF, gated_FT, low_HT)
        else:
            dgated_TF = low.down.input_gradient(grad_TH, down_HF)
            if low.products == "dgrad":
                wide_T2F, gated_TF, dgates_T2F = swiglu_backward_rows(gates_T2F, dgated_TF)
                dnormed_TH = low.up.from_rows(dgates_T2F)
            else:
                wide_T2F, gated_TF = swiglu_backward(gates_T2F, dgated_TF)
                dnormed_TH = wide_T2F @ up_2FH
            dup = weight_gradient(up_2FH, normed_TH, wide_T2F)
            ddown = weight_gradient(down_HF, gated_TF, grad_TH)
        dsum_TH, dnorm_H = rmsnorm_backward(dnormed_TH, grad_TH, sum_TH, norm_H, rstd_T)
        dattended_TA, dout = low.out.gradients(out_HA, attended_TA, dsum_TH)
        return dattended_TA, dsum_TH, dout, norm_gradient(norm_H, dnorm_H), dup, ddown, None, None


def before_attention(
    x_TH: torch.Tensor, norm_H: torch.Tensor, weight_CH: torch.Tensor, eps: float, low: LayerWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in models/fused_layer.py."""
    return _Before.apply(x_TH, norm_H, weight_CH, eps, low)  # type: ignore[return-value]


def after_attention(
    attended_TA: torch.Tensor,
    residual_TH: torch.Tensor,
    out_HA: torch.Tensor,
    norm_H: torch.Tensor,
    up_2FH: torch.Tensor,
    down_HF: torch.Tensor,
    eps: float,
    low: LayerWeights,
) -> torch.Tensor:
    """As in models/fused_layer.py."""
    weights = out_HA, norm_H, up_2FH, down_HF
    return _After.apply(attended_TA, residual_TH, *weights, eps, low)  # type: ignore[return-value]
