"""Every algorithm against numbers worked out by hand on tiny groups."""

import math

import numpy as np
import pytest
import torch

from terrella.core.engine import Head
from terrella.core.errors import ConfigError
from terrella.core.mesh import Mesh
from terrella.data.packing import FIELDS, pack
from terrella.data.trajectory import Invalid, Role, TokenSequence, Trajectory
from terrella.kernels.policy_loss import linear_policy_loss
from terrella.rl import algorithms
from terrella.rl.algorithms import common, dapo, ppo, reinforce_pp
from terrella.rl.algorithms.common import Scores
from terrella.rl.algorithms.config import DAPO, GRPO, GSPO, PPO, RLOO, SFT, DrGRPO, ReinforcePP, StarPOS
from terrella.rl.objective import terms_of
from terrella.rl.preparation import keep_enough, microbatches, minibatches, wants_refills

P, A, O = Role.PROMPT, Role.ACTION, Role.OBSERVATION


def alone(value):
    return [value]


def row(roles, logprob: float = -1.0) -> TokenSequence:
    return TokenSequence(
        tuple(range(1, len(roles) + 1)), tuple(roles), tuple(logprob if r == A else 0.0 for r in roles)
    )


def trajectory(prompt: int, sample: int, reward, sampled: int = 2) -> Trajectory:
    return Trajectory(prompt, sample, [row([P, P] + [A] * sampled)], reward)


def two_groups() -> list[Trajectory]:
    rewards = {0: (1.0, 0.0, 0.0, 1.0), 1: (0.5, 0.5)}
    return [trajectory(p, i, r, sampled=1 + i % 2) for p, rs in rewards.items() for i, r in enumerate(rs)]


def weights(config, group, scores=None):
    """(prompt weight check, per-row token weight, per-row advantage) as plain numbers."""
    rows = algorithms.prepare(config, group, scores or Scores(), alone)
    for r in rows:
        assert not r.pg[:2].any()  # the prompt is never trained
    return [r.pg[2:].tolist() for r in rows], [float(r.advantage[-1]) for r in rows]


def test_grpo_leaves_out_groups_without_a_difference() -> None:
    pg, advantage = weights(GRPO(), two_groups())
    scale = 0.5 / math.sqrt(1 / 3)
    assert advantage == pytest.approx([scale, -scale, -scale, scale], abs=1e-5)
    assert [len(w) for w in pg] == [1, 2, 1, 2] and pg[0][0] == pytest.approx(1 / 9)  # 6 + 3 sampled tokens
    pg, advantage = weights(GRPO(entropy_coef=0.1), two_groups())
    assert len(pg) == 6 and advantage[-2:] == [0, 0]


def test_a_sample_whose_episode_never_began_takes_no_group_s_place() -> None:
    lost = Trajectory(-1, -1, [], Invalid("world reset: did not finish within 60 s"))
    first, second = two_groups()[:4], two_groups()[4:]
    for algorithm in (GRPO(), StarPOS(keep=1.0)):
        kept, extra = keep_enough(algorithm, [*first[:3], lost, *second], None, alone)
        assert kept == [*first[:3], *second] and extra == []


@pytest.mark.parametrize(
    "algorithm", [GRPO(kl_coef=0.1), GRPO(kl_coef=0.1, kl_in="reward"), PPO(kl_coef=0.1, kl_in="loss"), SFT()]
)
def test_a_mini_batch_without_a_valid_sample_measures_what_the_others_do(algorithm) -> None:
    group = [*two_groups()[:4], *(trajectory(1, i, Invalid("lost")) for i in range(4))]
    zeros = [np.zeros(len(s.ids)) for _, s in common.rows(group)]
    rows = algorithms.prepare(algorithm, group, Scores(reference=zeros, values=zeros), alone)
    used = []
    # another data rank has prompt 1
    for part in minibatches(algorithm, rows, group, 2, lambda mine: [mine, {1}] if isinstance(mine, set) else [mine]):
        (batch,) = microbatches(algorithm, part, 64, Mesh(), 8)
        used.append({name for name in FIELDS.values() if getattr(batch, name) is not None})
    assert used[0] == used[1]


def test_a_group_without_a_valid_sample_takes_no_update() -> None:
    group = [trajectory(p, i, Invalid("lost") if p < 2 else float(i)) for p in range(4) for i in range(2)]
    rows = algorithms.prepare(GRPO(), group, Scores(), alone)
    parts = minibatches(GRPO(), rows, group, 2, alone)
    assert [{group[row.source].prompt_id for row in part} for part in parts] == [{2}, {3}]
    assert minibatches(GRPO(), rows[:2], group[:6], 2, alone) == [rows[:2]]  # one group is one mini-batch


