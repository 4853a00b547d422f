"""Group advantages, GAE and bi-level GAE against hand-computed tables."""

import math

import pytest
import torch

from terrella.kernels import bilevel_gae, gae, group_advantage, variance_filter

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 7, 3, 3, 9])


def test_methods_by_hand():
    std = math.sqrt(1 / 3)
    table = {
        "identity": REWARDS.tolist(),
        "mean": [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0],
        "mean_std": [0.5 / (std + 1e-6), -0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.5 / (std + 1e-6), 0.0, 0.0, 0.0],
        "leave_one_out": [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0.0, 0.0, 0.0],
        "uniform_std": [
            1.0 / (std + 2e-6),
            -1.0 / (std + 2e-6),
            -1.0 / (std + 2e-6),
            1.0 / (std + 2e-6),
            0.0,
            0.0,
            0.0,
        ],
        "asym_clip": [0.5 / (std + 1e-6), -0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.5 / (std + 1e-6), 0.0, 0.0, 0.0],
    }
    for method, want in table.items():
        torch.testing.assert_close(group_advantage(REWARDS, GROUPS, method=method), torch.tensor(want), msg=method)


def test_asym_clip_clips():
    rewards = torch.tensor([0.0] * 15 + [1.0])
    got = group_advantage(rewards, None, method="asym_clip")
    assert got.max() == 3.0 and got.min() > -1.0
    assert group_advantage(-rewards, None, method="asym_clip").min() == -1.0


def test_singleton_and_tags_and_invalid():
    assert group_advantage(REWARDS, GROUPS)[-1] == 0
    by_name = group_advantage(REWARDS, list("aaaabbc"))
    torch.testing.assert_close(by_name, group_advantage(REWARDS, GROUPS))
    rewards = REWARDS.clone()
    rewards[1] = math.nan
    valid = torch.tensor([1, 0, 1, 1, 1, 1, 1]).bool()
    got = group_advantage(rewards, GROUPS, method="mean", valid_S=valid)
    torch.testing.assert_close(got, torch.tensor([1 / 3, 0.0, -2 / 3, 1 / 3, 0.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="reward 1 is nan"):
        group_advantage(rewards, GROUPS)
    with pytest.raises(ValueError, match="method"):
        group_advantage(REWARDS, GROUPS, method="median")


def test_variance_filter():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 3.0, 0.0, 2.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert variance_filter(rewards, groups, keep=0.5).tolist() == [False] * 4 + [True] * 4
    assert variance_filter(rewards, groups, keep=0.1).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert variance_filter(rewards, groups, keep=0.8).tolist() == [True, True, False, False] + [True] * 4


def loop_gae(rewards, values, mask, gamma, lam):
    out, carry, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            carry = rewards[t] + gamma * following - values[t] + gamma * lam * carry
            following, out[t] = values[t], carry
    return out


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.9, 0.8)])
def test_gae_skips_masked_tokens(gamma, lam):
    torch.manual_seed(0)
    mask = torch.rand(5, 17) < 0.6
    mask[4] = False
    rewards, values = torch.randn(5, 17) * mask, torch.randn(5, 17)
    advantage, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for b in range(5):
        want = torch.tensor(loop_gae(rewards[b].tolist(), values[b].tolist(), mask[b].tolist(), gamma, lam))
        torch.testing.assert_close(advantage[b], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, (advantage + values) * mask)


def test_rows_end_to_end_equal_padded_ones():
    torch.manual_seed(0)
    lengths = [5, 1, 17, 9]
    inside = torch.arange(17) < torch.tensor(lengths)[:, None]
    mask = inside & (torch.rand(4, 17) < 0.7)
    ends = mask & (torch.rand(4, 17) < 0.4)
    rewards, values = torch.randn(4, 17).double() * ends, torch.randn(4, 17).double() * inside
    flat = [x[inside] for x in (rewards, values, mask, ends)]
    for got, want in zip(
        gae(*flat[:3], gamma=0.9, lam=0.8, lengths=lengths), gae(rewards, values, mask, gamma=0.9, lam=0.8), strict=True
    ):
        assert torch.equal(got, want[inside])
    for got, want in zip(bilevel_gae(*flat, lengths=lengths), bilevel_gae(rewards, values, mask, ends), strict=True):
        assert torch.equal(got, want[inside])
    with pytest.raises(ValueError, match="add up to 31 for 32"):
        gae(*flat[:3], lengths=[5, 1, 17, 8])


def test_reward_on_a_masked_token_is_an_error():
    with pytest.raises(ValueError, match="masked token"):
        gae(torch.ones(1, 3), torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))


BILEVEL = [
    # two turns of five, all rewarded
    {
        "rewards": [0, 0, 0, 0, 1, 0, 0, 0, 0, 1],
        "values": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        "mask": [1] * 10,
        "options": (1.0, 1.0, 0.95),
        "advantages": [1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0.0],
    },
    # an observation token between the turns, discounts below one
    {
        "rewards": [0, 0, 0.5, 0, 0, -0.1, 0, 2],
        "values": [0.2, 0.1, 0.3, 0.4, 0, 0.1, 0.2, 0.5],
        "mask": [1, 1, 1, 0, 1, 1, 1, 1],
        "options": (0.99, 0.95, 0.9),
        "advantages": [1.499797, 1.70207, 1.600288, 0.0, 1.540316, 1.5325, 1.70575, 1.5],
    },
]


@pytest.mark.parametrize("case", BILEVEL, ids=["plain", "masked"])
def test_bilevel_gae(case):
    rewards, values, mask = (torch.tensor([case[k]], dtype=torch.float32) for k in ("rewards", "values", "mask"))
    gamma, lam, high = case["options"]
    options = {"gamma": gamma, "lam": lam, "high_level_gamma": high}
    advantage, returns = bilevel_gae(rewards, values, mask, rewards != 0, **options)
    torch.testing.assert_close(advantage, torch.tensor([case["advantages"]]), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(returns, (advantage + values) * mask)


def test_bilevel_sees_a_turn_with_zero_reward():
    rewards, values, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.ones(1, 4)
    ends = torch.tensor([[0, 1, 0, 1]])
    advantage, _ = bilevel_gae(rewards, values, mask, ends, high_level_gamma=0.5)
    # by hand: end 2: A=0.6, return 1; end 1: delta=0+.5*.4-.2=0, A=.5*.6=.3, return .5
    torch.testing.assert_close(advantage, torch.tensor([[0.4, 0.3, 0.7, 0.6]]))
    with pytest.raises(ValueError, match="turn_end"):
        bilevel_gae(rewards, values, mask, torch.tensor([[0, 1, 0, 0]]))
