"""The report file: what it holds, what it refuses to hide, and how it treats text that nobody may trust."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError, StorageError
from terrella.launch.report import SIZE_LIMIT, build_report, flatten, last_steps, training_seconds
from terrella.launch.report.curves import axis, build_panels, linear_ticks, thin
from terrella.launch.report.frames import before_and_after
from terrella.launch.report.health import REMEDIES, Finding, check_metrics, check_tables
from terrella.launch.report.load import load_run, read_metrics
from terrella.launch.report.rollouts import find_grid
from terrella.launch.report.tables import build_tables
from terrella.rl.statistics import mean_share
from terrella.tests.launch.report.synthetic_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", pretrain=80, grpo=40)


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def test_report_of_a_finished_run_holds_every_part(run):
    path = build_report(run)
    page = path.read_text(encoding="utf-8")
    assert path == run / "report.html"
    summary = json.loads((run / "summary.json").read_text())
    assert f">{summary['headline']}</h1>" in page
    table = json.loads((run / "results" / "final.json").read_text())
    for row in table["rows"]:
        assert row["name"] in page
        for cell in row["cells"]:
            assert f"{100 * cell['value']:.1f} %" in page
            assert f"{100 * cell['low']:.1f} – {100 * cell['high']:.1f}" in page
    for title in (
        "Reward",
        "Accuracy",
        "Loss",
        "KL",
        "Entropy",
        "Clip fraction",
        "Log-prob drift",
        "Tokens per second",
    ):
        assert f"<h3>{title}</h3>" in page
    data = embedded(page)
    assert {item["stage"] for item in data["rollouts"]} == {"grpo"}
    assert "seed: 0" in page and "megatron-core" in page and "max_logit_difference" in page and "40 digests" in page


def test_report_asks_nothing_of_the_network(run):
    page = build_report(run).read_text(encoding="utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", page))
    assert addresses <= {"http://www.w3.org"}  # the SVG name space, which nobody fetches
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", page)


def test_untrusted_text_cannot_become_markup(tmp_path):
    run = make_run(tmp_path / "evil", pretrain=3, grpo=3)
    attack = "</script><img src=x onerror=alert(1)>\u2028<!--"
    record = {
        "prompt_id": attack,
        "sample": 0,
        "reward": 1.0,
        "invalid": None,
        "turns": [{"prompt": attack, "action": attack, "prediction": attack, "truth": "x"}],
        attack: 1,
    }
    (run / "rollouts" / "grpo-3.jsonl").write_text(json.dumps(record) + "\n")
    (run / "config.yaml").write_text(f"name: '{attack}'\n", encoding="utf-8")
    (run / "summary.json").write_text(json.dumps({"headline": attack, "paragraphs": [attack]}))
    page = build_report(run).read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert [item for item in embedded(page)["rollouts"] if item["prompt"] == attack]


def test_half_finished_run_is_reported_as_such(tmp_path):
    run = make_run(tmp_path / "half", pretrain=10, grpo=6, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "step": 7, "rew')  # killed while writing
    page = build_report(run).read_text(encoding="utf-8")
    assert "no final result yet" in page
    assert "In grpo the mean reward went from" in page
    assert "results/ (no evaluation table)" in page
    assert "not JSON" not in page


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_one_file_alone_is_enough(tmp_path, name):
    (tmp_path / name).write_text("")
    assert "This run has not recorded a step yet." in build_report(tmp_path).read_text(encoding="utf-8")


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        build_report(tmp_path)
    with pytest.raises(ConfigError, match="no such run directory"):
        build_report(tmp_path / "absent")
    with pytest.raises(ConfigError, match="at least one"):
        build_report([])


def test_unwritable_target_names_the_file(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file: "):
        build_report(run, tmp_path / "file" / "report.html")


def test_runs_are_compared_and_their_differences_listed(run, tmp_path):
    other = make_run(tmp_path / "tiny", seed=3, pretrain=20, grpo=10)
    with pytest.raises(ConfigError, match="--out"):
        build_report([run, other])
    path = build_report([run, other], tmp_path / "both.html")
    page = path.read_text(encoding="utf-8")
    data = embedded(page)
    assert len(set(data["runs"])) == 2 and all(name.endswith("/tiny") for name in data["runs"])
    assert {item["run"] for item in data["rollouts"]} == {0, 1}
    assert "Settings that differ" in page and re.search(r'<th scope="row">seed</th><td>0</td><td>3</td>', page)


def test_big_run_stays_under_the_limit(tmp_path):
    run = make_run(tmp_path / "big", pretrain=6_000, grpo=60, prompts=16, samples=8)
    long = "word " * 4_000
    turns = [{"prompt": long, "action": "go", "prediction": long, "truth": long, "exact": True}] * 30
    for step in range(1000, 1020):
        lines = [
            json.dumps({"prompt_id": i, "sample": 0, "reward": 1, "invalid": None, "turns": turns}) for i in range(2)
        ]
        (run / "rollouts" / f"eval-{step}.jsonl").write_text("\n".join(lines) + "\n")
    path = build_report(run)
    assert path.stat().st_size < SIZE_LIMIT
    assert embedded(path.read_text(encoding="utf-8"))["rollouts"]


def test_non_finite_numbers_are_named_not_drawn(tmp_path):
    run = make_run(tmp_path / "nan", pretrain=5, grpo=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "step": 6, "loss": NaN, "kl": "inf", "reward/mean": 0.5}\n')
    page = build_report(run).read_text(encoding="utf-8")
    assert "grpo: loss is not a finite number at step 6" in page
    assert "grpo: kl is not a finite number at step 6" in page
    for chart in embedded(page)["panels"]:
        for line in chart["series"]:
            assert all(math.isfinite(value) for part in line["parts"] for value in part["values"])


def test_resumed_steps_keep_the_last_record_and_merge_evaluations(tmp_path):
    lines = [
        {"stage": "a", "step": 1, "loss": 3.0},
        {"stage": "a", "step": 2, "loss": 2.0},
        {"stage": "a", "step": 1, "loss": 1.0},
        {"stage": "a", "step": 2, "accuracy": 0.5},
        {"loss": 9.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n[1]\n")
    problems: list[str] = []
    assert read_metrics(tmp_path / "metrics.jsonl", problems) == [
        {"stage": "a", "step": 1, "loss": 1.0},
        {"stage": "a", "step": 2, "loss": 2.0, "accuracy": 0.5},
    ]
    assert len(problems) == 3 and any("line 6" in problem for problem in problems)


def test_torn_parts_are_said_aloud(tmp_path):
    run = make_run(tmp_path / "torn", pretrain=3, grpo=3)
    (run / "results" / "bad.json").write_text(
        json.dumps({"title": "t", "columns": ["a", "b"], "rows": [{"name": "x", "cells": [1]}]})
    )
    (run / "results" / "worse.json").write_text("{")
    (run / "rollouts" / "stray.jsonl").write_text("")
    (run / "environment.json").write_text("[]")
    problems = " ".join(load_run(run).problems)
    for part in ("bad.json", "worse.json", "stray.jsonl", "environment.json"):
        assert part in problems


def test_table_without_baseline_or_interval_is_flagged():
    cells = [{"value": 0.4, "low": 0.3, "high": 0.5, "n": 10}]
    whole = {
        "title": "t",
        "columns": ["a"],
        "rows": [{"kind": "model", "cells": cells}, {"kind": "baseline", "cells": cells}],
    }
    assert check_tables([whole]) == []
    levels = [
        finding.level
        for finding in check_tables(
            [{"title": "t", "columns": ["a"], "rows": [{"kind": "model", "cells": [{"value": 0.4}]}]}]
        )
    ]
    assert levels == ["warning", "note"]


def test_model_below_the_baseline_is_flagged():
    def table(model: float, baseline: float) -> dict:
        cells = {
            kind: [{"value": value, "low": value, "high": value, "n": 9}]
            for kind, value in (("model", model), ("baseline", baseline))
        }
        return {
            "title": "t",
            "columns": ["exact"],
            "rows": [{"name": kind, "kind": kind, "cells": cells[kind]} for kind in cells],
        }

    assert check_tables([table(0.6, 0.5), table(0.5, 0.5), table(12.0, 23.0)]) == []
    assert "model in “exact” (20.0 % against 50.0 %)" in check_tables([table(0.2, 0.5)])[0].text


def test_model_without_a_valid_result_is_flagged():
    def table(*sizes: int, **more: str) -> dict:
        cells = [{"value": "nan" if n == 0 else 0.5, "low": "nan", "high": "nan", "n": n} for n in sizes]
        full = [{"value": 0.5, "low": 0.4, "high": 0.6, "n": 9}] * len(sizes)
        rows = [{"name": "tuned", "kind": "model", "cells": cells}, {"name": "b", "kind": "baseline", "cells": full}]
        return {"title": "t", "columns": ["x"] * len(sizes), "rows": rows, **more}

    assert check_tables([table(9), table(0, 9)]) == []
    (finding,) = check_tables([table(0, 0, invalid="4 results were invalid")])
    assert finding == Finding("warning", "“t”: no valid result of tuned; 4 results were invalid")


def test_learning_signs_are_noticed():
    metrics = [
        {
            "stage": "grpo",
            "step": step,
            "reward/std": 0.0,
            "entropy": 1.0 / (1 + 3 * step),
            "clip_fraction": 0.9,
            "logprob_drift/mean": 0.2,
            "alarm/stall": int(step == 3),
            "invalid": 2 * step,
        }
        for step in range(6)
    ]
    found = check_metrics(metrics, {"grpo": 100})
    text = " ".join(finding.text for finding in found)
    for sign in (
        "no spread",
        "clipped",
        "disagree",
        "alarm “stall” at step 3",
        "30 rollouts, up to 10.0 % of a step’s, left out of the statistics; report.html says why",
    ):
        assert sign in text
    (many,) = (finding for finding in found if "rollouts" in finding.text)
    (few,) = (finding for finding in check_metrics(metrics, {"grpo": 1000}) if "rollouts" in finding.text)
    assert (many.level, few.level) == ("warning", "note")
    idle = [
        {"stage": "grpo", "step": step, "reward/std": 0.3, "entropy": float(step < 2), "trained_share": float(step < 2)}
        for step in range(8)
    ]
    (found,) = check_metrics(idle)
    assert "no group had a reward difference in the last 5 steps, nothing was trained; " in found.text
    healthy = [
        {
            "stage": "grpo",
            "step": step,
            "reward/std": 0.2,
            "entropy": 1.0,
            "clip_fraction": 0.02,
            "logprob_drift/mean": 1e-6,
            "skipped": 0,
        }
        for step in range(6)
    ]
    assert check_metrics(healthy) == []


def test_scores_above_one_are_not_called_percentages(run):
    loaded = load_run(run)
    loaded.results = [
        {
            "title": "PSNR",
            "columns": ["dB"],
            "rows": [
                {"name": "copy", "kind": "baseline", "cells": [{"value": 23.1}]},
                {"name": "m", "kind": "model", "cells": [{"value": None}]},
            ],
            "note": None,
        }
    ]
    rows = build_tables([loaded])[0].bodies[0][1]
    assert [row.cells[0].text for row in rows] == ["23.1", "–"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(10, 100))
def test_thinning_keeps_ends_order_and_extremes(values, limit):
    points = list(enumerate(values))
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 2)
    assert kept == sorted(set(kept)) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {max(values), min(values)} <= {value for _, value in kept}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=30), st.booleans())
def test_axis_covers_the_values(values, may_log):
    low, high, log, ticks = axis(values, may_log)
    assert low < high and low <= min(values) and max(values) <= high
    assert all(low <= tick <= high for tick in ticks) and len(ticks) <= 8
    assert not log or low > 0


def test_ticks_are_round():
    assert linear_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_failed_export_proof_is_an_error(tmp_path):
    run = make_run(tmp_path / "bad", pretrain=3, grpo=3)
    assert "exported model" not in build_report(run).read_text(encoding="utf-8")
    proof = json.loads((run / "export" / "export_proof.json").read_text())
    (run / "export" / "export_proof.json").write_text(
        json.dumps({**proof, "max_logit_difference": 2 * proof["tolerance"]})
    )
    assert re.search(
        r'<li class="error">.*exported model’s logits differ', build_report(run).read_text(encoding="utf-8")
    )


def test_sparse_records_count_for_the_steps_between(tmp_path):
    records = [
        {"stage": "a", "step": 10, "time/step_s": 2.0},
        {"stage": "a", "step": 20, "time/step_s": 4.0},
        {"stage": "b", "step": 1, "time/step_s": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = load_run(tmp_path)
    assert training_seconds(run) == 10 * 2.0 + 10 * 4.0 + 3.0
    assert last_steps(run) == {"a": 20, "b": 1}


def test_policy_loss_and_cross_entropy_do_not_share_an_axis(run):
    main, other = build_panels([load_run(run)])
    stages = {panel.title: [band.stage for band in panel.bands] for panel in main}
    assert stages["Loss"] == ["pretrain", "control"] and stages["Policy loss"] == ["grpo"]
    drawn = {line.label for panel in main + other for line in panel.series}
    recorded = {name for record in load_run(run).metrics for name in record} - {"stage", "step"}
    assert drawn == recorded


def test_state_before_is_found_in_the_prompt():
    assert find_grid("state\n##\n#P\naction Up\nnext\n", "##\n##") == "##\n#P"
    assert find_grid("nothing here", "##\n##") is None
    assert find_grid("a\nb", "one line") is None


def test_flatten_keeps_every_leaf():
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}]}) == {"a.b": "1", "a.c": "1, 2", "d[0].e": ""}


def rl_stage(rewards: list[float], **more) -> list[dict]:
    fixed = {"stage": "rl", "grad_norm": 0.2, "reward/std": 0.3}
    return [
        {**fixed, "step": step, "reward/mean": reward, **{k: v[step] for k, v in more.items()}}
        for step, reward in enumerate(rewards)
    ]


def test_a_stage_that_learnt_nothing_says_so_with_a_remedy():
    wave = [0.01 * (-1) ** step for step in range(40)]
    flat = rl_stage([0.3 + noise for noise in wave])
    (found,) = check_metrics(flat)
    assert "nothing was learnt that shows: mean reward 0.3 in the first tenth" in found.text and "--steps" in found.text
    dead = rl_stage([0.3] * 40, grad_norm=[0.0] * 40)
    assert "nothing was learnt: the gradient was 0 in all 40" in check_metrics(dead)[0].text
    short = rl_stage([0.3], grad_norm=[0.0])
    assert "nothing was learnt: the gradient was 0 in the one recorded step" in check_metrics(short, ended=True)[0].text
    assert check_metrics(short) == []  # the next step may have one
    assert check_metrics(rl_stage([0.3 + 0.01 * step + noise for step, noise in enumerate(wave)])) == []


def test_certainty_is_an_alarm_only_where_the_reward_does_not_rise():
    entropy, alarm = [1.0 / (1 + step) for step in range(40)], [float(step > 30) for step in range(40)]
    more = {"entropy": entropy, "alarm/entropy": alarm}
    assert check_metrics(rl_stage([0.1 + 0.02 * step + 0.01 * (-1) ** step for step in range(40)], **more)) == []
    falling = " ".join(
        f.text for f in check_metrics(rl_stage([0.9 - 0.02 * step + 0.01 * (-1) ** step for step in range(40)], **more))
    )
    assert "entropy fell" in falling and "alarm “entropy”" in falling and "raise temperature" in falling
    imitation = [{"stage": "pretrain", "step": step, "loss": 0.1, "entropy": entropy[step]} for step in range(40)]
    assert check_metrics(imitation) == []  # a world model of a deterministic world should become certain


def test_every_warning_names_what_to_do(run):
    metrics = rl_stage(
        [0.3] * 30, skipped=[1.0] * 30, clip_fraction=[0.9] * 30, **{f"alarm/{name}": [1.0] * 30 for name in REMEDIES}
    )
    metrics += [{"stage": "rl", "step": 31, "loss": "nan", "logprob_drift/mean": 0.3}]
    for finding in check_metrics(metrics):
        assert ";" in finding.text, finding.text


def test_a_score_at_the_baseline_by_chance_is_no_alarm():
    def table(high: float) -> dict:
        cells = {"baseline": [{"value": 0.12}], "model": [{"value": 0.11, "low": 0.09, "high": high}]}
        return {
            "title": "t",
            "columns": ["Pass@1"],
            "rows": [{"name": k, "kind": k, "cells": c} for k, c in cells.items()],
        }

    assert not any("below" in f.text for f in check_tables([table(0.13)]))
    assert any("below" in f.text for f in check_tables([table(0.115)]))


def test_charts_that_say_nothing_are_folded_and_held_out_scores_are_not(run):
    told = load_run(run)
    for record in told.metrics:
        if record["stage"] == "grpo":
            record |= {"loss": 1e-8, "clip_fraction": 0.0, "logprob_drift/mean": 6e-8, "validation/pass@1": 0.5}
    main, other = build_panels([told])
    titles = [panel.title for panel in main]
    assert "Held-out" in titles and not {"Policy loss", "Clip fraction", "Log-prob drift"} & set(titles)
    assert {"Policy loss", "Clip fraction", "Log-prob drift"} <= {panel.title for panel in other}


def test_a_finished_run_without_a_summary_is_called_finished(tmp_path):
    run = make_run(tmp_path / "done", pretrain=10, grpo=6)
    (run / "summary.json").unlink()
    assert "no final result yet" in build_report(run).read_text(encoding="utf-8")
    (run / "stages").mkdir(exist_ok=True)
    for name in ("pretrain", "grpo", "control"):
        (run / "stages" / f"{name}.json").write_text("{}")
    page = build_report(run).read_text(encoding="utf-8")
    assert "no final result yet" not in page and "done: finished" in page


def test_settings_that_differ_are_named_by_stage(tmp_path):
    runs = [make_run(tmp_path / f"run{i}", seed=i, pretrain=10, grpo=6 + i) for i in (0, 1)]
    assert "stages.grpo.steps" in build_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")


ROOM = "####\n#PX#\n#_O#\n####"


def agent_record(prompt: int, solved: bool, **turn) -> dict:
    turn = {
        "context": "the whole prompt",
        "action": "Down",
        "boards": [ROOM, ROOM.replace("X", "_").replace("O", "√")],
        **turn,
    }
    return {"step": 0, "prompt_id": prompt, "sample": 0, "reward": float(solved), "solved": solved, "turns": [turn]}


def test_the_first_frame_is_one_room_before_and_after(tmp_path):
    run = make_run(tmp_path / "run", pretrain=10, grpo=6)
    pair = [{"name": "before RL", "rollouts": "eval-a"}, {"name": "after", "rollouts": "eval-b"}]
    for stem, wins in (("eval-a", (True, False)), ("eval-b", (True, True))):
        lines = [json.dumps(agent_record(i, won, answer="x")) for i, won in enumerate(wins)]
        (run / "rollouts" / f"{stem}-000000.jsonl").write_text("\n".join(lines) + "\n{torn")
    (run / "summary.json").write_text(json.dumps({"headline": "h", "paragraphs": [], "compare": pair}))
    left, right = before_and_after(load_run(run))
    # the room that differs
    assert (left.name, left.outcome, right.name, right.outcome) == ("before RL", "not solved", "after", "solved")
    assert [frame.label for frame in left.frames] == ["start", "Down"] and left.frames[
        1
    ].spoken == "#### / #P_# / #_√# / ####"
    page = build_report(run).read_text(encoding="utf-8")
    assert page.index('class="sides"') < page.index('id="result"') and page.count('class="room"') == 4
    (run / "summary.json").write_text(json.dumps({"headline": "h", "paragraphs": [], "compare": [{"name": 1}, None]}))
    assert before_and_after(load_run(run)) == []
    (run / "summary.json").write_text(json.dumps({"headline": "h", "paragraphs": [], "compare": pair}))
    for odd in ({"turns": ["no turn"]}, {"turns": [{"boards": [ROOM]}]}, {"turns": [{"boards": ROOM}]}):
        (run / "rollouts" / "eval-b-000000.jsonl").write_text(json.dumps(agent_record(0, True) | odd) + "\n")
        assert before_and_after(load_run(run)) == []  # and the report is written all the same
        build_report(run)


def test_rewards_are_numbers_with_a_baseline_and_no_shares(tmp_path):
    """Whether they lie between 0 and 1 or beyond."""

    def cell(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 20}

    run = make_run(tmp_path / "run", pretrain=10, grpo=6)
    rows = [
        {"name": "a", "kind": "baseline", "cells": [cell(0.5)]},
        {"name": "b", "kind": "model", "cells": [cell(-3)]},
    ]
    table = {"title": "Tasks: mean reward", "unit": "reward", "columns": ["greedy"], "rows": rows}
    (run / "results" / "reward.json").write_text(json.dumps(table))
    loaded = load_run(run)
    (shown,) = [table for table in build_tables([loaded]) if table.title == "Tasks: mean reward"]
    assert [row.cells[0].text for row in shown.bodies[0][1]] == ["0.5", "-3"]
    assert any("b in “greedy” (-3 against 0.5)" in finding.text for finding in check_tables(loaded.results))


def test_shares_keep_their_interval_inside_0_and_1():
    few = mean_share([1.0] * 9 + [0.5])
    assert few.low < few.value < few.high == 1.0 and mean_share([0.0, 0.0, 0.1]).low == 0.0