def test_dr_grpo_weighs_every_token_by_one_constant() -> None:
    pg, advantage = weights(DrGRPO(length=10), two_groups())
    assert advantage == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert [w for r in pg for w in r] == pytest.approx([1 / (6 * 10)] * 6)  # 6 sequences, however long


def test_dapo_keeps_groups_with_a_signal_and_shapes_long_answers() -> None:
    group = [*two_groups(), trajectory(2, 0, 1.0), trajectory(2, 1, Invalid("lost"))]
    assert {t.prompt_id for t in algorithms.keep(DAPO(), group, alone)} == {0}
    config = DAPO(overlong_length=10, overlong_cache=4)
    assert [dapo.overlong_penalty(config, n) for n in (0, 6, 7, 8, 10, 50)] == [0, 0, -0.25, -0.5, -1, -1]
    long = [trajectory(0, 0, 1.0, sampled=2), trajectory(0, 1, 1.0, sampled=8)]
    assert dapo.shaped_rewards(config, long).tolist() == [1.0, 0.5]
    _, advantage = weights(config, long)
    assert advantage == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-4)
    chosen = algorithms.settings(config, 0.7)
    assert (chosen.clip_low, chosen.clip_high, chosen.temperature) == (0.2, 0.28, 0.7)


def test_gspo_loss_is_the_clipped_ratio_of_whole_sequences() -> None:
    config = GSPO(clip_low=0.1, clip_high=0.15)
    group = [trajectory(0, 0, 1.0, sampled=1), trajectory(0, 1, 0.0, sampled=3)]
    batch = pack(algorithms.prepare(config, group, Scores(), alone))[0]
    torch.manual_seed(0)
    hidden, head = torch.randn(batch.num_tokens, 4), torch.randn(8, 4)
    document = torch.repeat_interleave(torch.arange(2), batch.cu_seqlens_D1.diff().long())
    output = linear_policy_loss(
        hidden, head, batch.targets_T, terms_of(batch), algorithms.settings(config, 1.0), doc_N=document
    )
    logp = torch.log_softmax(hidden @ head.T, -1).gather(1, batch.targets_T[:, None])[:, 0]
    total = 0.0
    for d in range(2):
        member = (document == d) & (batch.pg_weight_T != 0)
        ratio = math.exp(float((logp + 1.0)[member].mean()))
        advantage = float(batch.advantage_T[member][0])
        total += -min(ratio * advantage, min(max(ratio, 0.9), 1.15) * advantage) / 2
    assert float(output.loss) == pytest.approx(total, rel=1e-5)
    with pytest.raises(ValueError, match="tis_cap"):
        GSPO(tis_cap=2.0)
    assert GSPO(tis_cap=2.0, tis_per="sequence").tis_cap == 2.0


def test_rloo_baseline_is_the_others_and_kl_comes_off_the_reward() -> None:
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(0, 2, 0.5)]
    pg, advantage = weights(RLOO(), group)
    assert advantage == pytest.approx([1 - 0.25, 0 - 0.75], abs=1e-6)  # 0.5 against 0.5 is 0 and left out
    assert pg[0] == pytest.approx([1 / 3, 1 / 3])  # a sequence's log-prob is a sum
    # sample 0 lies 0.5 above the reference on each of 2 tokens: its reward falls by 0.1 x 1.0
    reference = [np.array([9.0, 9.0, -1.5, -1.5]), np.full(4, -1.0), np.full(4, -1.0)]
    _, advantage = weights(RLOO(kl_coef=0.1), group, Scores(reference=reference))
    assert advantage == pytest.approx([0.9 - 0.25, 0 - 0.7, 0.5 - 0.45], abs=1e-6)
    assert algorithms.needs(RLOO(kl_coef=0.1)) == {"reference"} and not algorithms.needs(RLOO())


