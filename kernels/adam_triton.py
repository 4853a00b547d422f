"""Triton side of kernels/adam.py: every number is read once and written once. N elements."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _adam_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, step_ptr, divisor_ptr, N, lr, beta1, beta2, log_beta1, log_beta2, eps, decay,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    divisor = tl.load(divisor_ptr)
    if tl.abs(divisor) < float("inf"):  # false for NaN too
        step = tl.load(step_ptr)
        o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        ok = o < N
        g = tl.load(g_ptr + o, mask=ok, other=0.0) / divisor
        m = beta1 * tl.load(m_ptr + o, mask=ok, other=0.0) + (1.0 - beta1) * g
        v = beta2 * tl.load(v_ptr + o, mask=ok, other=0.0) + (1.0 - beta2) * g * g
        p = tl.load(p_ptr + o, mask=ok, other=0.0) * (1.0 - lr * decay)
        correction1, correction2 = 1.0 - tl.exp2(step * log_beta1), 1.0 - tl.exp2(step * log_beta2)
        p -= lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
        tl.store(m_ptr + o, m, mask=ok)
        tl.store(v_ptr + o, v, mask=ok)
        tl.store(p_ptr + o, p, mask=ok)
        if COPY:
            tl.store(copy_ptr + o, p.to(copy_ptr.dtype.element_ty), mask=ok)


def triton_adam_update(master_N, grad_N, exp_avg_N, exp_avg_sq_N, copy_N, step, divisor, *, lr, betas, eps, weight_decay) -> None:
    """See `adam_update`."""
    import math

    count = master_N.numel()
    if count:
        _adam_kernel[(triton.cdiv(count, 2048),)](
            master_N, grad_N, exp_avg_N, exp_avg_sq_N, master_N if copy_N is None else copy_N, step, divisor, count, float(lr),
            betas[0], betas[1], math.log2(betas[0]), math.log2(betas[1]), eps, float(weight_decay), BLOCK=2048, COPY=copy_N is not None,
            num_warps=8,
        )  # fmt: skip
