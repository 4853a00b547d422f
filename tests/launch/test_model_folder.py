"""`model: {folder: PATH}`: the sizes come from config.json, a hub id gets its commit, and a start needs no folder of its own."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from terrella.core import schema
from terrella.core.errors import ConfigError
from terrella.launch import recipe as recipes
from terrella.models.config import ModelConfig
from terrella.models.families import write_hf_config

SIZES = ModelConfig(family="qwen2", layers=3, hidden=48, heads=4, kv_heads=2, head_dim=12, ffn=96, vocab=300, qkv_bias=True, norm_eps=1e-5)
RECIPE = """name: own
world: language
model: {folder: tiny, max_positions: 512}
stages:
- {kind: language-start, name: start}
- {kind: export, name: export, model: start}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(write_hf_config(SIZES, "float32")))
    (tmp_path / "own.yaml").write_text(RECIPE)
    return tmp_path


def test_sizes_come_from_the_folder(place: Path) -> None:
    made = recipes.load("own.yaml")
    assert (made.model.folder, made.model.max_positions) == ("tiny", 512)  # what the recipe says itself stays
    assert schema.to_plain(made.model.sizes) == {**schema.to_plain(SIZES), "max_positions": 512}
    assert type(made.model.sizes) is ModelConfig and made.stages[0].folder == "tiny"
    (place / "resolved.yaml").write_text(schema.dump(made))
    (place / "tiny" / "config.json").unlink()  # the resolved settings hold the sizes: ranks and resumes read no folder for them
    assert schema.load(recipes.Recipe, place / "resolved.yaml") == made
    with pytest.raises(ConfigError, match=r"own\.yaml:3: model\.folder: tiny/config\.json: missing"):
        recipes.load("own.yaml")


def test_two_folders_are_refused(place: Path) -> None:
    assert recipes.load("own.yaml", ("stages.start.folder=tiny",)).stages[0].folder == "tiny"
    with pytest.raises(ConfigError, match=r"stages\.start\.folder = other is another than model\.folder = tiny"):
        recipes.load("own.yaml", ("stages.start.folder=other",))


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a name needs: its commit, and its config.json."""

    config = json.dumps(write_hf_config(SIZES, "float32")).encode()

    def do_GET(self) -> None:
        found = {"/api/models/owner/name": json.dumps({"id": "owner/name", "sha": COMMIT}).encode()}
        found |= {f"/owner/name/resolve/{COMMIT}/config.json": self.config}
        body = found.get(self.path, b"")
        self.send_response(200 if body else 404)
        for name, value in {"X-Repo-Commit": COMMIT, "ETag": '"1"', "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if not body:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        pass


def load_with(folder: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Load the recipe in a process of its own: huggingface_hub reads its environment when it is imported."""
    code = "from terrella.launch import recipe; from terrella.core import schema; "
    code += f"print(schema.dump(recipe.load('own.yaml', ('model.folder={folder}',))))"
    whole = {**os.environ, "HF_HOME": "hub", "NO_PROXY": "127.0.0.1", **environ}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=whole)


def test_a_name_of_the_hub_gets_its_commit(place: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        done = load_with("owner/name", **online)
        assert f"folder: owner/name@{COMMIT}" in done.stdout and "hidden: 48" in done.stdout, done.stderr
        assert "owner/none: no such folder, and the hub has no such model" in load_with("owner/none", **online).stderr
        server.shutdown()
    again = load_with(f"owner/name@{COMMIT}", HF_HUB_OFFLINE="1")  # from the cache
    assert again.stdout == done.stdout, again.stderr


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("owner/name", r"owner/name: no such folder, and the hub cannot be asked for its commit .*owner/name@40-digit commit"),
        ("nowhere", "nowhere: neither a folder nor a hub id"),
        (f"owner/name@{COMMIT}", "not in the local cache, and the hub cannot be reached"),
    ],
)
def test_what_cannot_be_reached_is_named(place: Path, folder: str, words: str) -> None:
    done = load_with(folder, HF_HUB_OFFLINE="1")
    assert re.search(rf"--set model\.folder={folder}: model\.folder: .*{words}", done.stderr), done.stderr


def test_torch_is_not_loaded_for_it(place: Path) -> None:
    code = "import sys; from terrella.launch import recipe; recipe.load('own.yaml'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
