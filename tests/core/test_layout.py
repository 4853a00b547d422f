"""Document layouts against attention written out in full, for any number of context ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.batch import PackedBatch
from terrella.core.layout import context_rows, document_layout, pad_batch, slice_batch
from terrella.models.attention import packed_attention
from terrella.tests.core.attention_reference import full_attention


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 3]))
def test_attention_over_any_documents(lengths: list[int], ranks: int) -> None:
    total = sum(lengths)
    lengths = [*lengths, -total % (2 * ranks)] if total % (2 * ranks) else lengths
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    draw = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(bounds[-1], heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    expected = full_attention(q, k, v, bounds)
    for rank in range(ranks):
        layout = document_layout(bounds, ranks, rank)
        rows = context_rows(bounds[-1], ranks, rank)
        if ranks == 1:
            got = packed_attention(q, k, v, layout)
        else:  # what the gathered keys look like, without ranks
            local = _without_gathering(layout)
            got = packed_attention(q[rows], k, v, local)
        torch.testing.assert_close(got, expected[rows], atol=1e-12, rtol=0)
        assert layout.cu_q[-1] == len(rows)
        if layout.k_rows is not None:
            assert layout.cu_k[-1] == len(layout.k_rows)
        starts = torch.tensor(bounds[:-1])
        assert torch.equal(layout.document_T, torch.searchsorted(starts, rows, right=True) - 1)


def _without_gathering(layout):
    from dataclasses import replace

    return replace(layout, k_order_S=None)


def test_padding_is_weightless_documents() -> None:
    batch = PackedBatch(
        tokens_T=torch.arange(5),
        targets_T=torch.arange(5),
        positions_T=torch.tensor([0, 1, 0, 1, 2]),
        cu_seqlens_D1=torch.tensor([0, 2, 5], dtype=torch.int32),
        max_seqlen=3,
        pg_weight_T=torch.ones(5),
    )
    padded = pad_batch(batch, 12)
    assert padded.cu_seqlens_D1.tolist() == [0, 2, 5, 8, 11, 12]
    assert padded.positions_T.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert padded.pg_weight_T is not None and padded.pg_weight_T.tolist() == [1.0] * 5 + [0.0] * 7
    assert padded.ce_weight_T is None
    assert pad_batch(batch, 5) is batch
    halves = [slice_batch(padded, context_rows(12, 2, rank)) for rank in range(2)]
    assert halves[0].positions_T.tolist() == [0, 1, 0, 1, 2, 0]
    assert torch.cat([h.tokens_T for h in halves]).sort().values.tolist() == padded.tokens_T.sort().values.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_rows_cover_everything_once(ranks: int) -> None:
    rows = torch.cat([context_rows(8 * ranks, ranks, r) for r in range(ranks)])
    assert rows.sort().values.tolist() == list(range(8 * ranks))
