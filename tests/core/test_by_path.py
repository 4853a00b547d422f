"""What a user names by path is loaded once, under a name of its own, and every way it can be wrong is named."""

import hashlib
import pickle
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from terrella.core import run as runs
from terrella.core import schema
from terrella.core.by_path import (
    ByPath,
    KindByPath,
    OwnFile,
    OwnText,
    existing,
    file_digest,
    load_object,
    local_imports,
)
from terrella.core.errors import ConfigError

OWN = """
from dataclasses import dataclass
import helper

@dataclass
class Env:
    size: int = helper.SIZE

def score(p, a, i): return 1.0

N = 3
"""


@dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    lives: int = 9


@dataclass(frozen=True)
class Own(KindByPath):
    turns: int = 1


@dataclass(frozen=True)
class Outer:
    pet: Cat | Own
    reward: Literal["exact", "partial"] | ByPath = "exact"
    template: ByPath | None = None
    more: list[ByPath] = field(default_factory=list)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("SIZE = 4\n")
    (tmp_path / "my.py").write_text(OWN)
    return tmp_path


def read(folder: Path, text: str, *overrides: str) -> Outer:
    (folder / "r.yaml").write_text(text)
    return schema.load(Outer, folder / "r.yaml", overrides, "r.yaml")


def test_a_file_is_loaded_once_beside_its_siblings_and_again_when_it_changed(own: Path) -> None:
    env = load_object("my.py:Env", own)
    assert env().size == 4 and load_object(f"{own / 'my.py'}:Env", Path("/")) is env
    assert pickle.loads(pickle.dumps(env(5))) == env(5)  # noqa: S301
    assert "my" not in sys.modules and str(own) not in sys.path
    assert file_digest("my.py:Env", own) == hashlib.sha256(OWN.encode()).hexdigest()
    (own / "my.py").write_text(OWN.replace("1.0", "2.0"))
    assert load_object("my.py:score", own)(0, 0, 0) == 2.0


def test_two_folders_may_each_have_a_helper(own: Path) -> None:
    other = own / "other"
    other.mkdir()
    (other / "helper.py").write_text("SIZE = 7\n")
    (other / "my.py").write_text(OWN)
    assert [load_object("my.py:Env", folder)().size for folder in (own, other, own)] == [4, 7, 4]


