"""The benchmark of a cluster: names that are read back, refusals, rows; and the bytes that ranks move."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.benchmarks import record
from terrella.benchmarks.cluster import SMALL, Case, case_of, find_case, microbatches, rows_of
from terrella.models.geometry import GEOMETRIES, flops_per_token


def options(**given: object) -> argparse.Namespace:
    plain = {"model": "llama3-8b", "layout": "2,2,1,1,1,4", "batch": 64, "sequence": 4096, "recompute": "none"}
    return argparse.Namespace(**{**plain, "nodes": 2, "receivers": 8, **given})


def test_a_case_is_read_back_from_its_name() -> None:
    case = case_of(options(), 16)
    assert find_case(case.name) == case and (case.data, case.virtual, case.microbatch) == (4, 1, 4)
    assert find_case("qwen2.5-1.5b 4x4096") is None
    # what the first data rank trains: 64 sequences over 4 data ranks, 4 at a time
    small = Case("small", 8, 16, 1, 1, 1, 1, 1, 2, "none", 2, 1, 0)
    made = microbatches(small, SMALL, 0)
    assert len(made) == 2 and all(batch.tokens_T.shape == (32,) for batch in made)
    assert sum(float(batch.ce_weight_T.sum()) for batch in made) == pytest.approx(0.5)  # of both data ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gpt-5"}, "--model gpt-5"),
        ({"layout": "3"}, "does not divide the 16 ranks"),
        ({"layout": "1,x"}, "write up to six whole numbers"),
        ({"layout": "1,1,1,1,1,1,1"}, "write up to six whole numbers"),
        ({"batch": 24}, "--batch 24"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        case_of(options(**given), 16)


def test_rows_say_speed_utilisation_and_bytes() -> None:
    case = case_of(options(), 16)
    figures = {"tokens": 64 * 4096, "step": 2.0, "start": 9.0, "peak": 60.0, "sampled": 1000, "sampling": 4.0}
    figures |= {"sync": 0.5, "sync sent": 16e9, "sync arrived": 128e9}
    found = {name: (value, unit) for name, value, unit in rows_of(case, figures, 989.0)}
    speed = 64 * 4096 / 2.0 / 16
    assert found["tokens_per_s_gpu"] == (speed, "tok/s") and found["sampled_tokens_per_s"] == (250.0, "tok/s")
    assert found["mfu"][0] == pytest.approx(speed * flops_per_token(GEOMETRIES["llama3-8b"], 4096) / 989e12)
    assert found["sync sent"] == (16e9, "bytes") and found["peak"] == (60.0, "GiB")
    assert not {"mfu", "sync", "peak"} & {name for name, *_ in rows_of(case, {**figures_of_cpu()}, None)}


def figures_of_cpu() -> dict:
    return {"tokens": 64, "step": 2.0, "start": 9.0, "peak": 0.0}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ranks_move_no_byte_twice(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    command = [sys.executable, "-m", "terrella.benchmarks.moves", "--ranks", "2", "--count", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = {row.metric: row.value for row in record.read(out) if row.unit == "part"}
    assert set(parts) == {"save", "load", "load weights", "sync"} and max(parts.values()) <= 1.1
