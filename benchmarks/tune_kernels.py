"""Which tile shapes and chunkings are fastest here: one table, from which the defaults in kernels/ were taken.

Run on the GPU: `python -m terrella.benchmarks.tune_kernels [part ...]`; `--compile` only fills Triton's cache (parts
can run side by side). Shape suffixes: N rows (tokens), V vocabulary, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from ..kernels import linear_logprob, linear_policy_loss
from ..kernels.triton import linear as linear_triton
from ..kernels.triton.advantage import triton_gae
from ..kernels.triton.logprob import finish_rows, launch_backward, launch_stats
from ..kernels.triton.rmsnorm import backward_config, triton_rmsnorm_backward
from ..kernels.vocab import Shard
from .kernels import GRPO_SETTINGS, VOCAB, grpo_terms, head, random_logits
from .timing import Timer

STATS = [
    (512, 8, 32), (512, 8, 40), (512, 8, 48), (1024, 8, 64), (1024, 8, None), (128, 2, 32), (128, 2, 40), (128, 2, 48),
    (128, 1, 64),
    (64, 2, 32),
]  # fmt: skip
BACKWARD = [(1024, 2), (2048, 4)]
GAE = [(1024, 8), (512, 4), (256, 2), (128, 1)]
NORM = [
    (1, 4, 8, 1),
    (1, 4, 8, 3),
    (1, 8, 4, 3),
    (2, 4, 8, 1),
    (2, 4, 4, 3),
    (2, 8, 4, 2),
    (4, 8, 2, 2),
    (4, 8, 4, 1),
    (4, 16, 2, 1),
]
SHAPES = [(16384, VOCAB), (32768, 13312), (32768, 9008), (32768, VOCAB // 8)]


def show(name: str, times: dict[str, float], size: float | None = None, unit: float | None = None) -> None:
    for key, ms in sorted(times.items(), key=lambda item: item[1]):
        extra = f" {size / ms / 1e6:7.0f} GB/s" if size else f"  x{ms / unit:.3f}" if unit else ""
        print(f"{name:44s} {key:28s} {ms:9.4f} ms{extra}", flush=True)


def stats(timer: Timer, compile_only: bool) -> None:
    for rows, vocab in SHAPES[-1:] if compile_only else SHAPES:
        x, y = random_logits(8 if compile_only else rows, vocab)
        out = torch.empty(len(x), 4, device="cuda")
        for entropy in (False, True):
            calls = {
                str(c): partial(launch_stats, x, y, Shard(0, vocab, vocab), 1.0, None, entropy, out, c)
                for c in STATS
                if vocab < VOCAB or c[1] * c[0] >= 1024
            }
            times = {key: timer(call, 20).ms for key, call in calls.items()}
            show(f"stats entropy={entropy} {rows}x{vocab}", times, x.numel() * 2)


def backward(timer: Timer, compile_only: bool) -> None:
    for rows, vocab in SHAPES[-1:] if compile_only else SHAPES:
        _backward_case(timer, 8 if compile_only else rows, vocab)


def _backward_case(timer: Timer, rows: int, vocab: int) -> None:
    x, y = random_logits(rows, vocab)
    n, shard = len(x), Shard(0, vocab, vocab)
    st, saved, g = torch.empty(n, 4, device="cuda"), torch.empty(4, n, device="cuda"), torch.randn(n, device="cuda")
    launch_stats(x, y, shard, 1.0, None, True, st)
    finish_rows(st[None], y, vocab, 1.0, None, saved)
    kept = x.clone()
    for ge in (None, g):
        times = {
            str(c): timer(partial(launch_backward, kept, x, y, saved, g, ge, shard, 1.0, config=c), 20).ms
            for c in BACKWARD
        }
        show(f"backward entropy={ge is not None} {rows}x{vocab}", times, x.numel() * 4)


def gae(timer: Timer, compile_only: bool) -> None:
    rows = 8 if compile_only else 4096
    mask = torch.rand(rows, 4096, device="cuda") < 0.8
    r, v = torch.randn(rows, 4096, device="cuda") * mask, torch.randn(rows, 4096, device="cuda")
    times = {str(c): timer(lambda c=c: triton_gae(r, v, mask, gamma=0.99, lam=0.95, config=c), 40).ms for c in GAE}
    show("gae 4096x4096", times, r.numel() * 17)


def rmsnorm(timer: Timer, compile_only: bool) -> None:
    for rows, hidden in [(16384, 1536), (16384, 4096), (16192, 768)]:
        x, dy, dsum = (
            torch.randn(8 if compile_only else rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        w, rstd = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), torch.ones(len(x), device="cuda")
        configs = [backward_config(hidden), *NORM]
        times = {str(c): timer(partial(triton_rmsnorm_backward, dy, dsum, x, w, rstd, c), 40).ms for c in configs}
        show(f"rmsnorm backward {rows}x{hidden}", times, x.numel() * 8)


def _score_tiles(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: int, columns: int) -> None:
    """Scoring in tiles of rows x columns."""
    stats = torch.empty(-(-len(w) // columns), len(h), 4, device="cuda")
    buffer = h.new_empty(rows * columns)
    for n in range(0, len(h), rows):
        for i, c in enumerate(range(0, len(w), columns)):
            part = slice(c, min(c + columns, len(w)))
            logits = linear_triton.part_logits(h[n : n + rows], w, part, buffer)
            launch_stats(
                logits, y[n : n + rows], Shard(c, part.stop - c, len(w)), 1.0, None, True, stats[i, n : n + rows]
            )
    finish_rows(stats, y, len(w), 1.0, None, torch.empty(4, len(h), device="cuda"))


def _with(name: str, value: object, call: Callable[[], object]) -> Callable[[], object]:
    def patched() -> object:
        with mock.patch.object(linear_triton, name, value):
            return call()

    return patched


def linear(timer: Timer, compile_only: bool) -> None:
    for hidden in (4096, 1536):
        _linear_case(timer, compile_only, hidden)


def _linear_case(timer: Timer, compile_only: bool, hidden: int) -> None:
    n = 256 if compile_only else 16384
    h, w, y = head(n, hidden)
    out, dh, dw = h.new_empty(n, len(w)), torch.empty_like(h), torch.empty_like(w)
    options = (h, w, y, 1.0, True, None, Shard(0, VOCAB, VOCAB))
    calls = {
        "matmul x1": lambda: torch.mm(h, w.T, out=out),
        "two streams, 2 x 320 MB": lambda: linear_triton.score_columns(*options, 640 << 20),
        "columns, 640 MB": lambda: linear_triton.score_columns(*options, 640 << 20, keep=True),
        "columns, all": lambda: linear_triton.score_columns(*options, 1 << 40, keep=True),
        "tiles 8192x38144": lambda: _score_tiles(h, w, y, n // 2, 38144),
        "tiles 4096x76032": lambda: _score_tiles(h, w, y, n // 4, 76032),
    }
    with torch.no_grad():
        times = {k: t.ms for k, t in timer.side_by_side(calls, 1 if compile_only else 9, calls["matmul x1"]).items()}
        terms = grpo_terms(n, linear_logprob(h, w, y)[0])
    show(f"score +entropy H={hidden}", times, unit=times["matmul x1"])
    h.requires_grad_()
    w.requires_grad_()
    buffer, g = torch.zeros(w.shape, device="cuda"), torch.randn(n, device="cuda") / n

    def three() -> None:
        torch.mm(h.detach(), w.detach().T, out=out)
        torch.mm(out, w.detach(), out=dh)
        torch.mm(out.T, h.detach(), out=dw)

    def loss() -> None:
        torch.autograd.grad(linear_policy_loss(h, w, y, terms, GRPO_SETTINGS, weight_grad_VH=buffer).loss, h)

    def recompute() -> None:
        logp, entropy = linear_logprob(h, w, y, entropy=True)
        assert entropy is not None
        torch.autograd.grad((logp, entropy), (h, w), (g, g))

    calls = {
        "matmul x3": three,
        "policy loss, 1280 MB": loss,
        "policy loss, 640 MB": _with("GRAD_BYTES", 640 << 20, loss),
        "recompute, 1280 MB": recompute,
        "recompute, 640 MB": _with("GRAD_BYTES", 640 << 20, recompute),
    }
    times = {k: t.ms for k, t in timer.side_by_side(calls, 1 if compile_only else 5, calls["matmul x3"]).items()}
    show(f"f+b H={hidden}", times, unit=times["matmul x3"])


PARTS = {"stats": stats, "backward": backward, "gae": gae, "rmsnorm": rmsnorm, "linear": linear}


def main(argv: list[str]) -> int:
    torch.manual_seed(0)
    compile_only = "--compile" in argv
    timer = Timer(0.001 if compile_only else 0.05)
    for name in [a for a in argv if a in PARTS] or PARTS:
        PARTS[name](timer, compile_only)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