def test_reinforce_pp_returns_and_global_whitening() -> None:
    group = [trajectory(0, 0, 1.0), trajectory(1, 0, 0.0)]
    reference = [np.array([0, 0, -1.5, -2.0]), np.full(4, -1.0)]
    config = ReinforcePP(kl_coef=0.1, gamma=0.5)
    found = reinforce_pp.returns(config, group, Scores(reference=reference), alone)
    last = 1.0 - 0.1 * 1.0  # reward less the last token's penalty
    assert found[0].tolist() == pytest.approx([0, 0, 0.5 * last - 0.05, last]) and found[1].tolist() == [0, 0, 0, 0]
    values = [0.5 * last - 0.05, last, 0.0, 0.0]
    mean, std = np.mean(values), np.std(values, ddof=1)
    rows = algorithms.prepare(config, group, Scores(reference=reference), alone)
    assert [float(x) for r in rows for x in r.advantage[2:]] == pytest.approx(
        [(v - mean) / std for v in values], abs=1e-5
    )
    based = reinforce_pp.returns(ReinforcePP(group_baseline=True), two_groups(), Scores(), alone)
    assert [float(r[-1]) for r in based] == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, 0])


def test_whitening_over_ranks_equals_one_rank() -> None:
    arrays, masks = [np.array([1.0, 2.0]), np.array([4.0, 9.0, 5.0])], [np.ones(2), np.array([1.0, 0.0, 1.0])]
    whole = common.whiten(arrays, masks, alone)
    # what two ranks would gather, in the order whiten asks: (count, sum), then squared deviations
    joined = [np.array([1.0, 2.0]), np.array([4.0, 5.0])]
    mean = 3.0
    answers = [[(2, 3.0), (2, 9.0)], [float(((j - mean) ** 2).sum()) for j in joined]]
    first = common.whiten(arrays[:1], masks[:1], lambda _: answers.pop(0))
    assert first[0].tolist() == pytest.approx(whole[0].tolist()) and whole[1][1] == 0


def turns(prompt: int = 0, turn_rewards=(0.0, 1.0)) -> Trajectory:
    """Two sampled turns with an observation between them."""
    return Trajectory(prompt, 0, [row([P, A, A, O, A])], sum(turn_rewards), list(turn_rewards))


VALUES = np.array([0.0, 0.1, 0.2, 7.0, 0.4])  # the observation's value must not matter


def test_ppo_gae_by_hand() -> None:
    config = PPO(gamma=0.9, lam=0.8, whiten=False)
    advantage, target = ppo.advantages(config, [turns()], Scores(values=[VALUES]))
    d4 = 1.0 - 0.4
    a4 = d4
    a2 = 0.9 * 0.4 - 0.2 + 0.72 * a4
    a1 = 0.9 * 0.2 - 0.1 + 0.72 * a2
    assert advantage[0].tolist() == pytest.approx([0, a1, a2, 0, a4])
    assert target[0].tolist() == pytest.approx([0, a1 + 0.1, a2 + 0.2, 0, a4 + 0.4])
    (prepared,) = algorithms.prepare(config, [turns()], Scores(values=[VALUES]), alone)
    assert prepared.value.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3])
    assert prepared.old_value.tolist() == pytest.approx([0, 0.1, 0.2, 0, 0.4])
    with pytest.raises(ConfigError, match="needs a critic"):
        ppo.advantages(config, [turns()], Scores())


def test_ppo_bi_level_gae_by_hand() -> None:
    config = PPO(gamma=0.9, lam=0.8, bi_level=True, turn_rewards=True, turn_gamma=0.95, whiten=False)
    advantage, _ = ppo.advantages(config, [turns(turn_rewards=(0.0, 1.0))], Scores(values=[VALUES]))
    # upper level over turn ends (tokens 2 and 4); the first turn's reward of exactly 0 is still an end
    up4 = 1.0 - 0.4
    up2 = 0.0 + 0.95 * 0.4 - 0.2 + 0.95 * 0.8 * up4
    r4, r2 = up4 + 0.4, up2 + 0.2
    a2 = r2 - 0.2
    a1 = 0.9 * 0.2 - 0.1 + 0.72 * a2
    assert advantage[0].tolist() == pytest.approx([0, a1, a2, 0, r4 - 0.4])
    with pytest.raises(ValueError, match="bi_level"):
        PPO(bi_level=True)
    with pytest.raises(ValueError, match="bi_level: cannot be combined with kl_in: reward"):
        PPO(bi_level=True, turn_rewards=True, kl_coef=0.1)
    assert PPO(bi_level=True, turn_rewards=True, kl_coef=0.1, kl_in="loss").bi_level


