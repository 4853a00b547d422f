"""Every algorithm reaches its floor on a tiny world (random 0.125, ceiling 1), on the real engine; and the
one-step-off loop.
"""

from pathlib import Path

import pytest

from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import in_turn

# settings, steps, floor of the mean reward over the last 5 steps
FLOORS = {
    "GRPO": ({}, 25, 0.8),
    "DrGRPO": ({"length": 1}, 25, 0.8),
    "DAPO": ({"refills": 1}, 25, 0.8),
    "GSPO": ({"clip_low": 0.2, "clip_high": 0.2}, 25, 0.8),
    "RLOO": ({"kl_coef": 0.001}, 25, 0.8),
    "ReinforcePP": ({"kl_coef": 0.001}, 25, 0.8),
    "PPO": ({"turn_rewards": True, "bi_level": True}, 30, 0.7),
    "StarPOS": ({"keep": 0.5, "turn_rewards": True}, 35, 0.7),
    "SFT": ({"min_reward": 0.5}, 25, 0.7),
}


@pytest.mark.parametrize("kind", FLOORS)
def test_reward_floor(kind: str) -> None:
    options, steps, floor = FLOORS[kind]
    (result,) = run_ranks("terrella.tests.rl.learning_jobs:learn", 1, kind=kind, options=options, steps=steps)
    rewards = [row["reward/mean"] for row in result["record"]]
    assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > floor, rewards
    if kind in ("PPO", "StarPOS"):
        assert result["record"][-1]["critic/loss"] < result["record"][0]["critic/loss"]


