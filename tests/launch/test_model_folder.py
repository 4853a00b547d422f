"""`model: {folder: PATH}`: the sizes come from config.json, a hub id gets its commit, and a start needs no folder of
its own.
"""

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

SIZES = ModelConfig(
    family="qwen2",
    layers=3,
    hidden=48,
    heads=4,
    kv_heads=2,
    head_dim=12,
    ffn=96,
    vocab=300,
    qkv_bias=True,
    norm_eps=1e-5,
)
RECIPE = """name: own
world: language
model: {folder: tiny, max_positions: 512}
stages:
- {kind: start, name: start}
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
    # what the recipe says itself stays
    assert (made.model.folder, made.model.max_positions) == (str(place / "tiny"), 512)
    assert schema.to_plain(made.model.sizes) == {**schema.to_plain(SIZES), "max_positions": 512}
    assert type(made.model.sizes) is ModelConfig and made.stages[0].folder == str(place / "tiny")
    (place / "resolved.yaml").write_text(schema.dump(made))
    # the resolved settings hold the sizes: ranks and resumes read no folder for them
    (place / "tiny" / "config.json").unlink()
    assert schema.load(recipes.Recipe, place / "resolved.yaml") == made
    with pytest.raises(ConfigError, match=r"own\.yaml:3: model\.folder: .*tiny/config\.json: missing"):
        recipes.load("own.yaml")


def test_two_folders_are_refused(place: Path) -> None:
    assert recipes.load("own.yaml", ("stages.start.folder=tiny",)).stages[0].folder == str(place / "tiny")
    with pytest.raises(ConfigError, match=r"stages\.start\.folder = other is another than model\.folder = .*tiny"):
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


LOAD = """
import sys
from terrella.core import schema
from terrella.launch import recipe
for folder in sys.argv[1:]:
    try:
        print(schema.dump(recipe.load("own.yaml", (f"model.folder={folder}",))))
    except recipe.ConfigError as error:
        print(error)
assert "torch" not in sys.modules
"""


def load_with(*folders: str, **environ: str) -> str:
    """Load the recipe in a process of its own: huggingface_hub reads its environment when it is imported."""
    whole = {**os.environ, "HF_HOME": "hub", "NO_PROXY": "127.0.0.1", **environ}
    words = [sys.executable, "-c", LOAD, *folders]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=whole)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_of_the_hub_gets_its_commit(place: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        said = load_with("owner/name", "owner/none", **online)
        server.shutdown()
    assert f"folder: owner/name@{COMMIT}" in said and "hidden: 48" in said
    assert "owner/none: no such folder, and the hub has no such model" in said
    cached, unknown, unpinned, nowhere = f"owner/name@{COMMIT}", f"owner/other@{COMMIT}", "owner/name", "nowhere"
    offline = load_with(cached, unknown, unpinned, nowhere, HF_HUB_OFFLINE="1")
    assert said.partition("--set")[0] in offline  # from the cache
    for folder, words in {
        unknown: "not in the local cache, and the hub cannot be reached",
        unpinned: r"no such folder, and the hub cannot be asked for its commit .*owner/name@40-digit commit",
        nowhere: "neither a folder nor a hub id",
    }.items():
        assert re.search(rf"--set model\.folder={folder}: model\.folder: {folder}: {words}", offline), offline


def test_torch_is_not_loaded_for_it(place: Path) -> None:
    assert "hidden: 48" in load_with("tiny", HF_HUB_OFFLINE="1")
