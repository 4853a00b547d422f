"""The bench command: dispatch, the record, baselines and what counts as worse."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.benchmarks import record
from terrella.core.errors import ConfigError, TerrellaError
from terrella.launch.bench import as_baseline, available, bench, judge


def row(metric: str, value: float, unit: str, impl: str = "terrella") -> record.Row:
    recorder = record.Recorder("train", "x", "H100", "torch 2", commit="c", run_id="r1")
    return recorder.add("1.5b", impl, metric, value, unit)


def test_names_are_listed_and_others_refused() -> None:
    assert {"kernels", "train", "data", "worlds", "e2e"} <= set(available())
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


def test_slower_by_ten_percent_or_larger_by_one_fails() -> None:
    new = [row("step", 100.0, "ms"), row("tokens", 50.0, "1/s"), row("peak", 10.0, "GB"), row("step", 90.0, "ms", "rival")]
    old = [as_baseline(r) for r in new]
    judge(old, new)
    judge(old, [replace(new[0], value=109.0), replace(new[1], value=46.0), replace(new[2], value=10.05)])
    for index, worse in ((0, 111.0), (1, 44.0), (2, 10.2)):
        with pytest.raises(TerrellaError, match="1 of 1 figures are worse"):
            judge(old, [replace(new[index], value=worse)])
    with pytest.raises(ConfigError, match="no baseline row"):
        judge([], new)
