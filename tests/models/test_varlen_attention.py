"""Which kernel ragged documents get: FlashAttention-4 where it runs, else the faster of torch's two ways. Needs no
GPU.
"""

from __future__ import annotations

import logging

import pytest
import torch

from terrella.core.layout import document_layout
from terrella.models import varlen_attention
from terrella.models.attention import _by_length
from terrella.tests.core.attention_reference import full_attention

BOUNDS = [0, 5, 6, 18]
LAYOUT = document_layout(BOUNDS)


@pytest.fixture
def inputs(monkeypatch):
    monkeypatch.setattr(varlen_attention, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(18, heads, 8, generator=draw, dtype=torch.float64) for heads in (6, 2, 2)]


def packed_flash(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic
):
    """Stands for the package's function: the same arguments, written out in full, and the pair that some releases
    return.
    """
    assert (
        causal
        and k.shape[1] == 2
        and cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == BOUNDS
        and max_seqlen_q == max_seqlen_k == 12
    )
    return full_attention(q, k, v, BOUNDS), None


def test_flash_attention_is_taken_with_grouped_heads_as_they_are(inputs, monkeypatch):
    monkeypatch.setattr(varlen_attention, "flash_function", lambda: packed_flash)
    got = varlen_attention.ragged_attention(*inputs, LAYOUT, None, _by_length)
    torch.testing.assert_close(got, full_attention(*inputs, BOUNDS))
    assert list(varlen_attention._chosen.values()) == [varlen_attention.flash]


def test_a_shape_that_it_refuses_goes_to_torch(inputs, monkeypatch, caplog):
    def refuse(*args, **options):
        raise RuntimeError("head dimension 8")

    monkeypatch.setattr(varlen_attention, "flash_function", lambda: refuse)
    times = {varlen_attention.varlen: 2.0, _by_length: 1.0}
    measure = varlen_attention.seconds
    monkeypatch.setattr(
        varlen_attention,
        "seconds",
        lambda attend, *rest, **more: times[attend] if attend in times else measure(attend, *rest, **more),
    )
    with caplog.at_level(logging.WARNING):
        assert varlen_attention.choose(*inputs, LAYOUT, None, _by_length) is _by_length
    assert "head dimension 8" in caplog.text
    times[_by_length] = 1.9  # a near tie stays with torch's kernel
    assert varlen_attention.choose(*inputs, LAYOUT, None, _by_length) is varlen_attention.varlen
    times[_by_length] = 1.0
    sliced = document_layout([0, 4, 6, 16], 2, 1)  # context parallel: fewer queries than keys
    assert varlen_attention.choose(*inputs, sliced, None, _by_length) is varlen_attention.varlen


def test_an_older_gpu_does_not_ask_for_it(inputs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(varlen_attention, "flash_function", lambda: pytest.fail)
    monkeypatch.setattr(varlen_attention, "seconds", lambda attend, *rest, **more: 1.0)
    assert varlen_attention.choose(*inputs, LAYOUT, None, _by_length) is varlen_attention.varlen


def test_both_of_torchs_ways_are_timed_forward_and_back(inputs):
    assert varlen_attention.seconds(_by_length, *inputs, LAYOUT, None, repeats=1) > 0
    assert all(x.grad is None for x in inputs)
