"""Every Triton kernel compiled for an H100 on a machine without one: what the interpreter forgives, the compiler does
not.

Run by test_compiles.py in a process of its own. Ops are called on CPU tensors of real shapes and types; a driver that
only knows the target lets Triton compile each launch and launches nothing. Prints one JSON line for each compiled
kernel.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compiler
from triton.runtime import driver, jit

from terrella import kernels
from terrella.kernels import triton as triton_kernels
from terrella.kernels.advantage import METHODS
from terrella.kernels.batch_invariant import matmul
from terrella.kernels.copying import propose
from terrella.kernels.decode_attention import append_kv, append_notes, cached_attention
from terrella.kernels.decode_cache import PAGE, CacheLayer, Rows, Shared, Tiles
from terrella.kernels.sample import sample_tokens
from terrella.kernels.triton.logprob import merge_shards
from terrella.tests.sampling import few


class Target:
    """A driver that knows what to compile for, and nothing else."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)


class Silent:
    """Stands for a loaded kernel."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *args: Any) -> None: ...

    def run(self, *args: Any) -> None: ...


def compile_only(
    self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> Silent:
    made = compiler.compile(
        ASTSource(self, signature, constexprs, attrs),
        target=driver.active.get_current_target(),
        options=options.__dict__,
    )
    ptx = made.asm["ptx"]
    name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
    wide = len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v[248]\.", ptx))
    print(json.dumps({"kernel": name, "cubin": len(made.asm["cubin"]), "wide": wide}), flush=True)
    kernel = self.device_caches[device][0][key] = Silent()
    return kernel


def all_kernels() -> list[str]:
    """Names of everything that is launched: by this project's rule they end in `_kernel`."""
    found = []
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        inside = vars(importlib.import_module(f"{triton_kernels.__name__}.{module.name}"))
        own = [n for n, x in inside.items() if isinstance(x, jit.JITFunction) and x.fn.__module__ == inside["__name__"]]
        found += [f"{module.name}.{name}" for name in own if name.endswith("_kernel")]
    return found


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def call_everything() -> None:
    """Each op forward and back as a model of this project calls it: bf16, Qwen2.5-1.5B's and the video model's
    widths.
    """
    hidden, vocab, rows = 1536, 151936, 32
    # every kernel with every commit, at one of the shapes each; all shapes in the full tier
    most = 1 if "TERRELLA_SAMPLED_ROWS" in os.environ else None
    sizes, widths, heads = (
        few(shapes, most or len(shapes))
        for shapes in ((vocab, 9008, 32001), (8960, 14336), ((12, 2, 128), (12, 12, 64)))
    )
    targets, ones = torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    for size in sizes:
        for entropy in (False, True):
            logp, extra = kernels.token_logprob(bf16(rows, size), targets, entropy=entropy)
            (logp.sum() if extra is None else (logp + extra).sum()).backward()
    merge_shards(torch.zeros(2, rows, 4), 1.0)
    terms = kernels.PolicyTerms(
        ce_weight=ones, pg_weight=ones, kl_weight=ones, advantage=ones, old_logprob=ones, ref_logprob=ones
    )
    # a CPU has no mixed products
    states, head = torch.zeros(rows, 64, requires_grad=True), torch.zeros(9008, 64, requires_grad=True)
    kernels.linear_policy_loss(states, head, targets, terms, kernels.PolicySettings()).loss.backward()
    kernels.linear_logprob(states, head, targets)[0].sum().backward()
    flat = torch.ones(4, 256)
    for lam in (0.95, 0.1):
        kernels.gae(flat, flat, flat.bool(), gamma=0.99, lam=lam)
        kernels.gae(flat[0], flat[0], flat[0].bool(), lam=lam, lengths=[100, 156])
    kernels.bilevel_gae(flat, flat, flat.bool(), flat.bool())
    for method in METHODS:
        kernels.group_advantage(flat[0], targets.repeat(8), method=method)
    kernels.spread_rows(flat[0], [0, 1], [100, 156])
    y, total = kernels.rmsnorm(bf16(rows, hidden), bf16(hidden), bf16(rows, hidden))
    (y + total).sum().backward()
    q, k, v = kernels.qkv_rope(bf16(rows, 2048), bf16(2048), torch.zeros(rows, 128), 12, 2)
    (q.sum() + k.sum() + v.sum()).backward()
    kernels.rope(bf16(rows, 12, 128), torch.zeros(rows, 128), targets).sum().backward()
    kernels.swiglu(bf16(rows, 2 * 8960)).sum().backward()
    kernels.swiglu_backward(bf16(rows, 2 * 8960).detach(), bf16(rows, 8960).detach())
    for width in widths:
        plain, gradient = bf16(rows, 2 * width).detach(), bf16(rows, width).detach()
        kernels.cast_rows(gradient)
        kernels.cast_columns(gradient)
        kernels.cast_both(gradient)
        kernels.swiglu_scaled(plain)
        kernels.swiglu_backward_rows(plain, gradient)
        kernels.swiglu_backward_columns(plain, gradient)
    states = bf16(rows, hidden).detach()
    kernels.rmsnorm_scaled(states, bf16(hidden).detach(), states, 1e-6)
    kernels.weighted_swiglu(bf16(rows, 1536).detach(), ones)
    kernels.weighted_swiglu_backward(bf16(rows, 1536).detach(), ones, bf16(rows, 768).detach())
    kernels.sum_rows(bf16(rows, 2048).detach(), targets.view(-1, 8).int())
    part = (*(torch.zeros(4096) for _ in range(4)), bf16(4096).detach(), torch.ones(()))
    kernels.adam_update([part], torch.ones(()), lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.1)
    kernels.fsq_quantize(torch.zeros(rows, 5).requires_grad_(), (8, 8, 8, 5, 5))[0].sum().backward()
    kernels.fsq_dequantize(torch.zeros(rows, dtype=torch.long), (8, 8, 8, 5, 5))
    matmul(bf16(rows, hidden).detach(), bf16(hidden, 256).detach())
    sample_tokens(bf16(rows, vocab).detach(), torch.zeros(rows, dtype=torch.float64), ones, targets, targets + vocab)
    sample_tokens(
        bf16(rows, vocab).detach(),
        torch.zeros(rows, dtype=torch.float64),
        ones,
        targets,
        targets + vocab,
        (targets, ones),
    )
    propose(torch.zeros(rows, 4096, dtype=torch.int32), targets + 5, targets, 7)
    for shape in heads:
        decode(*shape)


