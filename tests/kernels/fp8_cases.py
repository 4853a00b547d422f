"""Casts to fp8 and the kernels that they are fused into, against the reference. Collected by test_fp8.py: on CPU
through the interpreter, on CUDA compiled.

The interpreter rounds a number up to a power of two as if it were half of it, rounds subnormal numbers otherwise, and
cuts where it should round to bf16: there inputs are fp32, and the first two are allowed.
"""

import os

import pytest
import torch

from terrella.kernels import (
    PolicySettings,
    PolicyTerms,
    cast_both,
    cast_columns,
    cast_rows,
    linear_logprob,
    linear_policy_loss,
    rmsnorm_forward,
    rmsnorm_scaled,
    scaled_product,
    swiglu,
    swiglu_backward,
    swiglu_backward_columns,
    swiglu_backward_rows,
    swiglu_scaled,
)
from terrella.kernels.batch_invariant import batch_invariant
from terrella.kernels.dispatch import interpreting
from terrella.kernels.fp8 import Scaled, reference_cast_rows, reference_scaled_product
from terrella.kernels.linear_logprob import reference_linear_logprob
from terrella.kernels.policy import Documents
from terrella.kernels.policy_loss import reference_policy_loss
from terrella.kernels.triton import linear

CUDA = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if CUDA else "cpu"
LARGE = CUDA and not os.environ.get("TERRELLA_SMALL_SHAPES")
KIND = torch.bfloat16 if CUDA else torch.float32
# widths of the 1.5B and 8B models
SHAPES = [(1, 16), (37, 208), (130, 272)] + ([(16384, 1536), (4096, 8960), (2048, 14336)] if LARGE else [])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    """Numbers of very different sizes, a row of zeros among them where there are several."""
    x = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape, device=DEVICE) * 3)
    x[len(x) // 2 if len(x) > 1 else len(x) :] *= 1e-9  # as gradients are
    if len(x) > 2:
        x[2] = 0.0
    return x.to(KIND)


def check(got: Scaled, x: torch.Tensor, flips: float = 0.0) -> None:
    """`got` is the cast of x; a share of `flips` may be one step off, where x itself was made in another order."""
    want = reference_cast_rows(x)
    a, b = got.data_NK.float(), want.data_NK.float()
    assert got.data_NK.dtype == torch.float8_e4m3fn and got.data_NK.is_contiguous() and a.shape == x.shape
    torch.testing.assert_close(got.scale_N, want.scale_N, rtol=1e-2 if flips else 0.0, atol=0.0)
    same = a == b
    if not CUDA:
        same |= (2 * a == b) & (torch.frexp(b).mantissa.abs() == 0.5)
        same |= (b.abs() <= 2.0**-6) & ((a - b).abs() <= 2.0**-9)
    near = same | ((a - b).abs() <= b.abs() / 8 + 2.0**-9)  # the next number of the format
    if not CUDA:
        near |= ((2 * a - b).abs() <= b.abs() / 8) & (torch.frexp(a).mantissa.abs() == 0.5)
    assert near.all() and same.float().mean() >= 1.0 - flips
    if CUDA:
        error, largest = (got.wide() - x.float()).abs(), x.float().abs().amax(1, keepdim=True)
        assert (error <= (x.float().abs() * 2.0**-4).clamp_min(largest * 2.0**-18) * (1 + 1e-6 + flips)).all()


@pytest.mark.parametrize("rows,columns", SHAPES)
def test_casts(rows, columns):
    x = draw(rows, columns)
    check(cast_rows(x), x)
    check(cast_columns(x), x.T)
    for got, want in zip(cast_both(x), (cast_rows(x), cast_columns(x)), strict=True):
        assert torch.equal(got.data_NK.view(torch.uint8), want.data_NK.view(torch.uint8))
        assert torch.equal(got.scale_N, want.scale_N)
    out = cast_columns(x)
    again = cast_columns(x + x, out)
    assert again is out
    check(out, (x + x).T)
    by_row = cast_rows(x)
    assert [id(part) for part in cast_both(x + x, by_row, cast_columns(x, out))] == [id(by_row), id(out)]
    check(by_row, x + x)
    check(out, (x + x).T)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows,columns", SHAPES)
def test_norm(rows, columns, residual):
    x, weight = draw(rows, columns), torch.rand(columns, device=DEVICE).to(KIND)
    other = draw(rows, columns) if residual else None
    want = rmsnorm_forward(x, weight, other, 1e-6)
    *got, scaled = rmsnorm_scaled(x, weight, other, 1e-6)
    for a, b in zip(got, want, strict=True):  # a kernel of its own: the row's sum may be in another order
        torch.testing.assert_close(a, b, rtol=2.0**-7 if a.dtype == torch.bfloat16 else 1e-6, atol=0.0)
    check(scaled, got[0])


@pytest.mark.parametrize("rows,width", SHAPES)
def test_gate(rows, width):
    x, dy = draw(rows, 2 * width).clamp(-60, 60), draw(rows, width)  # the interpreter casts numbers of 1e-38 wrongly
    dx, y = swiglu_backward(x, dy)
    check(swiglu_scaled(x), swiglu(x), flips=1e-3)
    again_dx, again_y, by_row = swiglu_backward_rows(x, dy)
    torch.testing.assert_close(again_dx, dx)
    torch.testing.assert_close(again_y, y)
    check(by_row, again_dx)
    by_row, by_column, out = swiglu_backward_columns(x, dy)
    for got, want in ((by_row, dx), (by_column, dx.T), (out, y.T)):
        check(got, want, flips=1e-3)


def test_no_rows():
    x = torch.zeros(0, 32, device=DEVICE, dtype=KIND)
    assert cast_rows(x).data_NK.shape == (0, 32) and swiglu_scaled(x).data_NK.shape == (0, 16)
    assert swiglu_backward_rows(x, x[:, :16])[2].data_NK.shape == (0, 32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    """A product that met such a number must not look sound: the step would not be skipped."""
    x, weight = torch.ones(32, 32, device=DEVICE, dtype=KIND), torch.ones(16, 32, device=DEVICE, dtype=KIND)
    x[3, 5] = bad
    by_row = scaled_product(cast_rows(x), cast_rows(weight))
    assert not by_row[3].isfinite().any() and by_row[4].isfinite().all()
    by_column = scaled_product(cast_columns(x), cast_rows(torch.ones(16, 32, device=DEVICE, dtype=KIND)))
    assert not by_column[5].isfinite().any() and by_column[6].isfinite().all()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "rows,inner,columns",
    [(48, 64, 32)]
    + ([(16384, 1536, 17920), (16384, 8960, 1536), (8192, 4096, 28672), (8192, 14336, 4096)] if LARGE else []),
)
def test_products(rows, inner, columns, fast):
    """Against the same numbers multiplied in fp32, and against those that were cast: two factors are rounded by
    2^-4 / sqrt(3) at most on the average.
    """
    a, b = torch.randn(rows, inner, device=DEVICE).to(KIND), torch.randn(columns, inner, device=DEVICE).to(KIND)
    low_a, low_b = cast_rows(a), cast_rows(b)
    exact, plain = reference_scaled_product(low_a, low_b, torch.float32), a.float() @ b.float().T
    kinds = [torch.bfloat16] if fast or (CUDA and torch.cuda.get_device_capability() != (9, 0)) else [
        torch.bfloat16, torch.float32
    ]  # fmt: skip
    for kind in kinds:
        got = scaled_product(low_a, low_b, kind, fast=fast)
        assert got.dtype == kind and got.shape == (rows, columns)
        error = ((got.float() - exact).norm() / exact.norm()).item()
        rounding = ((got.float() - plain).norm() / plain.norm()).item()
        print(f"{rows} x {inner} x {columns} {kind} fast={fast}: {error:.1e} of the product, {rounding:.2e} by fp8")
        assert error <= (1e-2 if fast else 2e-3)
        if CUDA:  # the interpreter's halves are larger
            assert 1e-2 <= rounding <= 2**0.5 * 2.0**-4 / 3**0.5


def head_case(monkeypatch, rows: int, hidden: int, vocab: int):
    """Hidden states, a head, its copy and targets; chunks of eight rows and ranges of 256 columns where small."""
    if not CUDA:  # the interpreter's halves are not what is tested here
        monkeypatch.setattr(linear, "cast_rows", reference_cast_rows)
    if rows < 1000:
        for name, value in (("GRAD_BYTES", 1), ("SCORE_BYTES", 1), ("ROW_TILE", 8), ("COLUMN_TILE", 256)):
            monkeypatch.setattr(linear, name, value)
    h = (torch.randn(rows, hidden, device=DEVICE) / hidden**0.5 * 3).to(KIND).requires_grad_()
    w = torch.randn(vocab, hidden, device=DEVICE).to(KIND).requires_grad_()
    return h, w, reference_cast_rows(w.detach()), torch.randint(vocab - 7, (rows,), device=DEVICE)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


HEADS = [(24, 32, 528)] + ([(2048, 1536, 151936), (2048, 4096, 128256)] if LARGE else [])
# bf16 rounds logits by 2^-9 of themselves, and tensor cores that add up fast by as much again
NEAR = 4e-2 if CUDA else 5e-6


@pytest.mark.parametrize("rows,hidden,vocab", HEADS)
def test_scores_of_a_head(rows, hidden, vocab, monkeypatch):
    """The logits are those of the copies, and so not the weight's."""
    h, w, fp8, targets = head_case(monkeypatch, rows, hidden, vocab)
    with torch.no_grad():
        got = linear_logprob(h, w, targets, entropy=True, temperature=0.8, vocab_size=vocab - 7, fp8=fp8)
        want = reference_linear_logprob(h, w, targets, entropy=True, temperature=0.8, vocab_size=vocab - 7, fp8=fp8)
        plain = linear_logprob(h, w, targets, temperature=0.8, vocab_size=vocab - 7)[0]
        none = linear_logprob(h[:0], w, targets[:0], fp8=fp8)[0]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=NEAR, rtol=NEAR)
    moved = (got[0] - plain).abs().mean()
    print(f"{rows} x {hidden} x {vocab}: fp8 moves a log-prob by {moved:.3f} on the average")
    assert 0.02 <= moved <= 0.5 and none.shape == (0,)


