"""The benchmark of copied proposals: it trains, samples in every way, and records what it saw."""

import sys

import pytest

from terrella.benchmarks import copying, record


@pytest.mark.full
def test_every_way_gives_the_same_samples(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "results.csv"
    monkeypatch.setattr(sys, "argv", ["copying", "--case", "tiny", "--rounds", "1", "--out", str(out)])
    copying.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if " rows | " in line]
    assert len(lines) == len(copying.WAYS) and all("100.0% the same samples" in line for line in lines)
    calls = {row.impl: row.value for row in record.read(out) if row.metric == "calls per token"}
    assert calls["terrella embedded, plain"] == 1.0 and calls["terrella embedded, copy 15"] < 1.0
