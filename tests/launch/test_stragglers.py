"""Slow ranks are found during a run, named in the record, and only when they hold somebody up."""

import urllib.request
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError, TerrellaError
from terrella.core.files import write_json
from terrella.core.metrics import MetricsFile
from terrella.core.ports import free_port
from terrella.core.run import Run
from terrella.core.sinks import open_sinks
from terrella.launch import stragglers
from terrella.launch.commands.watch import queue_depths, slow_ranks, utilisation
from terrella.launch.report.load import RunData
from terrella.launch.stragglers import PROBE_EVERY, WINDOW, Lap, Pace
from terrella.launch.supervise import Span, heartbeat_file, run_workers, standing
from terrella.rl.journal import Journal


def feed(
    watch: Pace, work: list[float], probe: list[float] | None = None, times: int = WINDOW + 1
) -> list[stragglers.Slow]:
    found = []
    for _ in range(times):
        watch.laps += 1
        found += watch.judge([Lap(w, probe[i] if probe else None, f"n{i}") for i, w in enumerate(work)])
    return found


def test_a_rank_that_works_longer_is_named_once_and_forgotten_when_it_recovers() -> None:
    watch = Pace()
    (slow,) = feed(watch, [1.0, 1.0, 1.9, 1.1], times=3 * WINDOW)
    assert (slow.rank, slow.host, slow.what) == (2, "n2", "work") and slow.ratio == pytest.approx(1.9 / 1.1, abs=0.2)
    assert watch.values() == {"time/slow_rank": 2, "time/slow_rank_ratio": round(slow.ratio, 2)}
    assert not feed(watch, [1.0, 1.0, 1.0, 1.1]) and watch.values() == {}


def test_short_steps_and_the_first_step_condemn_nobody() -> None:
    assert not feed(Pace(), [0.01, 0.05, 0.01])
    watch = Pace()
    watch.laps = 1
    assert not watch.judge([Lap(90.0, None, "n0"), Lap(1.0, None, "n1")]) and not watch.window


def test_of_two_ranks_the_slower_one_is_named_and_a_slow_device_by_its_product() -> None:
    assert [s.rank for s in feed(Pace(), [1.0, 2.0])] == [1]
    (slow,) = feed(Pace(), [1.0, 1.0, 1.0], probe=[0.004, 0.009, 0.004], times=1)
    assert (slow.rank, slow.what) == (1, "arithmetic")


def test_waiting_is_not_work_and_the_probe_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 1000, 10))
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: float(next(clock)))
    watch = Pace(begun=0.0)
    watch.waited = 70.0
    assert watch.lap().work_s == 30.0
    watch.laps = PROBE_EVERY - 1
    assert watch.lap().probe_s is not None and watch.lap().probe_s is None


def test_values_of_the_moment_go_into_every_row(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", extra=lambda: {"time/slow_rank": 3})
    metrics.append("a", 1, {"loss": 1.0})
    assert list(metrics.rows()) == [{"stage": "a", "step": 1, "loss": 1.0, "time/slow_rank": 3}]


def test_watch_reads_slow_ranks_and_queues(tmp_path: Path) -> None:
    assert slow_ranks(tmp_path) == [] and queue_depths(tmp_path / "journal") == {}
    (tmp_path / "logs").mkdir()
    write_json(
        tmp_path / stragglers.SLOW, {"time": 0.0, "ranks": [{"rank": 5, "host": "n3", "ratio": 1.84, "what": "work"}]}
    )
    assert slow_ranks(tmp_path) == ["rank 5 on n3: work takes 1.8 x as long as on the median rank"]
    journal = Journal(tmp_path / "journal")
    journal.note("issued", 0, [0, 1, 2])
    journal.note("trained", 0, [0])
    assert queue_depths(tmp_path / "journal") == {"prompts open": 2, "continuations done": 0}


def test_watch_knows_the_utilisation_of_known_gpus(tmp_path: Path) -> None:
    model = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256}
    run = RunData(tmp_path, "x", config={"model": model, "ranks": 8})
    assert utilisation(run, 1000.0) is None
    run.environment = {"hardware": {"gpus": ["NVIDIA H100 80GB HBM3"]}}
    assert utilisation(run, 80_000.0) == pytest.approx(6 * 7.5e9 * 10_000 / 989e12, rel=0.02)
    run.environment = {"hardware": {"gpus": []}}
    assert utilisation(run, 1000.0) is None


def test_the_watchdog_says_where_ranks_stand_only_when_none_moves(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert standing(tmp_path, range(2), 1000.0) is None  # no sign of life yet
    for rank, (at, since) in enumerate(
        [("loop.py:gather:9", 100.0), ("loop.py:gather:9", 100.0), ("episodes.py:play:40", 650.0)]
    ):
        write_json(
            tmp_path / "logs" / f"rank-{rank}.alive.json",
            {"at": at, "since": since, "time": 990.0, "host": "n", "pid": 1},
        )
    assert standing(tmp_path, range(3), 700.0) is None
    told = standing(tmp_path, range(3), 1000.0)
    assert told == "no rank here has moved for 5 minutes: ranks 0, 1 at loop.py:gather:9; rank 2 at episodes.py:play:40"


def test_the_beat_of_an_earlier_start_is_no_sign_of_a_stall(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    beat = heartbeat_file(tmp_path, 0)
    write_json(beat, {"at": "loop.py:gather:9", "since": 100.0, "time": 110.0, "host": "n", "pid": 1})
    with pytest.raises(TerrellaError):  # there is no run here: the worker ends before it beats
        run_workers(Run(tmp_path, "token"), Span(0, 1, 1, "127.0.0.1", free_port()))
    assert not beat.exists()


def test_prometheus_serves_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRELLA_PROMETHEUS", "127.0.0.1:0")
    (sink,) = open_sinks(["prometheus"], tmp_path, 'a "run"')
    metrics = MetricsFile(tmp_path / "metrics.jsonl", sinks=[sink])
    metrics.append("rlvr", 3, {"reward/mean": 0.25, "note": "x"})
    metrics.append("rlvr", 4, {"reward/mean": 0.5, "time/slow_rank": 2})
    port = sink.web.server_address[1]  # type: ignore[attr-defined]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    labels = '{run="a \\"run\\"",stage="rlvr"}'
    assert f"# TYPE terrella_reward_mean gauge\nterrella_reward_mean{labels} 0.5\n" in text
    assert (
        f"terrella_step{labels} 4.0" in text and f"terrella_time_slow_rank{labels} 2.0" in text and "note" not in text
    )
    for taken in (port, 99_999):
        monkeypatch.setenv("TERRELLA_PROMETHEUS", f"127.0.0.1:{taken}")
        with pytest.raises(ConfigError, match=f"cannot listen at '127.0.0.1:{taken}'"):
            open_sinks(["prometheus"], tmp_path, "second")
