"""Matrices in fp8 (e4m3: three bits of mantissa) with one fp32 scale for each row, their products, and norm and gate
that give their results in that form.

A row is divided by its largest magnitude and spread over the format's range, so that an element is rounded by at most
2^-4 of itself or, where it is below 2^-14 of the largest, by 2^-18 of that. Values are rounded to the input's type
first: a fused op gives to the bit what casting its plain result gives. Products add up in fp32.

Shape suffixes: N rows, K columns, M rows of another matrix, H hidden, F feed-forward width.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton
from .rmsnorm import reference_rmsnorm_forward
from .scaled import FP8, LARGEST, SMALLEST, Scaled, empty_scaled
from .swiglu import reference_swiglu, reference_swiglu_backward


def reference_cast_rows(x_NK: torch.Tensor) -> Scaled:
    """Plain torch."""
    wide_NK = x_NK.float()
    largest_N = wide_NK.abs().amax(-1).clamp_min(SMALLEST)
    most_N = torch.full_like(largest_N, LARGEST)  # torch divides by a number, and a number, through a reciprocal
    return Scaled((wide_NK * (most_N / largest_N)[:, None]).to(FP8), largest_N / most_N)


def _into(made: Scaled, out: Scaled | None) -> Scaled:
    if out is None:
        return made
    out.data_NK.copy_(made.data_NK)
    out.scale_N.copy_(made.scale_N)
    return out


def cast_rows(x_NK: torch.Tensor, out: Scaled | None = None) -> Scaled:
    """The matrix with a scale for each row; into `out` where given."""
    if use_triton(x_NK):
        from .triton.fp8 import triton_cast_rows

        return triton_cast_rows(x_NK, out)
    return _into(reference_cast_rows(x_NK), out)


def cast_columns(x_NK: torch.Tensor, out: Scaled | None = None) -> Scaled:
    """The transposed matrix (K, N) with a scale for each of its rows; into `out` where given."""
    if use_triton(x_NK):
        from .triton.fp8 import triton_cast_columns

        return triton_cast_columns(x_NK, out)
    return _into(reference_cast_rows(x_NK.T), out)


def cast_both(x_NK: torch.Tensor, rows: Scaled | None = None, columns: Scaled | None = None) -> tuple[Scaled, Scaled]:
    """`cast_rows` and `cast_columns` at once, which reads the matrix twice rather than three times."""
    if use_triton(x_NK):
        from .triton.fp8 import triton_cast_both

        return triton_cast_both(x_NK, rows, columns)
    return _into(reference_cast_rows(x_NK), rows), _into(reference_cast_rows(x_NK.T), columns)


def reference_scaled_product(a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """Plain torch, in fp32."""
    return (a_MK.wide() @ b_NK.wide().T).to(dtype)


def scaled_product(
    a_MK: Scaled,
    b_NK: Scaled,
    dtype: torch.dtype = torch.bfloat16,
    *,
    fast: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T, into `out` (of that `dtype`) where given. `fast` lets tensor cores add up with fewer bits than fp32's;
    on CUDA K and N are multiples of 16.
    """
    if not a_MK.data_NK.is_cuda or not len(a_MK.data_NK):
        product_MN = reference_scaled_product(a_MK, b_NK, dtype)
        return product_MN if out is None else out.copy_(product_MN)
    return torch._scaled_mm(
        a_MK.data_NK,
        b_NK.data_NK.T,
        scale_a=a_MK.scale_N[:, None],
        scale_b=b_NK.scale_N[None],
        out_dtype=dtype,
        use_fast_accum=fast,
        **({} if out is None else {"out": out}),
    )


def rmsnorm_scaled(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scaled]:
    """`rmsnorm_forward`, and its first result in fp8."""
    if use_triton(x_NH):
        from .triton.rmsnorm import triton_rmsnorm_forward

        out = empty_scaled(x_NH.shape[0], x_NH.shape[1], x_NH.device)
        return *triton_rmsnorm_forward(x_NH, weight_H, residual_NH, eps, (out.data_NK, out.scale_N)), out
    y_NH, sum_NH, rstd_N = reference_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)
    return y_NH, sum_NH, rstd_N, reference_cast_rows(y_NH)


def reference_swiglu_scaled(x_N2F: torch.Tensor) -> Scaled:
    """Plain torch."""
    return reference_cast_rows(reference_swiglu(x_N2F))


def swiglu_scaled(x_N2F: torch.Tensor) -> Scaled:
    """`swiglu` in fp8."""
    if use_triton(x_N2F):
        from .triton.fp8 import triton_swiglu_scaled

        return triton_swiglu_scaled(x_N2F)
    return reference_swiglu_scaled(x_N2F)


def reference_swiglu_backward_rows(
    x_N2F: torch.Tensor, dy_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Scaled]:
    """Plain torch."""
    dx_N2F, y_NF = reference_swiglu_backward(x_N2F, dy_NF)
    return dx_N2F, y_NF, reference_cast_rows(dx_N2F)


def swiglu_backward_rows(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scaled]:
    """`swiglu_backward`, and its first result in fp8."""
    if use_triton(x_N2F):
        from .triton.fp8 import triton_swiglu_backward_rows

        return triton_swiglu_backward_rows(x_N2F, dy_NF)
    return reference_swiglu_backward_rows(x_N2F, dy_NF)


def reference_swiglu_backward_columns(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[Scaled, Scaled, Scaled]:
    """Plain torch."""
    dx_N2F, y_NF = reference_swiglu_backward(x_N2F, dy_NF)
    return reference_cast_rows(dx_N2F), reference_cast_rows(dx_N2F.T), reference_cast_rows(y_NF.T)


def swiglu_backward_columns(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[Scaled, Scaled, Scaled]:
    """Both results of `swiglu_backward` in fp8 alone: the gradient by rows, the gradient transposed (2F, N), the
    output transposed (F, N).
    """
    if use_triton(x_N2F):
        from .triton.fp8 import triton_swiglu_backward_columns

        return triton_swiglu_backward_columns(x_N2F, dy_NF)
    return reference_swiglu_backward_columns(x_N2F, dy_NF)
