"""A served model as an agent: a small chat server solves Sokoban through the command; a broken line is Invalid, not
a failure.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from terrella.data.trajectory import Invalid
from terrella.launch.commands.imagine import evaluate
from terrella.rl.agents.api import ApiPlayer
from terrella.rl.agents.config import AgentSettings
from terrella.rl.agents.evaluate import difference, summarise
from terrella.rl.agents.rollout import Instance, seats_of
from terrella.rl.text_games.teacher import Teacher
from terrella.rl.worlds.sokoban import ACTIONS, decode, shortest_solution
from terrella.rl.worlds.tasks import load_tasks


class Solver(BaseHTTPRequestHandler):
    """Reads the last state of the chat and answers with a shortest solution; a model named `broken` gets an error."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "broken":
            self.send_error(404)
            return
        state = body["messages"][-1]["content"].rsplit("State:\n", 1)[1].split("\nYou have")[0]
        plan = [ACTIONS[a] for a in shortest_solution(decode(state)) or ()] if body["model"] == "solver" else ["Up"]
        text = f"push </think> <answer> {' || '.join(plan[:2])} </answer>"
        reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Solver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


def test_eval_of_any_tag_behind_an_address(url: str, tmp_path) -> None:
    out = tmp_path / "table.json"
    args = ["SimpleSokoban", "--url", url, "--model", "solver", "--n", "6", "--samples", "2", "--out", str(out)]
    done = CliRunner().invoke(evaluate, args, catch_exceptions=False)
    assert done.exit_code == 0 and "random policy" in done.output and "0 invalid" in done.output
    rows = {row["kind"]: row["cells"] for row in json.loads(out.read_text())["rows"]}
    assert rows["model"][0]["value"] == rows["ceiling"][0]["value"] == 1.0 and rows["baseline"][0]["value"] < 0.6


def test_scores_are_paired_by_seed_and_a_broken_line_is_invalid(url: str) -> None:
    seats = seats_of([Instance(load_tasks()["SimpleSokoban"], seed) for seed in range(123, 128)], 2)
    played = {
        name: ApiPlayer(Teacher(url, name, tries=1), AgentSettings()).play(seats)
        for name in ("solver", "climber", "broken")
    }
    assert all(isinstance(t.reward, Invalid) for t in played["broken"]) and summarise(played["broken"]).invalid == 10
    solver, climber = summarise(played["solver"]), summarise(played["climber"])
    assert solver.passes(2).value == 1.0 and solver.wins == [(2, 2)] * 5 and solver.format_ok.value == 1.0
    assert difference(solver, climber).value == pytest.approx(1.0 - climber.passes(1).value)


def test_an_unknown_tag_and_missing_coordinates_are_named(url: str) -> None:
    done = CliRunner().invoke(evaluate, ["Nowhere", "--url", url, "--model", "x"])
    assert done.exit_code != 0 and "is no tag" in str(done.exception)
    done = CliRunner().invoke(evaluate, ["Countdown", "--url", url, "--model", "x", "--coordinates"])
    assert "no coordinates" in str(done.exception)
