"""The benchmark of ragged answers: it plays all turns, on kept pages, and records what it saw."""

import sys

import pytest

from terrella.benchmarks import e2e, ragged, record
from terrella.benchmarks.rollout import TINY, Case, requests_of
from terrella.tests.parallel.pool import run_ranks


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


def test_adapters_are_merged_again_for_every_version() -> None:
    assert run_ranks("terrella.tests.benchmarks.ragged_job:merges", 1) == [[True, False, True]]


def test_lengths_with_a_long_tail_are_the_same_in_every_turn() -> None:
    case = Case(TINY, 64, 8, 16, 2048, median=300)
    first, later = case.lengths(), case.lengths(turn=7)
    assert first != later and sorted(first) == sorted(later)
    assert sorted(first)[255] <= 300 <= sorted(first)[256] and max(first) == 2048
    assert case.tokens == sum(first) == sum(r.params.max_new_tokens for r in requests_of(case, 3))
    assert Case(TINY, 4, 2, 16, 8).lengths() == [8] * 8


def test_a_step_s_rows_are_whole_microbatches() -> None:
    for case in e2e.CASES.values():
        rows, each = case.prompts * case.samples, e2e.microbatch(case)
        assert rows % each == 0 and 1 <= each <= e2e.MICROBATCH
        assert each * case.length * case.model.hidden <= e2e.MICROBATCH_TOKENS * e2e.QWEN.hidden