@pytest.mark.parametrize("objective", ["sft", "grpo", "gspo", "gspo, documents longer than a chunk"])
@pytest.mark.parametrize("rows,hidden,vocab", HEADS)
def test_loss_of_a_head(rows, hidden, vocab, objective, monkeypatch):
    """Loss, log-probs and gradients against the reference with the same copies; clipped rows are left out of the
    backward pass.
    """
    h, w, fp8, targets = head_case(monkeypatch, rows, hidden, vocab)
    doc = torch.arange(rows, device=DEVICE) * (1 if "longer" in objective else 8) // rows
    settings = PolicySettings(ratio="sequence" if objective.startswith("gspo") else "token", temperature=0.9)
    with torch.no_grad():
        old = reference_linear_logprob(h, w, targets, temperature=0.9, vocab_size=vocab - 7, fp8=fp8)[0]
    weight = torch.rand(rows, device=DEVICE) / rows * (torch.arange(rows, device=DEVICE) % 5 != 0)
    terms = (
        PolicyTerms(ce_weight=weight)
        if objective == "sft"
        else PolicyTerms(pg_weight=weight, advantage=weight * rows + 0.1, old_logprob=old - (doc % 2) - 0.05)
    )
    documents = doc if settings.by_sequence else None
    got = linear_policy_loss(h, w, targets, terms, settings, doc_N=documents, vocab_size=vocab - 7, fp8=fp8)
    got.loss.backward()
    made = (h.grad, w.grad)
    h.grad = w.grad = None
    kept = None if documents is None else Documents(documents)
    want = reference_policy_loss(h, w, targets, terms, settings, documents=kept, vocab_size=vocab - 7, fp8=fp8)
    want.loss.backward()
    torch.testing.assert_close(got.logprob_N, want.logprob_N, atol=NEAR, rtol=NEAR)
    torch.testing.assert_close(got.loss, want.loss, atol=NEAR, rtol=NEAR)
    for a, b, name in zip(made, (h.grad, w.grad), ("hidden states", "weight"), strict=True):
        print(f"{rows} x {hidden} x {vocab} {objective}: gradient of the {name} off by {gap(a, b):.1e}")
        assert gap(a, b) <= NEAR, name
    assert (made[1][vocab - 7 :] == 0).all()
    exact = torch.autograd.grad(
        linear_policy_loss(h, w, targets, terms, settings, doc_N=documents, vocab_size=vocab - 7).loss, (h, w)
    )
    assert gap(made[0], exact[0]) >= 1e-2  # fp8 indeed


def test_a_head_in_fp8_refuses(monkeypatch):
    h, w, fp8, targets = head_case(monkeypatch, 24, 32, 528)
    with pytest.raises(ValueError, match="linear_logprob gives no gradients"):
        linear_logprob(h, w, targets, fp8=fp8)
    terms = PolicyTerms(ce_weight=torch.ones(24, device=DEVICE))
    with batch_invariant(), torch.no_grad():
        for call in (lambda: linear_logprob(h, w, targets, fp8=fp8),
                     lambda: linear_policy_loss(h, w, targets, terms, PolicySettings(), fp8=fp8)):  # fmt: skip
            with pytest.raises(ValueError, match="batch_invariant"):
                call()
