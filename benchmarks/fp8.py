"""`python -m terrella.benchmarks.fp8`: a dense layer's matrix products in bf16 and in fp8, and what the casts around
them cost, for the 1.5B and the 8B model's widths. Needs a GPU with fp8.

Products in TFLOP/s; casts in ms and in the bytes that they must move for each second. Weight gradients in fp8 count
their addition to the fp32 buffer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import kernels
from ..core.mcore.wgrad import add_weight_grad
from . import record
from .timing import Timer

SIZES = {"1.5B": (1536, 2048, 8960), "8B": (4096, 6144, 14336)}  # hidden, columns to heads, feed-forward width


def products(tokens: int, rows: int, inner: int) -> dict[str, Callable[[], Any]]:
    """The three products of a weight (rows, inner), in each form."""
    weight = torch.randn(rows, inner, device="cuda").bfloat16()
    x, grads = torch.randn(tokens, inner, device="cuda").bfloat16(), torch.randn(tokens, rows, device="cuda").bfloat16()
    total = torch.zeros(rows, inner, device="cuda")
    low_x, low_w, low_g = kernels.cast_rows(x), kernels.cast_rows(weight), kernels.cast_rows(grads)
    turned_w, turned_x, turned_g = (kernels.cast_columns(t) for t in (weight, x, grads))
    return {
        "forward bf16": lambda: x @ weight.T,
        "forward fp8 fast": lambda: kernels.scaled_product(low_x, low_w, fast=True),
        "forward fp8": lambda: kernels.scaled_product(low_x, low_w),
        "dgrad bf16": lambda: grads @ weight,
        "dgrad fp8 fast": lambda: kernels.scaled_product(low_g, turned_w, fast=True),
        "dgrad fp8": lambda: kernels.scaled_product(low_g, turned_w),
        "wgrad bf16": lambda: add_weight_grad(x, grads, total),
        "wgrad fp8 to fp32": lambda: total.add_(kernels.scaled_product(turned_g, turned_x, torch.float32)),
        "wgrad fp8 to bf16": lambda: total.add_(kernels.scaled_product(turned_g, turned_x)),
    }


def casts(tokens: int, hidden: int, ffn: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Each op, plain and with fp8 results, and the bytes that it must move."""
    x, weight = torch.randn(tokens, hidden, device="cuda").bfloat16(), torch.ones(hidden, device="cuda").bfloat16()
    gates, dy = (
        torch.randn(tokens, 2 * ffn, device="cuda").bfloat16(),
        torch.randn(tokens, ffn, device="cuda").bfloat16(),
    )
    h, f = tokens * hidden, tokens * ffn
    return {
        "cast_rows of states": (lambda: kernels.cast_rows(x), 3 * h),
        "cast_columns of states": (lambda: kernels.cast_columns(x), 3 * h),
        "rmsnorm + residual": (lambda: kernels.rmsnorm_forward(x, weight, x, 1e-6), 8 * h),
        "rmsnorm + residual, fp8 too": (lambda: kernels.rmsnorm_scaled(x, weight, x, 1e-6), 9 * h),
        "swiglu": (lambda: kernels.swiglu(gates), 6 * f),
        "swiglu in fp8": (lambda: kernels.swiglu_scaled(gates), 5 * f),
        "swiglu_backward": (lambda: kernels.swiglu_backward(gates, dy), 12 * f),
        "swiglu_backward, fp8 rows too": (lambda: kernels.swiglu_backward_rows(gates, dy), 14 * f),
        "swiglu_backward in fp8, both ways": (lambda: kernels.swiglu_backward_columns(gates, dy), 11 * f),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    command = record.command_line("python -m terrella.benchmarks.fp8", sys.argv[1:])
    recorder = record.Recorder("fp8", command, torch.cuda.get_device_name(), f"torch {torch.__version__}")
    timer = Timer()
    for size, (hidden, columns, ffn) in SIZES.items():
        for name, rows, inner in (
            ("qkv", columns, hidden),
            ("out", hidden, hidden),
            ("up", 2 * ffn, hidden),
            ("down", hidden, ffn),
        ):
            calls = products(args.tokens, rows, inner)
            timer.warm(calls["forward bf16"])
            for kind, call in calls.items():
                took = timer(call)
                rate = 2.0 * args.tokens * rows * inner / took.ms / 1e9
                recorder.add(f"{size} {name} {args.tokens} x {inner} x {rows}", kind, "rate", rate, "TFLOP/s")
                print(f"{size} {name}, {kind}: {took.ms:.3f} ms, {rate:,.0f} TFLOP/s", flush=True)
        for kind, (call, moved) in casts(args.tokens, hidden, ffn).items():
            took = timer(call)
            recorder.add(f"{size}, {args.tokens} tokens", kind, "time", took.ms, "ms", took.p20, took.p80)
            print(f"{size}, {kind}: {took.ms:.3f} ms, {moved / took.ms / 1e6:,.0f} GB/s", flush=True)
    record.append(recorder.rows, args.out)


if __name__ == "__main__":
    main()
