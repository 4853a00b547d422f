"""`terrella eval text-game` and `web-page`: any Hugging Face folder, or a model behind an address."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from click.testing import CliRunner

from terrella.core.errors import ConfigError
from terrella.data.convert.text_game import pair_of
from terrella.data.schema import PAIR
from terrella.data.shards import ShardWriter
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch.cli import cli
from terrella.launch.language import held_out, spread
from terrella.rl.rewards.web_page import NOTHING
from terrella.rl.text_games.crawl import GAMES, bare_prompt, crawl


@pytest.fixture
def server():
    class Empty(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            web = "CURRENT OBSERVATION" in body["messages"][0]["content"]
            text = NOTHING if web else "The final answer is: {'modified': [], 'removed': [], 'score': {}}"
            blob = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(blob)))
            self.end_headers()
            self.wfile.write(blob)

        def log_message(self, *args: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}/v1"
    found.shutdown()
    found.server_close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [row for row, _ in zip(crawl(GAMES["fill-bucket"], range(1)), range(200), strict=False)]
    with ShardWriter(folder, kind=PAIR) as writer:
        for row in rows:
            writer.write(pair_of(row, bare_prompt, "test"))
    return str(folder)


@pytest.mark.parametrize("world", ["text-game", "web-page"])
def test_a_model_behind_an_address(world: str, server: str, shards: str, tmp_path) -> None:
    out = tmp_path / "table.json"
    args = ["eval", world, "--model", "lazy", "--url", server, "--n", "24", "--temperature", "0", "--out", str(out)]
    args += ["--data", shards] if world == "text-game" else []
    done = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert done.exit_code == 0 and "no change" in done.output and "n = 24" in done.output
    base, model, ceiling = json.loads(out.read_text())["rows"]
    assert model["name"] == "lazy, greedy" and model["cells"] == base["cells"]  # it answers what the baseline does
    assert all(cell["value"] == 1.0 for cell in ceiling["cells"])


def test_fewer_questions_than_there_are_come_from_every_game() -> None:
    assert spread(range(10), 4) == [0, 2, 5, 7] and spread(range(3), 9) == [0, 1, 2]
    asked = held_out("text-game", None, 512, "bare")  # of 680, a game after the other
    assert len(asked) == 512 and {question.row["game"] for question in asked} == set(GAMES)


def test_how_long_a_served_model_stays_true(server: str, tmp_path) -> None:
    out = tmp_path / "drift.json"
    args = ["eval", "text-game", "--model", "lazy", "--url", server, "--temperature", "0", "--n", "8", "--drift", "10"]
    games = ["--game", "weigh-stones", "--game", "fill-bucket"]
    done = CliRunner().invoke(cli, [*args, *games, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "copy the start" in done.output and "n = 8" in done.output
    told = json.loads(out.read_text())
    copied, model, truth = told["rows"]
    # it changes nothing either
    assert told["columns"] == [f"k = {k}" for k in range(1, 11)] and model["cells"] == copied["cells"]
    assert copied["cells"][0]["n"] == 8 and copied["cells"][0]["value"] > copied["cells"][9]["value"]
    assert all(cell["value"] == 1.0 for cell in truth["cells"])
    with pytest.raises(ConfigError, match="--drift"):
        CliRunner().invoke(cli, [*args, "--data", str(tmp_path)], catch_exceptions=False)


def test_a_hugging_face_folder(shards: str, tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=8192, **size)).save_pretrained(tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    args = [
        "eval",
        "text-game",
        "--model",
        str(tmp_path / "m"),
        "--n",
        "3",
        "--prompt",
        "bare",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]
    done = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert done.exit_code == 0 and "3 of 3 answers unreadable" in done.output


def test_what_is_missing_or_of_another_kind_is_named(shards: str, tmp_path) -> None:
    for world, more in (("text-game", ["--data", shards]), ("SimpleSokoban", [])):
        with pytest.raises(ConfigError, match="--model"):
            CliRunner().invoke(
                cli, ["eval", world, "--model", str(tmp_path / "none"), "--n", "1", *more], catch_exceptions=False
            )
    with pytest.raises(ConfigError, match="--temperature: language models and agents are asked at one"):
        args = ["eval", "text-game", "--model", str(tmp_path), "--temperature", "0", "--temperature", "0.5"]
        CliRunner().invoke(cli, args, catch_exceptions=False)
    with pytest.raises(ConfigError, match="not of web-page"):
        CliRunner().invoke(
            cli, ["eval", "web-page", "--model", str(tmp_path), "--data", shards], catch_exceptions=False
        )
