"""Experts while decoding: their matrices as one tensor without a copy where they lie evenly, and the outputs of a plain
sum over experts.
"""

import pytest
import torch
import torch.nn.functional as F

from terrella.models.config import ModelConfig
from terrella.models.expert_decode import ExpertWeights, route, routed
from terrella.models.expert_matmul import pack_in_place, stacked
from terrella.tests.parallel.pool import run_ranks

CONFIG = ModelConfig(
    family="qwen3_moe", layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=32, qk_norm=True,
    experts=6, experts_per_token=2, expert_ffn=8,
)  # fmt: skip


def test_matrices_that_lie_evenly_are_viewed_and_others_copied() -> None:
    buffer = torch.randn(6 * 48)
    parts = [buffer[i * 48 : i * 48 + 32].view(4, 8) for i in range(6)]
    joined = stacked(parts)
    assert joined.data_ptr() == buffer.data_ptr() and torch.equal(joined, torch.stack(parts))
    for others in ([*parts[:-1], parts[-1].clone()], [parts[0], parts[2], parts[1], *parts[3:]], parts[::-1]):
        joined = stacked(others)
        assert torch.equal(joined, torch.stack(others)) and joined.data_ptr() != buffer.data_ptr()
        copies = [part.clone() for part in others]
        pack_in_place(copies)
        assert stacked(copies).data_ptr() == copies[0].data_ptr() and torch.equal(stacked(copies), joined)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"expert": 2}), (2, {"overlap_grad_reduce": True})])
@pytest.mark.parametrize("trained", [True, False])
def test_an_engines_experts_are_read_where_they_lie(world: int, layout: dict, trained: bool) -> None:
    for found in run_ranks("terrella.tests.parallel.jobs:experts_in_place", world, parallel=layout, trained=trained):
        assert found["views"] == found["layers"] == 2 and found["equal"] and found["after"]


@pytest.mark.parametrize("to_one", [True, False])
def test_every_token_gets_its_experts_weighted_sum(to_one: bool) -> None:
    config = ModelConfig(**{**vars(CONFIG), "expert_weights_sum_to_one": to_one})
    g = torch.Generator().manual_seed(0)
    fc1 = tuple(torch.randn(16, 16, generator=g) for _ in range(6))
    fc2 = tuple(torch.randn(16, 8, generator=g) for _ in range(6))
    weights, x_TH = ExpertWeights(torch.randn(6, 16, generator=g), fc1, fc2), torch.randn(9, 16, generator=g)
    chosen_TK, probs_TK = route(x_TH, weights.router_EH, config)
    every = torch.softmax(x_TH @ weights.router_EH.T, -1)
    wanted = every.gather(1, chosen_TK)
    torch.testing.assert_close(probs_TK, wanted / wanted.sum(1, keepdim=True) if to_one else wanted)
    expected = torch.zeros_like(x_TH)
    for t in range(9):
        for k in range(2):
            gate, up = F.linear(x_TH[t], fc1[chosen_TK[t, k]]).chunk(2)
            expected[t] += probs_TK[t, k] * F.linear(F.silu(gate) * up, fc2[chosen_TK[t, k]])
    torch.testing.assert_close(routed(x_TH, weights, config), expected, rtol=1e-4, atol=1e-4)