def test_ppo_reward_placement_windowed_turns_and_kl() -> None:
    windowed = Trajectory(0, 0, [row([P, A, A]), row([P, P, A])], 3.0, [1.0, 2.0])
    rewards, ends = ppo.token_rewards(PPO(turn_rewards=True), [windowed], Scores())
    assert [r.tolist() for r in rewards] == [[0, 0, 1], [0, 0, 2]] and [e.tolist() for e in ends] == [
        [False, False, True]
    ] * 2
    reference = [np.array([0, -1.5, -1.0]), np.array([0, 0, -2.0])]
    rewards, _ = ppo.token_rewards(PPO(turn_rewards=True, kl_coef=0.1), [windowed], Scores(reference=reference))
    assert [r.tolist() for r in rewards] == [pytest.approx([0, -0.05, 1]), pytest.approx([0, 0, 1.9])]
    missing = Trajectory(0, 0, windowed.sequences, 3.0, [1.0])
    with pytest.raises(ConfigError, match="turn_rewards"):
        ppo.token_rewards(PPO(turn_rewards=True), [missing], Scores())


def test_value_loss_clips_around_the_old_value() -> None:
    config = PPO(value_clip=0.5, whiten=False)
    batch = pack(algorithms.prepare(config, [turns()], Scores(values=[VALUES]), alone))[0]
    values = torch.tensor([2.0, 0.3, 5.0, 0.4], requires_grad=True)
    head = Head(torch.zeros(8, 4), None, 8, values, torch.zeros(4, dtype=torch.int64), None)
    loss, sums = ppo.value_loss(config)(torch.zeros(4, 4), head, batch)
    returns = batch.return_T.tolist()
    expected = 0.0
    for value, old, target in ((2.0, 0.1, returns[0]), (0.3, 0.2, returns[1]), (0.4, 0.4, returns[3])):
        near = min(max(value, old - 0.5), old + 0.5)
        expected += 0.5 * max((value - target) ** 2, (near - target) ** 2) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert values.grad[2] == 0 and values.grad[1] != 0 and sums["value_tokens"] == 3
    assert ppo.explained_variance(
        {"value_tokens": 2, "return": 2, "return_sq": 4, "value_error_sq": 0.5}
    ) == pytest.approx(0.75)
    alike = {"value_tokens": 2, "return": 2, "return_sq": 2.0000001, "value_error_sq": 0.5}  # returns but for rounding
    assert math.isnan(ppo.explained_variance(alike))


def test_starpo_s_keeps_the_most_uncertain_groups_of_all_ranks() -> None:
    mine = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(1, 0, 0.4), trajectory(1, 1, 0.6)]
    other = [(2, 5.0, True), (2, 0.0, True), (3, 1.0, True), (3, 1.0, True)]
    config = StarPOS(keep=0.5)
    for filtering in (config, GRPO(keep=0.5)):
        kept = algorithms.keep(filtering, mine, lambda value: [value, other])
        assert {t.prompt_id for t in kept} == {0}  # groups 2 and 0 are the two of four, 2 lives elsewhere
    assert algorithms.keep(GRPO(), mine, alone) == mine
    lost = [trajectory(n, k, Invalid("lost")) for n in (4, 5) for k in (0, 1)]
    equal = [trajectory(n, k, 1.0) for n in (6, 7) for k in (0, 1)]
    assert {t.prompt_id for t in algorithms.keep(GRPO(keep=0.5), [*lost, *equal], alone)} == {6, 7}
    many = [trajectory(n, k, float(n * k)) for n in range(100) for k in (0, 1)]
    assert len(algorithms.keep(GRPO(keep=0.29), many, alone)) == 2 * 29
    assert {t.prompt_id for t in algorithms.keep(StarPOS(keep=0.25), mine, lambda value: [value, other])} == set()
    assert len(algorithms.keep(StarPOS(keep=0.01), mine, alone)) == 2
    assert (config.clip_high, config.dual_clip, config.entropy_coef) == (0.28, 3.0, 0.001)


def test_sft_imitates_what_scored_well() -> None:
    group = algorithms.keep(SFT(min_reward=0.5), [*two_groups(), trajectory(9, 0, Invalid("lost"))], alone)
    assert [t.reward for t in group] == [1.0, 1.0, 0.5, 0.5]
    rows = algorithms.prepare(SFT(), group, Scores(), alone)
    assert sum(float(r.ce.sum()) for r in rows) == pytest.approx(1.0) and rows[0].pg is None


