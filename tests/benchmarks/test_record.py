"""The file of record: round trip, regressions, the chart."""

import xml.etree.ElementTree as ElementTree

import pytest

from terrella.benchmarks import record
from terrella.benchmarks.kernels import main


def rows(value, run_id, impl="terrella", unit="ms", metric="ms"):
    command = record.command_line("terrella bench kernels", ["--out", "here.csv"])
    recorder = record.Recorder("kernels", command, "GPU", "torch x", commit="abc", run_id=run_id)
    recorder.add("case, with a comma", impl, metric, value, unit, p20=value * 0.9)
    return recorder.rows


def test_round_trip(tmp_path):
    path = tmp_path / "results.csv"
    record.append(rows(1.25, "a"), path)
    record.append(rows(2.5, "b"), path)
    got = record.read(path)
    assert (
        path.read_text().splitlines()[0]
        == "run_id,date,commit,gpu,versions,bench,case,impl,metric,value,p20,p80,unit,command"
    )
    assert (
        [r.value for r in got] == [1.25, 2.5]
        and got[0].case == "case, with a comma"
        and got[0].p20 == 1.125
        and got[0].p80 is None
    )
    assert got[0].command == "terrella bench kernels"


def test_commands_say_how_and_not_where():
    words = ["--case", "a 4x8", "--out", "/x/y.csv", "--rivals", "/x/r", "--logs", "/x", "--steps", "3"]
    assert (
        record.command_line("terrella bench train", words)
        == "terrella bench train --case 'a 4x8' --rivals FOLDER --steps 3"
    )
    assert not [r.command for r in record.read() if " /" in r.command]


def test_other_columns_are_an_error(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        record.read(path)


def test_compare_flags_only_our_regressions():
    base = rows(1.0, "baseline:a")
    assert record.compare(base, rows(1.05, "b")) == []
    assert record.compare(base, rows(0.5, "b")) == []
    assert len(record.compare(base, rows(1.2, "b"))) == 1
    assert record.compare(rows(1.0, "a"), rows(1.2, "b")) == []  # not marked as a baseline
    assert record.compare(rows(1.0, "baseline:a", "trl"), rows(1.2, "b", "trl")) == []
    rate = rows(100.0, "baseline:a", unit="%", metric="copy_share")
    assert len(record.compare(rate, rows(80.0, "b", unit="%", metric="copy_share"))) == 1
    assert record.compare(rate, rows(120.0, "b", unit="%", metric="copy_share")) == []


def test_shipped_file_reads():
    for row in record.read():
        assert row.value == row.value and row.bench and row.impl


def test_chart_draws_one_run():
    drawn = record.chart(
        rows(1.0, "a") + rows(3.0, "a", "rival <x>"), "kernels", [("case, with a comma", "A & B")], title="T"
    )
    root = ElementTree.fromstring(drawn)
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 2
    with pytest.raises(ValueError, match="no rows"):
        record.chart([], "kernels", [])


def test_bench_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "CUDA GPU" in capsys.readouterr().err
