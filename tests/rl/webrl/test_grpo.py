"""On-policy multi-turn GRPO in web worlds, on the real engine."""

from terrella.launch.stages.web_rl import deal
from terrella.tests.parallel.pool import run_ranks


def test_every_task_comes_once_before_any_comes_again() -> None:
    seats = [s for step in range(3) for s in deal(list("abcdef"), 2, 2, step, 7)]  # type: ignore[arg-type]
    assert len(seats) == 12 and sorted(s.task for s in seats) == sorted("abcdef" * 2)
    assert [s.prompt_id for s in seats] == [i // 2 for i in range(12)] and [s.sample_index for s in seats] == [0, 1] * 6


def test_an_agent_learns_to_end_on_the_right_page() -> None:
    (record,) = run_ranks("terrella.tests.rl.webrl.grpo_job:learn", 1, steps=8)
    rewards = [row["reward/mean"] for row in record]
    assert rewards[0] < 0.7 and rewards[-1] > 0.9, rewards
    assert record[0]["turns"] > 1 and not any(row["invalid"] for row in record)
