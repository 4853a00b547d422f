"""The benchmark of ragged answers: it plays all turns, on kept pages, and records what it saw."""

import sys

import pytest

from terrella.benchmarks import ragged, record


def test_many_turns_are_played_on_kept_pages(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "results.csv"
    name = next(n for n in ragged.CASES if n.startswith("tiny"))
    monkeypatch.setattr(sys, "argv", ["ragged", "--case", name, "--out", str(out)])
    ragged.main()
    line = capsys.readouterr().out
    figures = {row.metric: row.value for row in record.read(out)}
    tokens = int(line.split(": ")[1].split()[0].replace(",", ""))
    assert figures["speed"] == pytest.approx(tokens / figures["generation"], rel=1e-3)
    turns = ragged.CASES[name].turns
    assert tokens > turns * ragged.CASES[name].prompts * ragged.CASES[name].samples
    assert float(line.split("time/prompt_reuse': ")[1].split(",")[0]) > 0.6
