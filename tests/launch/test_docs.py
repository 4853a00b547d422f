"""The documents claim only what is in the tree: every file they name exists, every command they show is a verb."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from terrella.launch import recipe
from terrella.launch.cli import VERBS
from terrella.launch.recipe_files import chosen, find

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Dockerfile", ROOT / "apptainer.def"])
FOLDERS = "core|kernels|models|data|rl|launch|benchmarks|tests|docs|requirements"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_a_document_exist(document):
    named = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)(?![\w<*])", document.read_text(encoding="utf-8"))
    missing = [path for path in named if not list(ROOT.glob(path)) and not (ROOT / path.rstrip(".")).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_named_in_a_document_exist(document):
    """As `tests/FILE.py::NAME`, or `::NAME` after another of the same file."""
    file = ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", document.read_text(encoding="utf-8")):
        file = path or file
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_hold(document):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_shown_are_verbs(document):
    shown = set(re.findall(r"`terrella ([a-z][a-z-]*)", document.read_text(encoding="utf-8")))
    assert shown <= set(VERBS)


@pytest.mark.parametrize("document", [*DOCUMENTS, *ROOT.glob("launch/recipes/**/*.yaml")], ids=lambda path: path.name)
def test_recipes_shown_in_commands_ship(document):
    """With `--size` and `--env`, as the command line reads them; names of the reader's own have a file or folder."""
    shown = re.findall(
        r"terrella (?:train|launch|check|recipes) ([a-z][a-z0-9-]*)(?![\w./:-])((?: --(?:size|env) [\w-]+)*)",
        document.read_text(encoding="utf-8"),
    )
    for name, words in set(shown) - {("env", "")}:
        options = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
        find(chosen(name, options.get("--size"), options.get("--env")))


ARTEFACTS = {"thuml/bytesized32": 4, "thuml/webarena": 3, "thuml/rt1": 6, "THUDM/webrl": 4}


def test_every_released_artefact_has_a_state_and_every_command_loads(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| `thuml/", "| `THUDM/"))]
    assert {name: sum(row[0].startswith(f"`{name}") for row in rows) for name in ARTEFACTS} == ARTEFACTS
    for block in re.findall(r"```yaml\n(# (\S+-released)\.yaml.*?)```", page, re.DOTALL):
        (tmp_path / f"{block[1]}.yaml").write_text(block[0])
    (tmp_path / "web-page-released.yaml").write_text(
        (tmp_path / "text-game-released.yaml").read_text().replace("base: text-game-rlvr-binary", "base: web-page-rlvr")
    )
    monkeypatch.chdir(tmp_path)
    for _, state, command in rows:
        assert state and set(state.split(", ")) <= {"loads", "evaluates", "trains", "not verified"}, state
        assert "`terrella " in command
    commands = [shlex.split(words) for words in re.findall(r"`terrella (?:train|launch) ([^`]+)`", page)]
    assert len(commands) > 20
    for words in commands:
        recipe.load(words[0], tuple(setting for option, setting in pairwise(words) if option == "--set"))
    for name in ("migrate.md", "papers.md"):
        assert "planned" not in (ROOT / "docs" / name).read_text(encoding="utf-8").lower()


def test_the_readme_is_a_landing_page():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 12] == []


def test_make_targets_shown_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        assert set(re.findall(r"`make ([a-z-]+)`", document.read_text(encoding="utf-8"))) <= targets, document.name


def test_container_files_share_their_versions():
    docker, apptainer = (ROOT / "Dockerfile").read_text(), (ROOT / "apptainer.def").read_text()
    image = re.search(r"^FROM (\S+)", docker, re.M).group(1)
    assert f"From: {image}" in apptainer
    for line in re.findall(r"pip install [^\n]*?(?:lock-hopper.txt|transformer-engine-torch\S+)", docker):
        assert line.replace("-r requirements", "-r /opt/terrella/requirements") in apptainer
    packages = [
        re.search(r"apt-get install ([^\n&]+)", text.replace("\\\n", " "))[1].split() for text in (docker, apptainer)
    ]
    assert packages[0] == packages[1]
    assert {"rdma-core", "libibverbs1", "ibverbs-providers"} <= set(packages[0])  # what NCCL loads for InfiniBand
    for line in ("playwright install --with-deps chromium", "PLAYWRIGHT_BROWSERS_PATH=/opt/browsers"):
        assert line in docker and line in apptainer
    lock = (ROOT / "requirements" / "lock-hopper.txt").read_text()
    for name in ("ray", "playwright", "vllm", "megatron-core", "transformer-engine"):
        assert re.search(rf"^{name}==", lock, re.M), name
    for name, version in re.findall(
        r"^(torch|triton|megatron-core|vllm)==(\S+)", (ROOT / "requirements" / "constraints-h100.txt").read_text(), re.M
    ):
        assert re.search(rf"{name}[^|\n]*\|\s*{re.escape(version)}", docker, re.I), name