@pytest.mark.parametrize("kind", ["GRPO", "PPO"])
def test_several_updates_of_a_rollout_learn(kind: str) -> None:
    options, steps, floor = FLOORS[kind]
    (result,) = run_ranks(
        "terrella.tests.rl.learning_jobs:learn", 1, kind=kind, options=options, steps=steps // 2, updates=4
    )
    rewards = [row["reward/mean"] for row in result["record"]]
    assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > floor, rewards
    assert len(result["updates"]) == 4 * (steps // 2)


def test_ratios_and_clipping_of_several_updates_by_hand() -> None:
    """Two passes over two mini-batches: the log-probs that ratios compare with stay those of the sampler, whatever
    was updated since.
    """
    (result,) = run_ranks(
        "terrella.tests.rl.learning_jobs:learn", 1, kind="GRPO", options={}, steps=3, lr=5e-2, updates=2, epochs=2
    )
    assert len(result["updates"]) == 3 * 4
    clipped = []
    for number, update in enumerate(result["updates"]):
        member = update["pg_weight_T"] != 0
        ratio = (update["logprob"] - update["old_logprob_T"])[member].exp()
        advantage = update["advantage_T"][member]
        low = ((ratio < 0.8) & (advantage < 0)).sum()
        high = ((ratio > 1.2) & (advantage > 0)).sum()
        measured = update["metrics"]
        assert measured["pg_tokens"] == member.sum() and (measured["clipped_low"], measured["clipped_high"]) == (
            low,
            high,
        )
        assert measured["ratio"] == pytest.approx(float(ratio.sum()), rel=1e-5)
        assert float(update["pg_weight_T"].sum()) == pytest.approx(
            measured["pg_tokens"] / 64, rel=1e-5
        )  # 4 groups of 8 with two turns each
        if number % 4 == 0:  # nothing has moved yet
            assert float((ratio - 1).abs().max()) < 1e-5
        clipped.append(int(low + high))
    for step, row in enumerate(result["record"]):
        trained = sum(u["metrics"]["pg_tokens"] for u in result["updates"][4 * step : 4 * step + 4])
        assert row["clip_fraction"] == pytest.approx(sum(clipped[4 * step : 4 * step + 4]) / trained)
        # of the first update; later ones have moved on purpose
        assert row["staleness"] == 3 and row["logprob_drift/mean"] < 1e-5
    assert sum(clipped) > 0 and all(clipped[4 * step] == 0 for step in range(3))


def test_importance_correction_and_kl_in_the_loss_run_in_the_loop() -> None:
    options = {"tis_cap": 2.0, "kl_coef": 0.01, "entropy_coef": 0.001}
    (result,) = run_ranks("terrella.tests.rl.learning_jobs:learn", 1, kind="GRPO", options=options, steps=12)
    last = result["record"][-1]
    assert last["reward/mean"] > result["record"][0]["reward/mean"] + 0.2
    assert 0 < last["kl"] and last["logprob_drift/mean"] < 1e-4


@in_turn("one step off")
def test_one_step_off_is_bounded_in_order_and_faster() -> None:
    job = "terrella.tests.rl.learning_jobs:learn"
    # sampling and training sleep, so that they overlap visibly; a machine that stalls in one half may hide it once
    for _ in range(3):
        (sync,) = run_ranks(job, 1, kind="GRPO", options={}, steps=10, ahead=0, sleep_s=0.3)
        (off,) = run_ranks(job, 1, kind="GRPO", options={"tis_cap": 2.0}, steps=10, ahead=1, sleep_s=0.3)
        if off["seconds"] < sync["seconds"]:
            break
    assert [row["staleness"] for row in sync["record"]] == [0] * 10
    ages = [row["staleness"] for row in off["record"]]
    assert ages[0] == 0 and max(ages) == 1 and [row["staleness/max"] for row in off["record"]] == ages
    assert sync["published"] == off["published"] == list(range(11))
    assert off["seconds"] < sync["seconds"]
    assert off["record"][-1]["reward/mean"] > off["record"][0]["reward/mean"] + 0.1


def test_a_step_whose_sampler_lost_its_weights_is_played_again(tmp_path: Path) -> None:
    """On one of two data ranks, in the second turn of the second step: all ranks publish, nothing else changes, and
    what was sampled before stands in the journal once.
    """
    job = "terrella.tests.rl.learning_jobs:learn_after_a_loss"
    calm = run_ranks(job, 2, folder=str(tmp_path / "calm"), lost_in=0)
    lost = run_ranks(job, 2, folder=str(tmp_path / "lost"), lost_in=4)
    assert [r["published"] for r in calm] == [[0, 1, 2, 3]] * 2
    assert [r["published"] for r in lost] == [[0, 1, 1, 2, 3]] * 2
    assert [r["reused"] for r in lost] == [0, 4 * 8]  # the first turn of the second rank's episodes
    assert [r["record"] for r in lost] == [r["record"] for r in calm]
    for rank in range(2):
        kept = [
            sorted(p.read_text() for p in (tmp_path / name).glob(f"samples-*-{rank}.jsonl"))
            for name in ("calm", "lost")
        ]
        assert kept[0] == kept[1]
    # without a journal, as in validation, all of the step is sampled again
    forgotten = run_ranks(job, 2, folder=str(tmp_path / "forgotten"), lost_in=4, journaled=False)
    assert [(r["published"], r["reused"]) for r in forgotten] == [([0, 1, 1, 2, 3], 0)] * 2
    assert [r["record"] for r in forgotten] == [r["record"] for r in calm]


def test_a_refill_whose_sampler_lost_its_weights_is_played_again(tmp_path: Path) -> None:
    """The first step's two turns, then the second rank loses them in what is sampled in place of equal groups."""
    job = "terrella.tests.rl.learning_jobs:learn_after_a_loss"
    calm = run_ranks(job, 2, folder=str(tmp_path / "calm"), lost_in=0, refills=2)
    lost = run_ranks(job, 2, folder=str(tmp_path / "lost"), lost_in=3, refills=2)
    assert calm[0]["record"][0]["refilled"] > 0
    assert [r["published"] for r in lost] == [[0, *r["published"]] for r in calm]
    assert [r["record"] for r in lost] == [r["record"] for r in calm]
