"""GRPO by hand: advantages, weights and the loss of a tiny batch."""

import math

import numpy as np
import pytest
import torch

from terrella.data.packing import pack
from terrella.data.trajectory import Invalid, Role, TokenSequence, Trajectory
from terrella.kernels.policy_loss import linear_policy_loss
from terrella.rl import algorithms
from terrella.rl.algorithms import common, grpo
from terrella.rl.algorithms.common import Scores
from terrella.rl.algorithms.config import GRPO
from terrella.rl.objective import terms_of


def trajectory(prompt: int, sample: int, reward, sampled: int = 2) -> Trajectory:
    ids = (1, 2, *range(3, 3 + sampled))
    roles = (Role.PROMPT,) * 2 + (Role.ACTION,) * sampled
    return Trajectory(prompt, sample, [TokenSequence(ids, roles, (0.0, 0.0, *([-1.0] * sampled)))], reward)


def alone(value):
    return [value]


def advantages(config: GRPO, group: list[Trajectory]) -> list[float]:
    return common.group_values(config.scale, group, common.rewards_of(group), torch.device("cpu"), alone).tolist()


def prepare(config: GRPO, group: list[Trajectory]):
    return grpo.prepare(config, group, Scores(), alone)


def test_advantages_by_hand() -> None:
    group = [trajectory(0, i, r) for i, r in enumerate((1.0, 0.0, 0.0, 1.0))] + [
        trajectory(1, i, 0.5) for i in range(2)
    ]
    std = math.sqrt(4 * 0.25 / 3)  # unbiased
    expected = [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, 0.0, 0.0]
    assert advantages(GRPO(), group) == pytest.approx(expected, abs=1e-5)
    assert advantages(GRPO(scale="mean"), group) == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, 0])
    assert advantages(GRPO(scale="leave_one_out"), group)[0] == pytest.approx(1 - 1 / 3)


def test_invalid_samples_enter_no_statistic_and_are_not_trained() -> None:
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(0, 2, Invalid("lost"))]
    values = advantages(GRPO(scale="mean"), group)
    assert values == [0.5, -0.5, 0.0]
    assert len(prepare(GRPO(), group)) == 2 and common.action_tokens(group) == 4


def test_groups_without_a_difference_cost_nothing_unless_a_term_needs_them() -> None:
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(1, 0, 0.5), trajectory(1, 1, 0.5)]
    assert len(prepare(GRPO(), group)) == 2
    assert len(prepare(GRPO(entropy_coef=0.1), group)) == 4


def test_token_and_sequence_aggregation() -> None:
    group = [trajectory(0, 0, 1.0, sampled=1), trajectory(0, 1, 0.0, sampled=3)]
    token = prepare(GRPO(), group)
    assert [s.pg.sum() for s in token] == pytest.approx([0.25, 0.75])
    sequence = prepare(GRPO(aggregate="sequence"), group)
    assert [s.pg.sum() for s in sequence] == pytest.approx([0.5, 0.5])
    assert token[1].pg.tolist() == pytest.approx([0, 0, 0.25, 0.25, 0.25])


def test_loss_of_a_batch_equals_the_formula() -> None:
    config = GRPO(entropy_coef=0.01)
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)]
    batch = pack(prepare(config, group))[0]
    torch.manual_seed(0)
    hidden, weight = torch.randn(batch.num_tokens, 4), torch.randn(8, 4)
    output = linear_policy_loss(hidden, weight, batch.targets_T, terms_of(batch), algorithms.settings(config, 1.0))
    logp = torch.log_softmax(hidden @ weight.T, -1)
    total = 0.0
    for t in np.flatnonzero(batch.pg_weight_T.numpy()):
        ratio = float(torch.exp(logp[t, batch.targets_T[t]] + 1.0))
        advantage = float(batch.advantage_T[t])
        entropy = float(-(logp[t].exp() * logp[t]).sum())
        total += (-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) - 0.01 * entropy) / 4
    assert float(output.loss) == pytest.approx(total, rel=1e-5)


def test_an_invalid_sample_changes_no_gradient() -> None:
    """The rows of a step with failed samples are those of the step without them, and a group's only survivor teaches
    nothing.
    """
    good = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)]
    failed = [trajectory(0, 2, Invalid("gone")), trajectory(1, 0, Invalid("gone")), trajectory(1, 1, 1.0)]
    weighed = []
    for group in (good, good + failed):
        values = common.group_advantages("mean_std", group, common.rewards_of(group), torch.device("cpu"), alone)
        weighed.append(common.weigh(GRPO(), group, values, 4.0, Scores()))
    assert len(weighed[0]) == len(weighed[1]) == 2
    for one, other in zip(*weighed, strict=True):
        assert np.array_equal(one.pg, other.pg) and np.array_equal(one.advantage, other.advantage)
