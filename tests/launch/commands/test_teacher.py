"""`terrella shards teacher`: a real local server answers, right answers become lessons, nothing is asked twice."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core.errors import StorageError
from terrella.data.convert.text_game import pair_of
from terrella.data.schema import PAIR
from terrella.data.shards import ShardSet, ShardWriter
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch.cli import cli
from terrella.rl.language import Question, read_pair
from terrella.rl.text_games.crawl import GAMES, bare_prompt, crawl

THOUGHT = "The bag is heavy. "


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Question]]:
    folder = tmp_path_factory.mktemp("pairs") / "train"
    rows = list(crawl(GAMES["weigh-stones"], range(1)))[:60]
    samples = [pair_of(row, bare_prompt, "train") for row in rows]
    with ShardWriter(folder, kind=PAIR) as writer:
        for sample in samples:
            writer.write(sample)
    ByteTokenizer().save(folder.parent / "model")
    return folder, [read_pair(sample) for sample in samples]


class Teaching:
    """A server that knows the answers, but for every third question, of which one gets an error."""

    def __init__(self, questions: list[Question]) -> None:
        self.truth = {q.prompt: q.answer for q in questions}
        self.asked: list[str] = []
        self.down = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
                outer.asked.append(prompt)
                number = list(outer.truth).index(prompt)
                if outer.down or number == 3:
                    self.send_error(400)
                    return
                content = "I do not know." if number % 3 == 0 else outer.truth[prompt]
                message = {"content": content, "reasoning_content": THOUGHT * (400 if number == 4 else 1)}
                blob = json.dumps({"choices": [{"message": message}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(blob)))
                self.end_headers()
                self.wfile.write(blob)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def teaching(source: tuple[Path, list[Question]]) -> Iterator[Teaching]:
    found = Teaching(source[1])
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def ask(teaching: Teaching, source: Path, out: Path, *more: str) -> str:
    model = str(source.parent / "model")
    words = ["shards", "teacher", str(source), str(out), "--url", teaching.url, "--model", "wise", "--tokenizer", model]
    done = CliRunner().invoke(cli, [*words, *more], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_right_answers_become_lessons(source: tuple[Path, list[Question]], teaching: Teaching, tmp_path: Path) -> None:
    folder, questions = source
    out = ask(teaching, folder, tmp_path / "one", "--keep-unchanged", "0")
    found = ShardSet(tmp_path / "one")
    kept = [read_pair(found[i]) for i in range(len(found))]
    expected = [q for i, q in enumerate(questions) if q.gold and i % 3 and i != 4]
    assert [q.prompt for q in kept] == [q.prompt for q in expected] and len(kept) > 5
    assert all(q.lesson == THOUGHT + q.answer and q.judge(q.lesson, "binary", "strict")[0] == 1 for q in kept)
    assert "invalid 1" in out and f"kept {len(kept)}" in out and "asked 60" in out

    teaching.asked.clear()
    (tmp_path / "two.responses.jsonl").write_text((tmp_path / "one.responses.jsonl").read_text() + '{"id": "torn')
    ask(teaching, folder, tmp_path / "two", "--keep-unchanged", "1")
    assert set(teaching.asked) == {questions[3].prompt}  # only what failed is asked again
    assert len(ShardSet(tmp_path / "two")) > len(kept)  # with rows that do not change

    record = (tmp_path / "two.responses.jsonl").read_text()
    for damaged in (record.replace("heavy", "heaxy", 1), record.replace('"id"', '"ie"', 1), "\n" + record):
        (tmp_path / "three.responses.jsonl").write_text(damaged)
        with pytest.raises(StorageError, match=r"three\.responses\.jsonl:1: damaged .*; restore the line"):
            ask(teaching, folder, tmp_path / "three")
        assert (tmp_path / "three.responses.jsonl").read_text() == damaged


def test_a_dead_line_is_an_error(source: tuple[Path, list[Question]], teaching: Teaching, tmp_path: Path) -> None:
    teaching.down = True
    with pytest.raises(StorageError, match="not one question was answered"):
        ask(teaching, source[0], tmp_path / "none", "--n", "4")
