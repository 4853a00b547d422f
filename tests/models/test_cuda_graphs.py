"""CUDA graphs of a model's layers: which passes share one, and the engine with a recording in a graph's place.

The graphs themselves run in tests/parallel/test_gpu.py.
"""

from pathlib import Path

import pytest
import torch

from terrella.core.layout import document_layout
from terrella.models import cuda_graphs
from terrella.models.cuda_graphs import GraphedBlock, shape_of
from terrella.models.layers import PackedInput
from terrella.tests.models.graph_jobs import check_graphs
from terrella.tests.sampling import sampled


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
    monkeypatch.setattr(cuda_graphs, "capture", lambda run, module, hidden, packed, pool: pools.append(pool) or Pair())
    monkeypatch.setattr(cuda_graphs._Replay, "apply", lambda hidden, anchor, packed, pair, block: hidden + 1)
    block = GraphedBlock(lambda hidden, packed: hidden, torch.nn.Module())
    hidden = torch.zeros(1)
    for length in range(1, cuda_graphs.MOST + 2):
        found = [float(block(hidden, packed(length))) for _ in range(cuda_graphs.SEEN + 2)]
        assert found == [0.0] * cuda_graphs.SEEN + ([1.0, 1.0] if length <= cuda_graphs.MOST else [0.0, 0.0])
    assert pools == [None] + [7] * (cuda_graphs.MOST - 1)  # one pool for all: they never run at the same time
    block.forget()
    assert float(block(hidden, packed(1))) == 0.0


def test_capture_meets_no_kept_accumulator() -> None:
    """Data-parallel wrappers keep the weights' accumulation nodes, which belong to the stream that made them."""
    layer = torch.nn.Linear(3, 2)
    kept = layer.bias.expand_as(layer.bias).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def reached() -> set:
        waiting, found = [layer(torch.ones(3)).grad_fn], set()
        while waiting:
            node = waiting.pop()
            found.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]  # type: ignore[union-attr]
        return found

    assert kept in reached()
    with cuda_graphs._stand_ins(layer, [layer.bias]) as (bias,):
        assert kept not in reached()
        assert layer.bias is bias and bias.data_ptr() == dict(layer.named_parameters())["bias"].data_ptr()
        (gradient,) = torch.autograd.grad(layer(torch.ones(3)).sum(), [bias])
    assert gradient.tolist() == [1.0, 1.0] and layer.bias is not bias and kept in reached()


def test_an_older_forward_pass_is_refused() -> None:
    """All graphs share their memory: the activations of a pass are gone once another has run."""
    block = GraphedBlock(lambda hidden, packed: hidden, torch.nn.Module())
    context = type("Context", (), {"block": block, "turn": 1})()
    block.turn = 2
    with pytest.raises(RuntimeError, match="another forward pass came before"):
        cuda_graphs._Replay.backward(context, torch.zeros(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs with real graphs in tests/parallel/test_gpu.py")
@pytest.mark.parametrize("packed,lora", sampled([(True, False), (False, True)], 1))
def test_graphs_change_nothing(packed: bool, lora: bool, tmp_path: Path) -> None:
    check_graphs(packed, lora, tmp_path)
