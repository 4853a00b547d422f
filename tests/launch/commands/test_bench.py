"""The bench command: dispatch, the record, baselines and what counts as worse."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.benchmarks import record
from terrella.core.errors import ConfigError, TerrellaError
from terrella.launch.commands.bench import CHARTS, CURVES, as_baseline, available, bench, draw, judge, run


def row(metric: str, value: float, unit: str, impl: str = "terrella") -> record.Row:
    recorder = record.Recorder("train", "x", "H100", "torch 2", commit="c", run_id="r1")
    return recorder.add("1.5b", impl, metric, value, unit)


def test_names_are_listed_and_others_refused() -> None:
    assert {"kernels", "train", "rollout", "sync", "data", "worlds", "e2e"} <= set(available())
    listed = CliRunner().invoke(bench, [])
    assert all(name in listed.output for name in available())
    refused = CliRunner().invoke(bench, ["speed"])
    assert isinstance(refused.exception, ConfigError) and "kernels" in str(refused.exception)


def test_rows_are_appended_compared_and_kept_as_baseline(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    options = ["data", "--out", str(out), "--", "--repeats", "1", "--scale", "0.01"]
    done = CliRunner().invoke(bench, [*options[:3], "--baseline", *options[3:]])
    assert done.exit_code == 0, done.output + str(done.exception)
    rows = record.read(out)
    kept = [r for r in rows if r.run_id.startswith(record.BASELINE)]
    assert kept and len(kept) < len(rows) and all(r.impl.startswith("terrella") for r in kept)


def test_a_benchmark_that_fails_half_way_keeps_what_it_measured(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "results.csv"

    def half(command: list[str]) -> int:
        record.append([row("tokens_per_s", 5.0, "tokens/s")], out)
        return 3

    monkeypatch.setattr("terrella.launch.commands.bench.run", half)
    done = CliRunner().invoke(bench, ["train", "--out", str(out), "--baseline", "--compare"])
    assert (
        isinstance(done.exception, TerrellaError)
        and done.exception.exit_code == 3
        and "1 rows kept as baseline" in done.output
    )
    assert [r.run_id for r in record.read(out)] == ["r1", "baseline:r1"]


def test_a_request_to_end_is_passed_on_and_outlived(tmp_path: Path) -> None:
    began, handler = tmp_path / "began", signal.getsignal(signal.SIGTERM)
    script = f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(60)"

    def end() -> None:
        while not began.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert run([sys.executable, "-c", script]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler


def test_slower_by_ten_percent_or_larger_by_one_fails() -> None:
    new = [
        row("step", 100.0, "ms"),
        row("tokens", 50.0, "1/s"),
        row("peak", 10.0, "GiB"),
        row("loss", 2.0, "nat"),
        row("step", 90.0, "ms", "rival"),
    ]
    old = [as_baseline(r) for r in new]
    judge(old, new)
    judge(old, [replace(new[3], value=1.0)])  # a loss is no speed
    share = row("share of train", 0.5, "part")
    judge([as_baseline(share)], [replace(share, value=0.3)])  # nor is a part of the whole
    judge(old, [replace(new[0], value=109.0), replace(new[1], value=46.0), replace(new[2], value=10.05)])
    for index, worse in ((0, 111.0), (1, 44.0), (2, 10.2)):
        with pytest.raises(TerrellaError, match="1 of 1 figures are worse"):
            judge(old, [replace(new[index], value=worse)])
    with pytest.raises(ConfigError, match="no baseline row"):
        judge([], new)


def test_charts_show_the_newest_of_the_fullest_runs(tmp_path: Path) -> None:
    drawn = {path.name: path.read_text() for path in draw(record.read(), tmp_path)}
    assert {"kernels.svg", "spa.svg"} <= set(drawn) <= {*CHARTS, *CURVES}
    kernels = [r for r in record.read() if r.bench == "kernels" and "NVIDIA" in r.gpu]
    for case, _ in CHARTS["kernels.svg"][3]:
        ours = [r for r in kernels if r.case == case and r.metric == "ms" and r.impl == "terrella"]
        assert any(f"{r.value:.3g} ms" in drawn["kernels.svg"] for r in ours)
    new = [
        replace(row("tokens_per_s", 5000.0, "tokens/s"), date="2027-01-01T00:00:00Z", run_id="r2"),
        row("tokens_per_s", 4000.0, "tokens/s"),
    ]
    (path,) = draw(new, tmp_path)
    assert path.name == "train.svg" and "5,000 tokens/s" in path.read_text() and "4,000" not in path.read_text()
    # a newer run without the rivals hides none that was measured
    fuller = [*new, replace(new[1], impl="rival", value=3000.0)]
    assert (
        "4,000 tokens/s" in (text := draw(fuller, tmp_path)[0].read_text()) and "3,000" in text and "5,000" not in text
    )