def decode(heads: int, groups: int, dim: int) -> None:
    """One new token for each of eight sequences, with a shared prefix and with keys cut among programs."""
    count = 8
    cache = CacheLayer(
        *(torch.zeros(9 * groups * PAGE * dim, dtype=torch.bfloat16) for _ in range(2)),
        torch.zeros(2, dtype=torch.long),
    )
    column = torch.arange(count)
    rows = Rows(torch.stack([column * 0, column + 1], 1).int(), column * 0 + PAGE + 8, PAGE)
    q = append_kv(
        torch.zeros(count, groups, heads // groups + 2, dim, dtype=torch.bfloat16), cache, rows, torch.zeros(512, dim)
    )
    shared = Shared(torch.arange(count, dtype=torch.int32).view(1, -1), column * 0 + PAGE)
    for options in ({}, {"splits": 4}, {"shared": shared}):
        cached_attention(q, cache, rows, groups, scale=0.1, **options)
    tile = torch.tensor([[0, 0, 0, count]], dtype=torch.int32)
    tiles = Tiles(tile, column * 0, column, count)
    cached_attention(q, cache, rows, groups, scale=0.1, tiles=tiles, splits=4)
    notes, base = torch.zeros(count, 6, dtype=torch.int16), torch.zeros(1, dtype=torch.int64)
    for options in ({}, {"tiles": tiles}):
        append_notes(notes, torch.zeros(8 * PAGE * 6, dtype=torch.int16), base, rows, **options)


if __name__ == "__main__":
    driver.set_active(Target())  # type: ignore[arg-type]
    jit.JITFunction._do_compile = compile_only  # type: ignore[method-assign]
    torch.Tensor.is_cuda = torch.nn.Parameter.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    print(json.dumps({"all": all_kernels()}), flush=True)
    call_everything()
