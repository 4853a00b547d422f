"""CUDA graphs of a model's layers: which passes share one. The graphs themselves run in tests/parallel/test_gpu.py."""

import torch

from terrella.core.layout import document_layout
from terrella.models import graphed
from terrella.models.graphed import GraphedBlock, shape_of
from terrella.models.layers import PackedInput


def packed(*lengths: int) -> PackedInput:
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return PackedInput(document_layout(bounds), torch.zeros(bounds[-1], 8), torch.arange(bounds[-1]), False)


def test_passes_share_a_graph_when_only_contents_differ() -> None:
    assert shape_of(packed(4, 4)) == shape_of(packed(4, 4)) != shape_of(packed(8))
    assert shape_of(packed(5, 2, 3)) == shape_of(packed(5, 3, 2))  # the bounds of ragged documents are contents
    assert len({shape_of(packed(*lengths)) for lengths in ((4, 4), (8,), (5, 3), (6, 2), (2, 2, 2, 2), (5, 2, 1))}) == 6


def test_a_shape_is_captured_when_it_comes_back_and_never_more_than_a_few(monkeypatch) -> None:
    class Pair:
        forward = type("Graph", (), {"pool": staticmethod(lambda: 7)})

    pools: list[int | None] = []
    monkeypatch.setattr(graphed, "capture", lambda run, weights, hidden, packed, pool: pools.append(pool) or Pair())
    monkeypatch.setattr(graphed._Replay, "apply", lambda hidden, anchor, packed, pair: hidden + 1)
    block = GraphedBlock(lambda hidden, packed: hidden, [])
    hidden = torch.zeros(1)
    for length in range(1, graphed.MOST + 2):
        found = [float(block(hidden, packed(length))) for _ in range(graphed.SEEN + 2)]
        assert found == [0.0] * graphed.SEEN + ([1.0, 1.0] if length <= graphed.MOST else [0.0, 0.0])
    assert pools == [None] + [7] * (graphed.MOST - 1)  # one pool for all: they never run at the same time
    block.forget()
    assert float(block(hidden, packed(1))) == 0.0
