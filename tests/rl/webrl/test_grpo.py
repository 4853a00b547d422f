"""On-policy multi-turn GRPO in web worlds, on the real engine."""

from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.webrl.config import WebSiteEnvironment
from terrella.rl.webrl.tasks import SiteTasks
from terrella.tests.parallel.pool import run_ranks


def test_every_task_comes_once_before_any_comes_again() -> None:
    sites = WebSiteEnvironment(kind="web-site", max_prompt_tokens=100, tag="WebClicks", templates=[407])
    tasks = SiteTasks(sites, None, ByteTokenizer(), None)
    count, order = len(tasks.of("train")), tasks.order(7)
    passes = [[order(place) for place in range(number * count, (number + 1) * count)] for number in (0, 1)]
    assert [sorted(one) for one in passes] == [list(range(count))] * 2 and passes[0] != passes[1]
    rest = tasks.order(7, without=[0, 1])
    assert {rest(place) for place in range(count)} == set(range(2, count))


def test_an_agent_learns_to_end_on_the_right_page() -> None:
    (record,) = run_ranks("terrella.tests.rl.webrl.grpo_job:learn", 1, steps=8)
    rewards = [row["reward/mean"] for row in record]
    assert rewards[0] < 0.7 and rewards[-1] > 0.9, rewards
    assert record[0]["turns"] > 1 and not any(row["invalid"] for row in record)