def test_truncated_importance_and_kl_in_the_loss() -> None:
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)]
    policy = [np.array([5.0, 5.0, -1.0 + math.log(1.5), -1.0 + math.log(8.0)]), np.full(4, -1.0)]
    config = GRPO(tis_cap=2.0)
    rows = algorithms.prepare(config, group, Scores(policy=policy), alone)
    assert rows[0].pg.tolist() == pytest.approx([0, 0, 1.5 / 4, 2.0 / 4])
    assert rows[0].old_logprob.tolist()[2:] == pytest.approx(policy[0][2:].tolist()) and algorithms.needs(config) == {
        "policy"
    }
    # one ratio of both tokens, 12, is beyond the cap; and tokens beyond it may count nothing
    for beyond, weight in (("clip", 2.0 / 4), ("mask", 0.0)):
        by = GRPO(tis_cap=2.0, tis_per="sequence", tis_beyond=beyond)
        rows = algorithms.prepare(by, group, Scores(policy=policy), alone)
        assert rows[0].pg.tolist() == pytest.approx([0, 0, weight, weight])
        assert rows[1].pg.tolist() == pytest.approx([0, 0, 0.25, 0.25])
    rows = algorithms.prepare(GRPO(tis_cap=2.0, tis_beyond="mask"), group, Scores(policy=policy), alone)
    assert rows[0].pg.tolist() == pytest.approx([0, 0, 1.5 / 4, 0])
    reference = [np.full(4, -2.0)] * 2
    rows = algorithms.prepare(GRPO(kl_coef=0.5, kl_clamp=10.0), group, Scores(reference=reference), alone)
    assert rows[0].kl.tolist() == pytest.approx([0, 0, 0.125, 0.125]) and rows[0].ref_logprob.tolist() == [-2.0] * 4
    assert algorithms.settings(GRPO(kl_coef=0.5, kl_clamp=10.0), 1.0).kl_clamp == 10.0


EVERY = [GRPO(), DrGRPO(), DAPO(), GSPO(), RLOO(), ReinforcePP(), PPO(), StarPOS(), SFT(), GRPO(scale="uniform_std")]


@pytest.mark.parametrize("config", EVERY, ids=lambda c: f"{c.kind} {getattr(c, 'scale', '')}".strip())
def test_weights_do_not_depend_on_how_groups_lie_on_ranks(config) -> None:
    """Two ranks with a group each sum to what one rank with both groups computes."""
    whole = [
        trajectory(p, i, float((p + i) % 2) + 0.25 * p, sampled=1 + (p + i) % 3) for p in range(2) for i in range(4)
    ]
    parts = [whole[:4], whole[4:]]

    def run(group, gather):
        kept = algorithms.keep(config, group, gather)
        values = [np.full(len(s.ids), 0.1) for _, s in common.rows(kept)]
        rows = algorithms.prepare(config, kept, Scores(values=values), gather)
        weight = "ce" if config.kind == "sft" else "pg"
        return sum(
            float((getattr(r, weight) * (1 if r.advantage is None else r.advantage.astype(float) ** 2)).sum())
            for r in rows
        )

    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    barrier, box = Barrier(2), [None, None]

    def gather_of(rank):
        def gather(value):
            box[rank] = value
            barrier.wait(10)
            values = list(box)
            barrier.wait(10)
            return values

        return gather

    with ThreadPoolExecutor(2) as pool:
        both = sum(pool.map(lambda r: run(parts[r], gather_of(r)), range(2)))
    assert both == pytest.approx(run(whole, alone), rel=1e-5)


@pytest.mark.parametrize(("bound", "least"), [("dual_clip", 1.0), ("kl_clamp", 0.0), ("tis_cap", 0.0)])
def test_a_bound_that_would_leave_nothing_is_refused(bound: str, least: float) -> None:
    for algorithm in (GRPO, RLOO, PPO, StarPOS):
        with pytest.raises(ValueError, match=f"{bound}: {least} must be above {least:g}"):
            algorithm(**{bound: least})
        assert getattr(algorithm(**{bound: least + 1}), bound) == least + 1


def test_refills_are_not_sampled_ahead() -> None:
    assert wants_refills(DAPO(refills=1), True, 0)
    assert not wants_refills(DAPO(refills=1), False, 2) and not wants_refills(DAPO(refills=0), True, 2)
    assert not wants_refills(GRPO(), True, 2)
    with pytest.raises(ConfigError, match="ahead: refills must be sampled"):
        wants_refills(DAPO(refills=1), True, 1)
