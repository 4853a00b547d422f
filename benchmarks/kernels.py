"""`terrella bench kernels`: correctness at real shapes, then every kernel beside its rivals and the machine's own
ceilings, in one run.

Shape suffixes: N rows (tokens), V vocabulary, H hidden.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton

from ..kernels import (
    PolicySettings,
    PolicyTerms,
    gae,
    group_advantage,
    linear_logprob,
    linear_policy_loss,
    rmsnorm,
    rope,
    rope_table,
    spread_rows,
    swiglu,
    token_logprob,
)
from ..kernels.advantage import reference_gae, reference_packed_gae
from ..kernels.logprob import reference_token_logprob
from ..kernels.triton.logprob import finish_rows, launch_backward, launch_stats
from ..kernels.triton.policy import launch_terms
from ..kernels.vocab import Shard
from . import record, rivals
from .timing import Timer, Timing, graphed

VOCAB = 151936  # Qwen2.5
GRPO_SETTINGS = PolicySettings(clip_high=0.28)


class Bench:
    """Where figures go: the recorder, a table on stdout, and which sections were asked for."""

    def __init__(self, recorder: record.Recorder, out: Path, budget_s: float, scale: int, quick: bool):
        self.recorder, self.out, self.scale, self.quick = recorder, out, scale, quick
        self.written = 0
        self.timer = Timer(budget_s)
        self.copy_gbs = 0.0
        self.missing: rivals.Missing = {}

    def write(self) -> None:
        """Append the new rows at once: a run that is stopped keeps what it measured."""
        record.append(self.recorder.rows[self.written :], self.out)
        self.written = len(self.recorder.rows)

    def add(
        self, case: str, impl: str, timing: Timing, useful_bytes: float | None = None, peak_less_gb: float = 0.0
    ) -> float:
        """Record a time, its share of the copy bandwidth when the op is bound by memory, and the memory it took."""
        self.recorder.add(case, impl, "ms", timing.ms, "ms", timing.p20, timing.p80)
        line = f"{case:52s} {impl:36s} {timing.ms:9.4f} ms"
        if useful_bytes is not None:
            share = useful_bytes / timing.ms / 1e6 / self.copy_gbs * 100
            self.recorder.add(case, impl, "copy_share", share, "%")
            line += f" {share:6.1f} % of copy"
        peak = max(0.0, timing.peak_gb - peak_less_gb)
        self.recorder.add(case, impl, "peak", peak, "GB")
        self.write()
        print(line + f"  peak {peak:.3f} GB", flush=True)
        return timing.ms

    def error(self, case: str, impl: str, metric: str, value: float) -> None:
        self.recorder.add(case, impl, metric, value, "error")
        self.write()
        print(f"{case:52s} {impl:36s} {metric} {value:.2e}", flush=True)

    def measure(
        self,
        case: str,
        impl: str,
        call: Callable[[], object],
        useful_bytes: float | None = None,
        peak_less_gb: float = 0.0,
        most: int = 60,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Time one call; a rival that fails is reported and left out, ours may not fail."""
        if self.quick and impl.startswith("torch"):
            return
        with self.excused(case, impl):
            self.add(case, impl, self.timer(call, most, before), useful_bytes, peak_less_gb)

    def together(
        self,
        case: str,
        calls: dict[str, Callable[[], object]],
        rounds: int,
        load: Callable[[], object],
        less_gb: dict[str, float] | None = None,
    ) -> None:
        """Time several long calls in turns, after one try each."""
        able = {}
        for impl, call in calls.items():
            with self.excused(case, impl):
                call()
                torch.cuda.synchronize()
                able[impl] = call
        for impl, timing in self.timer.side_by_side(able, rounds, load).items():
            self.add(case, impl, timing, peak_less_gb=(less_gb or {}).get(impl, 0.0))

    @contextmanager
    def excused(self, case: str, impl: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if impl.startswith("terrella"):
                raise
            self.missing[f"{impl} on {case}"] = reason = f"{type(error).__name__}: {error}"[:200]
            print(f"left out: {impl} on {case}: {reason}", flush=True)
        finally:
            torch.cuda.empty_cache()


def ceilings(b: Bench) -> None:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    b.copy_gbs = 2 * source.numel() * 2 / b.timer(lambda: target.copy_(source)).ms / 1e6
    b.recorder.add("ceilings", "torch copy", "bandwidth", b.copy_gbs, "GB/s")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / b.timer(lambda: left @ right).ms / 1e9
    b.recorder.add("ceilings", "torch matmul 8192", "rate", rate, "TFLOP/s")
    b.write()
    print(f"copy {b.copy_gbs:.0f} GB/s, bf16 matmul {rate:.0f} TFLOP/s", flush=True)


def random_logits(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) * 3
    return x, torch.randint(vocab, (rows,), device="cuda")


def _ours(entropy: bool) -> Callable:
    return lambda x, y: token_logprob(x, y, entropy=entropy, inplace_backward=True)


def _logits_case(b: Bench, rows: int, vocab: int) -> None:
    x, y = random_logits(rows, vocab)
    size, grad, kept = x.numel() * 2, torch.randn(rows, device="cuda"), x.clone()
    restore = partial(x.copy_, kept)  # an in-place gradient overwrites the logits
    others = rivals.logits_rivals(b.missing)
    if vocab == VOCAB:
        others["torch.compile fp32"] = (torch.compile(rivals.torch_logprob), True)
    else:
        del others["torch fp32"]

    def forward(call: Callable) -> None:
        with torch.no_grad():
            call(x, y)

    def both(call: Callable, entropy: bool) -> None:
        leaf = x.detach().requires_grad_()
        logp, ent = call(leaf, y)
        grads = [grad.view_as(logp).to(logp.dtype)]
        torch.autograd.grad([logp, ent] if entropy else [logp], leaf, grads * 2 if entropy else grads)

    for entropy in (False, True):
        tail = f"{' +entropy' if entropy else ''} N={rows} V={vocab}"
        b.measure(f"token_logprob fwd{tail}", "terrella", partial(forward, _ours(entropy)), size)
        for impl, (call, _) in others.items():
            if not entropy or impl in rivals.WITH_ENTROPY:
                b.measure(f"token_logprob fwd{tail}", impl, partial(forward, call), size)
        b.measure(
            f"token_logprob f+b{tail}",
            "terrella",
            partial(both, _ours(entropy), entropy),
            3 * size,
            most=20,
            before=restore,
        )
        for impl, (call, has_grad) in others.items():
            if has_grad and (not entropy or impl in rivals.WITH_ENTROPY):
                b.measure(
                    f"token_logprob f+b{tail}", impl, partial(both, call, entropy), 3 * size, most=12, before=restore
                )
        restore()


def logits_path(b: Bench) -> None:
    for rows, vocab in ((16384, VOCAB), (32768, 13312), (32768, 9008)):
        _logits_case(b, rows // b.scale, vocab)


def odd_path(b: Bench) -> None:
    """Vocabularies that are no multiple of 16: rows begin off the 16-byte grid. Beside them the same logits in a
    padded head's columns.
    """
    for rows, vocab in ((7777, 32001), (20000, 50257), (16384, 100277)):
        _logits_case(b, rows // b.scale, vocab)
        columns = -(-vocab // 64) * 64
        x, y = random_logits(rows // b.scale, columns)
        y, grad, restore = y % vocab, torch.randn(rows // b.scale, device="cuda"), partial(x.copy_, x.clone())

        def step(x: torch.Tensor = x, y: torch.Tensor = y, grad: torch.Tensor = grad, vocab: int = vocab) -> None:
            leaf = x.detach().requires_grad_()
            torch.autograd.grad(token_logprob(leaf, y, vocab_size=vocab, inplace_backward=True)[0], leaf, grad)

        case = f"token_logprob f+b N={rows // b.scale} V={vocab}"
        b.measure(case, f"terrella, padded to {columns}", step, 3 * len(x) * vocab * 2, most=20, before=restore)


def one_rank_of_eight(b: Bench) -> None:
    rows, columns = 32768 // b.scale, VOCAB // 8
    x, y = random_logits(rows, columns)
    stats, saved = torch.empty(rows, 4, device="cuda"), torch.empty(4, rows, device="cuda")
    grad, shard = torch.randn(rows, device="cuda"), Shard(0, columns, VOCAB)

    def step() -> None:
        launch_stats(x, y, shard, 1.0, None, True, stats)
        finish_rows(stats[None], y, VOCAB, 1.0, None, saved)
        launch_backward(x, x, y, saved, grad, grad, shard, 1.0)

    def rival(call: Callable) -> None:
        leaf = x.detach().requires_grad_()
        torch.autograd.grad(call(leaf, y)[0], leaf, grad)

    case = f"one rank of TP=8 f+b N={rows} V={columns}"
    restore = partial(x.copy_, x.clone())
    b.measure(case, "terrella (with entropy)", step, 3 * x.numel() * 2, before=restore)
    for impl, (call, has_grad) in rivals.logits_rivals(b.missing).items():
        if has_grad and impl.startswith(("flash", "megatron", "unsloth")):
            b.measure(case, impl, partial(rival, call), 3 * x.numel() * 2, before=restore)


def head(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = (torch.randn(rows, hidden, device="cuda") / hidden**0.5 * 3).bfloat16()
    w = torch.randn(VOCAB, hidden, device="cuda", dtype=torch.bfloat16)
    return h, w, torch.randint(VOCAB, (rows,), device="cuda")


def grpo_terms(rows: int, logprob: torch.Tensor) -> PolicyTerms:
    weight = torch.full((rows,), 1.0 / rows, device="cuda")
    noise = torch.randn(2, rows, device="cuda") * 0.05
    return PolicyTerms(
        pg_weight=weight,
        kl_weight=weight * 1e-3,
        entropy_weight=weight * 1e-3,
        advantage=torch.randn(rows, device="cuda"),
        old_logprob=logprob + noise[0],
        ref_logprob=logprob + noise[1],
    )


class _Head:
    """One shape of head: its inputs, and the calls to time on it."""

    def __init__(self, rows: int, hidden: int):
        self.h, self.w, self.y = head(rows, hidden)
        self.name = f"N={rows} V={VOCAB} H={hidden}"
        self.grad = torch.randn(rows, device="cuda") / rows
        with torch.no_grad():
            self.logprob = linear_logprob(self.h, self.w, self.y)[0]
        self.terms = grpo_terms(rows, self.logprob)
        self.logits = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
        self.dh, self.dw = torch.empty_like(self.h), torch.empty_like(self.w)
        self.buffer = torch.zeros(self.w.shape, device="cuda")
        self.leaves = self.h.detach().requires_grad_(), self.w.detach().requires_grad_()

    def one(self) -> None:
        torch.mm(self.h, self.w.T, out=self.logits)

    def three(self) -> None:
        torch.mm(self.h, self.w.T, out=self.logits)
        torch.mm(self.logits, self.w, out=self.dh)
        torch.mm(self.logits.T, self.h, out=self.dw)

    def load(self) -> None:
        """About 30 ms of matmuls, as the layers before the head would be."""
        for _ in range(round(4096 / self.h.shape[1])):
            self.one()

    def score(self, call: Callable) -> None:
        with torch.no_grad():
            call(self.h, self.w, self.y)

    def loss(self, terms: PolicyTerms) -> None:
        h, w = self.leaves
        torch.autograd.grad(linear_policy_loss(h, w, self.y, terms, GRPO_SETTINGS, weight_grad_VH=self.buffer).loss, h)

    def through(self, call: Callable) -> None:
        logp, ent = call(*self.leaves, self.y)
        if logp.dim() == 0:
            torch.autograd.grad(logp, self.leaves)
        elif ent is None:
            torch.autograd.grad(logp, self.leaves, self.grad.to(logp.dtype))
        else:
            torch.autograd.grad((logp, ent), self.leaves, (self.grad.to(logp.dtype), (self.grad * 1e-3).to(ent.dtype)))

    def clipped(self) -> PolicyTerms:
        """No KL and no bonus, and half of the tokens past the clip: rows without a gradient leave the backward's
        matmuls.
        """
        far = (torch.arange(len(self.y), device="cuda") % 2).float()
        return PolicyTerms(
            pg_weight=self.terms.pg_weight, advantage=self.grad.abs() + 0.1, old_logprob=self.logprob - far
        )


def _linear_case(b: Bench, rows: int, hidden: int) -> None:
    x = _Head(rows, hidden)
    others = rivals.linear_rivals(b.missing)
    b.timer.warm(x.three)
    case = f"linear_logprob fwd +entropy {x.name}"
    calls = {"matmul x1": x.one, "terrella": partial(x.score, partial(linear_logprob, entropy=True))}
    calls |= {
        impl: partial(x.score, call) for impl, call in others.items() if not impl.endswith(("unfiltered", "(sum)"))
    }
    b.together(case, calls, 9, x.load)
    made = (x.h.numel() + x.w.numel()) * 2 / 1e9
    case = f"linear_policy_loss f+b {x.name}"
    calls = {
        "matmul x3": x.three,
        "terrella": partial(x.loss, x.terms),
        "terrella-recompute": partial(x.through, partial(linear_logprob, entropy=True)),
    }
    # the larger head leaves out the slowest: the smaller shows what the filter does
    calls |= {
        impl: partial(x.through, call)
        for impl, call in others.items()
        if hidden < 4096 or not impl.endswith("unfiltered")
    }
    b.together(
        case, calls, 7, x.load, dict.fromkeys(calls, made) | {"terrella": x.h.numel() * 2 / 1e9, "matmul x3": 0.0}
    )
    case = f"linear_policy_loss f+b, half clipped, no KL {x.name}"
    b.together(
        case,
        {"matmul x3": x.three, "terrella": partial(x.loss, x.clipped())},
        5,
        x.load,
        {"terrella": x.h.numel() * 2 / 1e9},
    )


def linear_path(b: Bench) -> None:
    for hidden in (4096, 1536):
        _linear_case(b, 16384 // b.scale, hidden)
        torch.cuda.empty_cache()


def cute_path(b: Bench) -> None:
    """Liger's CuTe kernels, under the cases of `linear`."""
    others = rivals.cute_rival(b.missing)
    for hidden in (4096, 1536) if others else ():
        x = _Head(16384 // b.scale, hidden)
        b.timer.warm(x.three)
        made = (x.h.numel() + x.w.numel()) * 2 / 1e9
        for impl, call in others.items():
            b.together(f"linear_logprob fwd +entropy {x.name}", {impl: partial(x.score, call)}, 9, x.load)
            b.together(f"linear_policy_loss f+b {x.name}", {impl: partial(x.through, call)}, 5, x.load, {impl: made})


def linear_errors(b: Bench) -> None:
    """Log-prob, dH and dW against fp64 on the same bf16 inputs; upstream gradients of both signs."""
    rows = 2048 // b.scale
    h, w, y = head(rows, 1536)
    name = f"linear errors N={rows} V={VOCAB} H=1536"
    grad = torch.randn(rows, device="cuda") / rows
    h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
    logp64, _ = reference_token_logprob(h64 @ w64.T, y)
    dh64, dw64 = torch.autograd.grad(logp64, (h64, w64), grad.double())
    h.requires_grad_()
    w.requires_grad_()

    def report(impl: str, logp: torch.Tensor, dh: torch.Tensor, dw: torch.Tensor) -> None:
        for metric, got, want in (("logprob", logp.flatten(), logp64), ("dH", dh, dh64), ("dW", dw, dw64)):
            b.error(name, impl, metric, ((got.double() - want).norm() / want.norm()).item())

    buffer = torch.zeros(w.shape, device="cuda")
    out = linear_policy_loss(h, w, y, PolicyTerms(ce_weight=-grad), PolicySettings(), weight_grad_VH=buffer)
    report("terrella", out.logprob_N, torch.autograd.grad(out.loss, h)[0], buffer)
    implementations = {
        "terrella-recompute": linear_logprob,
        "torch bf16 logits, fp32 loss": lambda h, w, y: rivals.torch_logprob(h @ w.T, y),
    }
    for impl, call in (implementations | rivals.linear_rivals(b.missing)).items():
        with b.excused(name, impl):
            logp = call(h, w, y)[0]
            if logp.dim():
                report(impl, logp.detach(), *torch.autograd.grad(logp, (h, w), grad.to(logp.dtype)))


def logits_errors(b: Bench) -> None:
    """Relative error of log-probs and entropies against fp64, on ordinary rows and on confident ones (|logp| >=
    1e-7).
    """
    x, y = random_logits(512, VOCAB)
    x[256:, :] *= 0.3
    x[torch.arange(256, 512, device="cuda"), y[256:]] = (torch.arange(256, device="cuda") % 12 + 14.0).to(x.dtype)
    want, want_entropy = reference_token_logprob(x.double(), y, entropy=True)
    kept = want.abs() >= 1e-7
    name = f"logits errors N=512 V={VOCAB}"

    def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
        return ((got.flatten().double() - exact).abs() / exact.abs())[kept].max().item()

    for impl, (call, _) in ({"terrella": (_ours(True), True)} | rivals.logits_rivals(b.missing)).items():
        with b.excused(name, impl), torch.no_grad():
            logp, entropy = call(x, y)
            if logp.numel() == len(y):
                b.error(name, impl, "logprob max relative", worst(logp, want))
            if entropy is not None:
                b.error(name, impl, "entropy max relative", worst(entropy, want_entropy))
    if not worst(token_logprob(x, y)[0], want) <= 1e-6:
        raise AssertionError("log-prob error above the promise of 1e-6")


def _elementwise_case(b: Bench, rows: int, tokens: int) -> None:
    logp = -torch.rand(rows * tokens, device="cuda")
    full = grpo_terms(rows * tokens, logp)
    terms = PolicyTerms(
        **{k: getattr(full, k) for k in ("pg_weight", "kl_weight", "advantage", "old_logprob", "ref_logprob")}
    )
    out, leaf = torch.empty_like(logp), logp.clone().requires_grad_()
    case, size = f"GRPO loss + dlogp [{rows},{tokens}]", len(logp) * 28

    def ours() -> None:
        launch_terms(logp, None, terms, PolicySettings(), out)

    def eager(p: torch.Tensor) -> torch.Tensor:
        ratio, gap = (p - terms.old_logprob).exp(), terms.ref_logprob - p
        value = -torch.minimum(ratio * terms.advantage, ratio.clamp(0.8, 1.2) * terms.advantage)
        return (terms.pg_weight * value + terms.kl_weight * (gap.exp() - gap - 1)).sum()

    def step(call: Callable) -> None:
        torch.autograd.grad(call(leaf), leaf)

    b.measure(case, "terrella", ours, size)
    b.measure(case, "terrella-graph", graphed(ours), size)
    b.measure(case, "torch eager", partial(step, eager), size)
    b.measure(case, "torch.compile", partial(step, torch.compile(eager)), size)


def elementwise(b: Bench) -> None:
    for rows, tokens in ((1024 // b.scale, 16384), (64, 4096)):
        _elementwise_case(b, rows, tokens)


def scan(b: Bench) -> None:
    rows = 4096 // b.scale
    mask = torch.rand(rows, 4096, device="cuda") < 0.8
    rewards, values = torch.randn(rows, 4096, device="cuda") * mask, torch.randn(rows, 4096, device="cuda")
    case = f"gae [{rows},4096] any mask"
    b.measure(case, "terrella", lambda: gae(rewards, values, mask, gamma=0.99, lam=0.95), rewards.numel() * 17)
    b.measure(
        case,
        "torch loop",
        lambda: reference_gae(rewards, values, mask, gamma=0.99, lam=0.95),
        rewards.numel() * 17,
        most=3,
    )
    got = gae(rewards[:64], values[:64], mask[:64], gamma=0.99, lam=0.95)[0]
    want = reference_gae(rewards[:64].double(), values[:64].double(), mask[:64], gamma=0.99, lam=0.95)[0]
    b.error(case, "terrella", "advantage", ((got - want).norm() / want.norm()).item())


def ragged_scan(b: Bench) -> None:
    """Rows of 180 to 8000 tokens end to end, as the episodes of a PPO step are; the loop pads them to the longest."""
    rows = 1024 // b.scale
    lengths = torch.randint(180, 8000, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = sum(lengths)
    mask = torch.rand(tokens, device="cuda") < 0.8
    rewards, values = torch.randn(tokens, device="cuda") * mask, torch.randn(tokens, device="cuda")
    case = f"gae {rows} rows of 180-8000"
    options: dict = {"gamma": 0.99, "lam": 0.95}
    b.measure(case, "terrella", lambda: gae(rewards, values, mask, lengths=lengths, **options), tokens * 17)
    b.measure(
        case, "torch loop", lambda: reference_packed_gae(rewards, values, mask, lengths, **options), tokens * 17, most=3
    )
    got = gae(rewards, values, mask, lengths=lengths, **options)[0]
    want = reference_packed_gae(rewards.double(), values.double(), mask, lengths, **options)[0]
    b.error(case, "terrella", "advantage", ((got - want).norm() / want.norm()).item())


def group_path(b: Bench) -> None:
    """GRPO's advantages of a step, from rewards and prompt ids on the host to every token: groups of 16, rows of 180
    to 2000 tokens.
    """
    groups, samples = 256 // b.scale, 16
    ids = torch.arange(groups).repeat_interleave(samples)
    valid = torch.rand(len(ids)) < 0.98
    rewards = torch.randint(2, (len(ids),)).float().cuda()
    lengths = torch.randint(180, 2000, (len(ids),), generator=torch.Generator().manual_seed(0)).tolist()
    case, size = f"group advantage {groups}x{samples}, {sum(lengths)} tokens", sum(lengths) * 4
    numbers = list(range(len(ids)))
    index, spans, counted = ids.cuda(), torch.tensor(lengths).cuda(), valid.cuda()

    def eager(rewards: torch.Tensor) -> torch.Tensor:
        on = counted.float()
        count = torch.zeros(groups, device="cuda").index_add(0, index, on)
        mean = torch.zeros(groups, device="cuda").index_add(0, index, rewards * on) / count.clamp_min(1)
        centred = (rewards - mean[index]) * on
        std = (
            torch.zeros(groups, device="cuda").index_add(0, index, centred.square()) / (count - 1).clamp_min(1)
        ).sqrt()
        return (centred / (std[index] + 1e-6)).repeat_interleave(spans, output_size=sum(lengths))

    def host() -> torch.Tensor:
        rows = group_advantage(rewards.cpu(), ids, valid_S=valid)
        return spread_rows(rows, numbers, lengths).cuda()

    b.measure(
        case, "terrella", lambda: spread_rows(group_advantage(rewards, ids, valid_S=valid), numbers, lengths), size
    )
    b.measure(case, "torch on the host", host, size)
    b.measure(case, "torch eager", lambda: eager(rewards), size)
    b.measure(case, "torch.compile", partial(torch.compile(eager), rewards), size)
    got, want = group_advantage(rewards, ids, valid_S=valid), group_advantage(rewards.double(), ids, valid_S=valid)
    b.error(case, "terrella", "advantage", ((got.double() - want).norm() / want.double().norm()).item())


def _norm_case(b: Bench, rows: int, hidden: int) -> None:
    x, r, dy = (torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    w = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    leaves = [v.requires_grad_() for v in (x, r, w)]

    def eager(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x + r
        return (s.float() * torch.rsqrt(s.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w, s

    def step(call: Callable) -> None:
        torch.autograd.grad(call(*leaves), leaves, (dy, dy))

    calls = {"terrella": lambda x, r, w: rmsnorm(x, w, r), "torch eager": eager, "torch.compile": torch.compile(eager)}
    for impl, call in (calls | rivals.norm_rivals(b.missing)).items():
        b.measure(f"rmsnorm +residual f+b [{rows},{hidden}]", impl, partial(step, call), x.numel() * 2 * 8)


def _swiglu_case(b: Bench, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def eager(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def step(call: Callable) -> None:
        torch.autograd.grad(call(x), x, dy)

    calls = {"terrella": swiglu, "torch eager": eager, "torch.compile": torch.compile(eager)}
    for impl, call in (calls | rivals.swiglu_rivals(b.missing)).items():
        b.measure(f"swiglu f+b [{rows},2x{width}]", impl, partial(step, call), dy.numel() * 2 * 8)


def _rope_case(b: Bench, rows: int, heads: int, dim: int) -> None:
    x, dy = (torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    table, positions = rope_table(4096, dim).cuda(), torch.arange(rows, device="cuda") % 4096

    def eager(x: torch.Tensor) -> torch.Tensor:
        cos, sin = table[positions][:, None, :].chunk(2, -1)
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def step(call: Callable) -> None:
        torch.autograd.grad(call(x), x, dy)

    calls = {
        "terrella": lambda x: rope(x, table, positions),
        "torch eager": eager,
        "torch.compile": torch.compile(eager),
    }
    for impl, call in calls.items():
        b.measure(f"rope f+b [{rows},{heads},{dim}]", impl, partial(step, call), x.numel() * 2 * 4)


def layers(b: Bench) -> None:
    rows = 16384 // b.scale
    _norm_case(b, rows, 4096)
    _swiglu_case(b, rows, 8960)
    _rope_case(b, rows, 32, 128)


SECTIONS = {
    "errors": lambda b: (logits_errors(b), linear_errors(b)),
    "linear": linear_path,
    "cute": cute_path,
    "logits": logits_path,
    "odd": odd_path,
    "shard": one_rank_of_eight,
    "elementwise": elementwise,
    "gae": lambda b: (scan(b), ragged_scan(b)),
    "group": group_path,
    "layers": layers,
}


def main(argv: list[str] | None = None) -> int:
    """Run, print a table and append the rows."""
    parser = argparse.ArgumentParser(prog="terrella bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="CSV file to append to")
    parser.add_argument("--only", default="", help=f"comma-separated sections: {', '.join(SECTIONS)}")
    parser.add_argument("--rivals", type=Path, default=None, help="folder of unpacked rival kernels")
    parser.add_argument("--scale", type=int, default=1, help="divide the row counts, for a smaller GPU")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of repetition for one figure")
    parser.add_argument("--quick", action="store_true", help="leave out the torch eager and torch.compile rows")
    parser.add_argument("--commit", default=None, help="commit to record where the code is not in a repository")
    options = parser.parse_args(argv)
    wanted = [s for s in options.only.split(",") if s] or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only names no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print("terrella bench kernels needs a CUDA GPU; none was found", file=sys.stderr)
        return 2
    rivals.add_path(options.rivals)
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}; triton {triton.__version__}"
    command = record.command_line("terrella bench kernels", sys.argv[1:] if argv is None else argv)
    recorder = record.Recorder("kernels", command, torch.cuda.get_device_name(), versions, options.commit)
    b = Bench(recorder, options.out, options.budget, options.scale, options.quick)
    ceilings(b)
    for section in wanted:
        SECTIONS[section](b)
        torch.cuda.empty_cache()
    for name, reason in b.missing.items():
        print(f"left out: {name}: {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