def test_modules_beside_a_file_are_found_without_running_them(tmp_path: Path) -> None:
    sources = {
        "my.py": "import json, grading\nfrom tools import words\nimport deep.er.est as x\nraise SystemExit\n",
        "grading.py": "from my import f\ndef g():\n    import later\n",
        "later.py": "def broken(:\n",
        "tools/__init__.py": "from .numbers import one\n",
        "tools/words.py": "from . import spelling\nfrom ..grading import f\n",
        "tools/numbers.py": "",
        "tools/spelling.py": "import unrelated.thing\n",
        "tools/unused.py": "",
        "deep/er/est.py": "",
        "unused.py": "",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    found = local_imports("my.py:f", tmp_path)
    assert found == {
        str(tmp_path / name): hashlib.sha256(source.encode()).hexdigest()
        for name, source in sources.items()
        if name != "my.py" and "unused" not in name
    }
    assert local_imports("json.decoder:JSONDecoder", tmp_path) == {}


@dataclass(frozen=True)
class Texts:
    rows: OwnFile
    template: OwnText


@pytest.mark.parametrize("length", [200, 256, 400, 999, 5000])
def test_a_long_line_is_a_text_and_no_file(tmp_path: Path, length: int) -> None:
    text = ("Answer briefly. {{ question }} " * length)[:length]
    assert existing(text, tmp_path) is None
    (tmp_path / "r.yaml").write_text(f"rows: rows.jsonl\ntemplate: '{text}'\n")
    assert schema.load(Texts, tmp_path / "r.yaml", (), "r.yaml") == Texts(OwnFile("rows.jsonl"), OwnText(text))


@pytest.mark.parametrize("name", ["sytem.txt", "prompts/judge.jinja", "~/SYSTEM.md"])
def test_a_file_of_text_that_is_not_there_is_no_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.yaml").write_text(f"rows: {name}\ntemplate: {name}\n")
    with pytest.raises(
        ConfigError, match=rf"r\.yaml:2: template = {name}: no such file, .* end it with a blank where it is the text"
    ):
        schema.load(Texts, tmp_path / "r.yaml", (), "r.yaml")
    for text in ("Answer as README.md does.", f"{name} "):
        (tmp_path / "r.yaml").write_text(f"rows: rows.jsonl\ntemplate: '{text}'\n")
        assert schema.load(Texts, tmp_path / "r.yaml", (), "r.yaml").template == text


def test_a_file_is_found_beside_the_recipe_and_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.txt").write_text("A")
    (tmp_path / "b.txt").write_text("B {{ x }}")
    monkeypatch.chdir(tmp_path / "here")
    assert existing("b.txt", tmp_path) == tmp_path / "b.txt" and existing("b.txt") is None
    assert existing("a.txt", tmp_path) == Path("a.txt")
    assert [existing(text, tmp_path) for text in ("~no_such_user/a.txt", "a\0b", "a.txt\nb")] == [None] * 3
    (tmp_path / "r.yaml").write_text("rows: a.txt\ntemplate: b.txt\n")
    found = schema.load(Texts, tmp_path / "r.yaml", (), "r.yaml")
    assert found == Texts(OwnFile(tmp_path / "here" / "a.txt"), OwnText("B {{ x }}"))


def test_a_module_of_an_installed_package() -> None:
    assert load_object("json.decoder:JSONDecoder", Path()) is __import__("json").JSONDecoder
    source = Path(__import__("json.decoder").decoder.__file__).read_bytes()
    assert file_digest("json.decoder:JSONDecoder", Path()) == hashlib.sha256(source).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mi.py:Env", "mi.py: no such file; did you mean 'my.py'?"),
        ("my.py:Enw", "my.py has no 'Enw'; did you mean 'Env'?"),
        ("my.py:N", "'N' is a int; a function or a class is needed"),
        ("my.py", "'my.py': write it as file.py:Name"),
        ("my file:x", "'my file:x': my file is neither a .py file nor the name of a module"),
        (
            "no_such_package.x:f",
            "no_such_package.x: no such module is installed; a file of yours is named as file.py:Name",
        ),
        ("json.decodr:f", "json.decodr: no such module is installed"),
        ("raises.py:f", "raises.py: cannot be imported: line 2: ZeroDivisionError: division by zero"),
        ("syntax.py:f", "syntax.py: cannot be imported: line 1: SyntaxError: "),
        ("leaves.py:f", "leaves.py: cannot be imported: line 2: SystemExit: 3"),
        ("beside.py:f", "raises.py, line 2: ZeroDivisionError"),
        ("lacks.py:f", "lacks.py: cannot be imported: line 1: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_what_is_wrong_is_named(own: Path, text: str, message: str) -> None:
    (own / "raises.py").write_text("x = 1\nx / 0\n")
    (own / "syntax.py").write_text("def f(:\n")
    (own / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (own / "beside.py").write_text("import raises\n")
    (own / "lacks.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_object(text, own)


def test_settings_take_a_path_wherever_they_take_a_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(own, "pet: {kind: my.py:Env, size: 6, turns: 2}\nreward: my.py:score\nmore: [json:dumps]\n")
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    assert isinstance(config.pet, Own) and isinstance(config.reward, ByPath)
    assert config.pet == Own(f"{own}/my.py:Env", digest, "path", {"size": 6}, 2) and config.pet.make().size == 6
    assert config.reward == ByPath(f"{own}/my.py:score", digest) and config.reward.load()(0, 0, 0) == 1.0
    assert config.more[0].path == "json:dumps" and config.more[0].digest
    (own / "run").mkdir()
    assert read(own / "run", schema.dump(config)) == config  # as a worker reads config.yaml, in another folder
    assert read(own, "pet: my.py:Env\nreward: partial\n") == Outer(Own(f"{own}/my.py:Env", digest), "partial")
    assert read(own, "pet: {kind: cat, lives: 3}\n") == Outer(Cat("cat", 3))
    elsewhere = own / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text("def f(): pass\n")
    monkeypatch.chdir(elsewhere)  # an override is relative to where it is typed
    changed = read(own, "pet: {kind: my.py:Env}\n", "template=mine.py:f", "pet.size=3")
    assert changed.template == ByPath(f"{elsewhere}/mine.py:f", file_digest("mine.py:f", elsewhere))
    assert isinstance(changed.pet, Own) and changed.pet.args == {"size": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pet:\n  kind: mi.py:Env\n", "r.yaml:2: pet: {own}/mi.py: no such file; did you mean 'my.py'?"),
        ("pet: {kind: my.py}\n", "r.yaml:1: pet.kind = 'my.py' is unknown; write it as my.py:Name"),
        ("pet: {kind: my.py:a b}\n", "'my.py:a b': write it as file.py:Name"),
        (
            "pet: {kind: my.py:Env, path: x}\n",
            "r.yaml:1: pet.path is taken; an argument of that name goes under pet.args",
        ),
        ("pet: {kind: my.py:Env, day: 2026-01-02}\n", "r.yaml:1: pet.args.day is read as a date; write it in quotes"),
        (
            "pet: {kind: cat}\nreward: parial\n",
            "r.yaml:2: reward = 'parial' must be one of 'exact', 'partial'; did you mean 'partial'?",
        ),
        ("pet: {kind: cat}\nreward: you.py:f\n", "r.yaml:2: reward: {own}/you.py: no such file"),
    ],
)
def test_a_wrong_path_in_settings_has_its_line(own: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("{own}", str(own)))):
        read(own, text)


def test_arguments_that_do_not_fit_are_named(own: Path) -> None:
    config = read(own, "pet: {kind: my.py:Env, sise: 6}\n")
    assert isinstance(config.pet, Own)
    with pytest.raises(
        ConfigError, match=r"my\.py:Env: cannot be made with {'sise': 6}: .*unexpected keyword argument 'sise'"
    ):
        config.pet.make()


def test_a_run_is_not_resumed_with_another_file(own: Path) -> None:
    text = "pet: {kind: my.py:Env}\n"
    config = read(own, text)
    folder = own / "run"
    for _ in range(2):
        run, lease = runs.create(folder, config)
        run.finish("first", {})  # the run has begun
        lease.release()
    (own / "my.py").write_text(OWN + "# one more line\n")
    now = read(own, text)
    assert isinstance(config.pet, Own) and isinstance(now.pet, Own)
    old, new = config.pet.digest[:12], now.pet.digest[:12]
    with pytest.raises(ConfigError, match=rf"pet, the file {own}/my\.py: sha256 {old} then, sha256 {new} now"):
        runs.create(folder, now)
    with pytest.raises(ConfigError, match=r"my\.py:Env: the file has changed since this run was started; restore it"):
        config.pet.load()  # a worker of the old run
    again = read(own, text.replace("}", ", size: 3}"))
    (own / "my.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"pet\.args\.size: absent then, 3 now"):
        runs.create(folder, again)
