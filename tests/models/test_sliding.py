"""Layers that see a window of positions, with a rotary base of their own."""

from types import SimpleNamespace

import torch

from terrella.core.layout import document_layout
from terrella.models.layers import PackedInput, PackedSelfAttention
from terrella.models.rope import rotation_table


def test_a_sliding_layer_without_norms_of_queries_turns_by_its_own_base() -> None:
    lengths, dim = [0, 7, 12], 8
    layout, positions = document_layout(lengths), torch.cat([torch.arange(7), torch.arange(5)])
    near, far = (rotation_table(positions, base ** -(torch.arange(0, dim, 2) / dim), 1.0) for base in (10.0, 1e4))
    config = SimpleNamespace(window_size=(3, 0), window_attn_skip_freq=2, context_parallel_size=1, softmax_scale=None)
    x_TC = torch.randn(12, 4 * dim, generator=torch.Generator().manual_seed(0))

    def attend(layer: int, table: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        layer = SimpleNamespace(
            config=config, layer_number=layer, q_layernorm=None,
            num_attention_heads_per_partition=2, num_query_groups_per_partition=1,
        )  # fmt: skip
        packed = PackedInput(layout, table, torch.arange(12), False, local)
        return PackedSelfAttention.attend(layer, x_TC, None, packed)

    assert torch.equal(attend(1, far, near), attend(1, near, near))  # slides
    assert torch.equal(attend(2, far, near), attend(2, far, far))
    assert not torch.equal(attend(1, far, near), attend(1, far, far))
