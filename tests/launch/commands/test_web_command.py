"""`terrella web`: the release's scripts on its files, with a real (tiny) model where one is asked."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from terrella.core.errors import ConfigError
from terrella.data.convert.webrl import trajectory_steps
from terrella.data.tokenizers import PieceTokenizer
from terrella.launch.commands.web import web
from terrella.rl.webrl import release
from terrella.rl.webrl.scorer import FolderScorer

FIELDS = {"observation", "next_observation", "task", "action", "reward", "done", "trajectory_reward", "mc_return"}


def run(*arguments: str) -> str:
    done = CliRunner().invoke(web, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def trace(task_id: str, intent: str, steps: int = 2) -> list[dict[str, Any]]:
    """The records of an episode as the release's runner leaves them."""
    rounds = [(f"<p> {intent} {i} </p>", f'do(action="Click", element="{i}")') for i in range(steps)]
    return [
        {"trace_id": task_id, "index": i, "prompt": "", "html": page, "response": said, "target": intent}
        for i, (page, said) in enumerate([*rounds, ("<p> end </p>", "")])
    ]


@pytest.fixture()
def result(tmp_path: Path) -> Path:
    root = tmp_path / "result"
    for name in ("traces", "actions"):
        (root / name).mkdir(parents=True)
    for rows, score in ((trace("1", "find it"), 1.0), (trace("2", "buy it", 3), 0.0), (trace("3", "sell it"), -0.1)):
        release.write_lines(root / "traces" / f"{rows[0]['trace_id']}.jsonl", rows)
        told = {"task_id": rows[0]["trace_id"], "score": score, "actions": [row["response"] for row in rows]}
        (root / "actions" / f"{rows[0]['trace_id']}.json").write_text(json.dumps(told))
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    tokenizer = PieceTokenizer(["YES", "NO", "\n", "’", *map(chr, range(32, 127))])
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=4096, initializer_range=0.5, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def test_stage_one_has_the_releases_fields(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "phase1.jsonl"
    told = run("process-data", "--stage", "1", "--rollout_path", str(result), "--output_path", str(out))
    assert "2 trajectories, 1 of them successes, 5 steps" in told and "unfinished" in told
    first, second = release.read_experience(out)
    assert set(first[0]) >= FIELDS and [s["done"] for s in first] == [False, True]
    assert [s["trajectory_reward"] for s in second] == [0, 0, 0] and first[0]["reward"] == 1.0
    fixed = release.read_lines(result / "fixed_traces" / "1.jsonl")
    assert [(s["fixed_response"], s["score"]) for s in fixed] == [(s["response"], 1.0) for s in fixed] and len(
        fixed
    ) == 2


def test_rewards_and_replay_come_from_models(result: Path, tmp_path: Path, model: Path) -> None:
    out, earlier = tmp_path / "phase2.jsonl", tmp_path / "phase1.pt"
    old = [trajectory_steps([dict(r) for r in trace(str(i), f"old {i}")[:2]], 1.0) for i in range(3)]
    torch.save(old, earlier)
    arguments = ("--rollout-path", str(result), "--add-reward", "--orm-path", str(model), "--actor-path", str(model))
    told = run("process-data", *arguments, "--experience-paths", str(earlier), "--output-path", str(out))
    assert "5 steps" in told
    scorer = FolderScorer(model)
    rollouts = release.read_rollouts(result).rollouts
    want = [float(scorer.yes(r.intent, [s["response"] for s in r.steps], r.steps[-1]["html"]) >= 0.5) for r in rollouts]
    assert [t[0]["reward"] for t in release.read_experience(out)] == want
    chosen = release.read_lines(tmp_path / "phase2_filter.jsonl")
    fits = [s for t in old for s in t if 0.5 < scorer.probability(s["observation"], s["action"]) <= 0.95]
    assert len(chosen) == 5 + min(len(fits), 10) and all("mc_return" in s for s in chosen)


def test_log_probs_are_those_of_the_model(model: Path) -> None:
    scorer = FolderScorer(model)
    begin = [] if scorer.tokenizer.bos_id is None else [scorer.tokenizer.bos_id]
    prompt, action = [*begin, *scorer.tokenizer.encode("where is it")], scorer.tokenizer.encode("here")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        table = theirs(torch.tensor([[*prompt, *action]])).logits[0].log_softmax(-1)
    want = [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(action)]
    assert scorer.logprobs(prompt, action) == pytest.approx(want, abs=1e-4)
    assert scorer.probability("where is it", "here") == pytest.approx(math.exp(sum(want) / len(want)), rel=1e-3)
    for wrong in ([], [5] * scorer.limit):
        with pytest.raises(ConfigError, match=rf"an action has {len(wrong)} tokens, not 1 to {scorer.limit - 1}"):
            scorer.logprobs(prompt, wrong)


def test_replay_keeps_the_band(result: Path) -> None:
    new = release.stage_one(release.read_rollouts(result).rollouts)
    old = [trajectory_steps([dict(r) for r in trace("9", "old", 4)[:4]], 1.0)]
    p = iter([0.5, 0.6, 0.95, 0.96])
    chosen = release.stage_two(old, new, lambda s: next(p), 0)
    assert sorted(s["rank_score"] for s in chosen if "rank_score" in s) == [0.6, 0.95] and len(chosen) == 7


class Writer(BaseHTTPRequestHandler):
    turns = 0

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        Writer.turns += "more tasks" in asked
        text = f"- `Find pub {Writer.turns}`\n- `Book a flight`\n- `old`"
        if "Can this task" in asked:
            text = "[NO]" if "`Book a flight`" in asked else "[YES]"
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_gen_task(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Writer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failed, out = tmp_path / "failed.jsonl", tmp_path / "tasks.jsonl"
    release.write_lines(failed, [{"task": "old", "web": "map"}])
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        told = run("gen-task", str(failed), str(out), "--url", url, "--model", "m", "--count", "4")
    finally:
        server.shutdown()
    assert "written 12" in told and "not feasible 1" in told and "kept 4" in told  # asked until four had survived
    assert release.read_lines(out) == [{"task": f"Find pub {n}", "web": "map"} for n in (1, 2, 3, 4)]
    with pytest.raises(ConfigError, match="web"):
        release.generate_tasks([{"task": "x", "web": "nowhere"}], None, 1, 0, False)  # type: ignore[arg-type]


def tasks(tmp_path: Path) -> Path:
    raw = tmp_path / "test.raw.json"
    rows = [
        {"task_id": i, "old_task_id": 100 + i, "sites": sites, "start_url": "__REDDIT__/f/x"}
        for i, sites in ((1, ["reddit"]), (2, ["map", "reddit"]), (3, ["reddit"]))
    ]
    raw.write_text(json.dumps(rows))
    return raw


def test_generate_test_data(tmp_path: Path, monkeypatch) -> None:
    raw = tasks(tmp_path)
    monkeypatch.delenv("REDDIT", raising=False)
    with pytest.raises(ConfigError, match="REDDIT"):
        release.expand_tasks(raw, {})
    monkeypatch.setenv("REDDIT", "http://host:9999/")
    run("generate-test-data", str(raw), "--out", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "test.json").read_text())[0]["start_url"] == "http://host:9999/f/x"
    assert json.loads((tmp_path / "out" / "test" / "2.json").read_text())["task_id"] == 3


def test_scores_by_site(result: Path, tmp_path: Path) -> None:
    raw = tasks(tmp_path)
    told = json.loads(run("score", str(result), str(raw), "--json"))
    rows = {r["sites"]: (r["finished"]["n"], r["overall"]["n"], r["overall"]["value"]) for r in told["rows"]}
    assert rows == {"map, reddit": (1, 1, 0.0), "reddit": (1, 2, 0.5), "all": (2, 3, pytest.approx(1 / 3))}
    assert told["solved"] == [101] and "33.3 %" in run("score", str(result), str(raw))


def test_a_task_without_a_result_is_not_given_that_of_another(tmp_path: Path) -> None:
    actions = tmp_path / "actions"
    actions.mkdir()
    for name in ("1", "2"):
        (actions / f"{name}.json").write_text(json.dumps({"score": 1.0}))
    (_, everything), solved = release.score_table(tmp_path, [{"task_id": i, "sites": ["map"]} for i in (1, 2, 3)])
    assert (everything.finished.n, everything.overall.n, solved) == (2, 3, [1, 2])
    (_, everything), solved = release.score_table(tmp_path, [{"task_id": i, "sites": ["map"]} for i in (7, 8, 9)])
    assert (everything.finished.n, solved) == (2, [8, 9])  # files that are named by the place in the list


def test_mistakes_are_named(result: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("--rollout-path", str(result), "--output-path", "x.pt"), "jsonl"),
        (("--output-path", "x.jsonl"), "--rollout-path"),
        (("--add-reward", "--output-path", "x.jsonl"), "--orm-path"),
        (("--rollout-path", str(tmp_path / "no"), "--output-path", "x.jsonl"), "traces/"),
    ):
        with pytest.raises(ConfigError, match=words):
            CliRunner().invoke(web, ("process-data", *arguments), catch_exceptions=False)
    (result / "actions" / "1.json").write_text('{"score": "1"}')
    for text, words in (
        ("x", "tasks.json: cannot be read as JSON"),
        ("{}", "expected a list of tasks"),
        ('[{"task_id": 1}]', r"tasks.json\[0\]: a task is a record with task_id and sites"),
        ('[{"task_id": 1, "sites": ["reddit"]}]', "1.json: no score"),
    ):
        (tmp_path / "tasks.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            CliRunner().invoke(web, ("score", str(result), str(tmp_path / "tasks.json")), catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"1.json: no score"):
        release.read_rollouts(result)
