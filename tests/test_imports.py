"""No modules of the package import each other in a circle, at their top or inside functions."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import terrella

ROOT = Path(terrella.__file__).parent
FOLDERS = ("core", "kernels", "models", "data", "rl", "launch", "benchmarks")
# lines, as parsing the whole package takes seconds; one in a string counts too
IMPORT = re.compile(r"^[ \t]*from (\.+|terrella\b\.?)([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)

Name = tuple[str, ...]


def texts(root: Path) -> dict[Name, str]:
    """Every module's text by its place. The root's __init__.py is left out: it names what users import, and loads none
    of it.
    """
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return {path.relative_to(root).with_suffix("").parts: path.read_text(encoding="utf-8") for path in paths}


def imported(known: dict[Name, str], name: Name) -> set[Name]:
    """The modules that one imports from; a package is its __init__.py."""
    found: set[Name] = set()
    for dots, module, names in IMPORT.findall(known[name]):
        base = name[: -len(dots)] if dots.startswith(".") else ()
        base += tuple(filter(None, module.split(".")))
        for part in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)):
            inner = {(*base, part), (*base, part, "__init__")} & known.keys()
            found |= inner or {base, (*base, "__init__")} & known.keys()
    return found - {name}


def circle(root: Path) -> str:
    """The first circle found; empty for none."""
    known = texts(root)
    try:
        TopologicalSorter({name: imported(known, name) for name in known}).prepare()
    except CycleError as error:
        return " -> ".join("/".join(name) for name in error.args[1])
    return ""


def test_no_modules_import_each_other() -> None:
    assert not circle(ROOT)


@pytest.mark.parametrize(
    "back",
    [
        "from .a import x",
        "from . import (\n    a as other,  # why\n)",
        "from terrella.core.a import x",
        "from terrella.core import a",
        "def late():\n    try:\n        from .a import x\n    except ImportError:\n        pass",
        "if TYPE_CHECKING:\n    from .a import x",
    ],
)
def test_a_circle_is_found(back: str, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("from ..core.b import y\n")
    (tmp_path / "core" / "b.py").write_text(back + "\n")
    assert circle(tmp_path) in ("core/a -> core/b -> core/a", "core/b -> core/a -> core/b")
