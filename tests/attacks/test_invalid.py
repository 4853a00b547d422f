"""Samples that fail: a few are counted and train nothing, many stop the run by name."""

from pathlib import Path

from terrella.core.metrics import MetricsFile
from terrella.tests.attacks.jobs import End
from terrella.tests.parallel.pool import run_ranks


def faulty(folder: Path, failing: str, *overrides: str) -> End:
    return run_ranks(
        "terrella.tests.attacks.jobs:start_with_faults", 1, folder=str(folder), failing=failing, overrides=overrides
    )[0]


def test_one_invalid_sample_in_every_step_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    end = faulty(tmp_path / "run", "one")
    assert end.code == 0, end
    rows = [row for row in MetricsFile(tmp_path / "run" / "metrics.jsonl").rows() if row["stage"] == "rlvr"]
    assert [row["invalid"] for row in rows] == [1, 1, 1, 1]


def test_more_than_the_tolerated_share_stops_by_name(tmp_path: Path) -> None:
    end = faulty(tmp_path / "strict", "one", "stages.rlvr.rollouts.max_invalid_share=0.1")
    assert (
        end.code == 9 and "step 1: 1 of 6 samples are Invalid" in end.said and "max_invalid_share = 0.1" in end.said
    ), end
    end = faulty(tmp_path / "all", "all")
    assert end.code == 9 and "6 of 6 samples are Invalid" in end.said and "server unplugged" in end.said, end
