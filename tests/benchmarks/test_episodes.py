"""Web episodes in lock-step and each for itself, as the benchmark plays them. How fast depends on the machine."""

from terrella.tests.parallel.pool import run_ranks

JOB = "terrella.tests.benchmarks.episodes_job:run"


def test_both_ways_say_the_same_and_the_page_model_has_no_processes() -> None:
    (found,) = run_ranks(JOB, 1, count=5, at_once=2, latency_ms=(2.0, 10.0))
    lock_step, independent = found["lock-step"], found["independent"]
    assert lock_step["said"] == independent["said"] and len(lock_step["said"]) == 5
    assert len({len(said) for said in lock_step["said"]}) > 1
    for one in (lock_step, independent):
        assert 0 < one["busy_s"] < one["seconds"] and one["own_s"] > 0
        assert one["browser_s"] < 0.5
