"""A user's own code by path: `file.py:Name` or `package.module:Name`, wherever a setting accepts a built-in name."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError, did_you_mean

_loaded: dict[Path, tuple[str, types.ModuleType]] = {}  # file -> (digest of what was loaded, module)
_beside: dict[Path, dict[str, types.ModuleType]] = {}  # folder -> modules that its files imported from it


class OwnFile(str):
    """A setting that names a user's file or folder, relative to the recipe. That it exists is checked when opened."""


class OwnText(str):
    """A setting that is a text, or names a file that holds it. The file is read together with the recipe, so that a run
    keeps the text it was started with.
    """


@dataclass(frozen=True)
class ByPath:
    """A user's own class or function. In YAML a plain string, `my.py:score` or `package.module:score`; a file is
    relative to the recipe.
    """

    path: str  # `file.py:Name` or `package.module:Name`
    digest: str = ""  # sha256 of the file, filled in when the recipe is read; a resume with another file is refused

    def __post_init__(self) -> None:
        try:
            _parts(self.path)
        except ConfigError as error:
            raise ValueError(f"path: {error}") from error

    def load(self) -> Callable[..., Any]:
        """The class or function; a file that changed since the run was started is refused."""
        return load_object(self.path, Path(), self.digest)


@dataclass(frozen=True)
class KindByPath(ByPath):
    """A section whose `kind` is `file.py:Name` or `package.module:Name`; its other keys become arguments."""

    kind: Literal["path"] = "path"
    args: dict[str, Any] = field(default_factory=dict)  # arguments to make it with

    @classmethod
    def named(cls, kind: str) -> tuple[str, dict[str, Any]]:
        """(path, arguments) of a kind with a colon. Subclasses may define short names such as `gymnasium:ID`."""
        return kind, {}

    def make(self) -> Any:
        """The object, called with its arguments."""
        try:
            return self.load()(**self.args)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.path}: cannot be made with {self.args}: {describe_error(error, '')}") from error


def load_object(text: str, base: Path, digest: str = "") -> Callable[..., Any]:
    """The class or function that `file.py:Name` (relative to `base`) or `package.module:Name` names.

    If a digest is given, a file with another one is refused.
    """
    where, name = _parts(text)
    require_same_file(text, base, digest)
    module = _file_module(_file(where, base)) if _is_file(where) else _package_module(where)
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{text}: {where} has no '{name}'{did_you_mean(name, known)}")
    value = getattr(module, name)
    if not callable(value):
        raise ConfigError(f"{text}: '{name}' is a {type(value).__name__}; a function or a class is needed")
    return value


def require_same_file(text: str, base: Path, digest: str) -> None:
    """Refuse a file whose digest is not the recorded one, if one was recorded."""
    if digest and file_digest(text, base) != digest:
        raise ConfigError(
            f"{text}: the file has changed since this run was started; restore it, or start a run in another --run "
            "folder"
        )


def named_in(settings: Any) -> Iterator[ByPath]:
    """Everything that a section of settings names by path, nested sections included."""
    if isinstance(settings, ByPath):
        yield settings
    inner: Iterable[Any] = ()
    if is_dataclass(settings):
        inner = (getattr(settings, f.name) for f in fields(settings))
    elif isinstance(settings, list | tuple):
        inner = settings
    for one in inner:
        yield from named_in(one)


def file_digest(text: str, base: Path) -> str:
    """sha256 of the file that `file.py:Name` names, or of the source file of a package's module."""
    where, _ = _parts(text)
    if _is_file(where):
        return hashlib.sha256(_read(_file(where, base))).hexdigest()
    origin = _spec(where).origin
    if origin is None or not Path(origin).is_file():
        raise ConfigError(f"{text}: {where} has no source file; name a module with one")
    return hashlib.sha256(_read(Path(origin))).hexdigest()


def local_imports(text: str, base: Path) -> dict[str, str]:
    """sha256, by path, of the files that `file.py:Name` imports from its own folder, directly or indirectly.

    Found in the source without running it: imports by names that are built at run time are missed.
    """
    where, _ = _parts(text)
    if not _is_file(where):
        return {}
    main = _file(where, base)
    found: dict[Path, str] = {}
    left = [main]
    while left:
        path = left.pop()
        if path in found:
            continue
        source = _read(path)
        found[path] = hashlib.sha256(source).hexdigest()
        left += _imports(path, source, main.parent)
    return {str(path): digest for path, digest in found.items() if path != main}


def require_unchanged(known: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse a user's files (path -> digest) that have changed from the known ones."""
    changed = next((path for path, digest in now.items() if known.get(path, digest) != digest), None)
    if changed is not None:
        raise ConfigError(
            f"{changed}: has changed since this run was started; restore it, or start a run in another --run folder"
        )


def _imports(path: Path, source: bytes, folder: Path) -> list[Path]:
    """The files in a folder that a source file imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # reported when the file is loaded
        return []
    places: list[tuple[Path, str]] = []  # (where the search starts, dotted name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places += [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [folder, *path.parents][min(node.level, len(path.parents))]
            # a name imported from a package may be one of its modules
            places += [(start, ".".join(filter(None, (node.module, alias.name)))) for alias in node.names]
    files = []
    for start, name in places:
        files += [start / "__init__.py"] if start != folder else []
        module = start
        for part in name.split("."):
            files += [module / f"{part}.py", module / part / "__init__.py"]
            module /= part
    return [file.resolve() for file in dict.fromkeys(files) if file.is_file()]


def absolute(text: str, base: Path) -> str:
    """The same text with an absolute file path; `package.module:Name` stays as it is."""
    where, name = _parts(text)
    return f"{_file(where, base)}:{name}" if _is_file(where) else text


def existing(text: str, *folders: Path) -> Path | None:
    """The file or folder that a text names, searched in these folders, then in the current one; None if not found."""
    if "\n" in text:
        return None
    try:
        places = (*(folder / text for folder in folders), Path(text).expanduser())
        return next((path for path in places if path.exists()), None)
    except (OSError, RuntimeError, ValueError):  # name too long, ~ of an unknown user, a null byte
        return None


def _parts(text: str) -> tuple[str, str]:
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"'{text}': write it as file.py:Name or package.module:Name")
    if not _is_file(where) and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", where):
        raise ConfigError(f"'{text}': {where} is neither a .py file nor the name of a module")
    return where, name


def _is_file(where: str) -> bool:
    return where.endswith(".py")


def _file(where: str, base: Path) -> Path:
    return Path(base, Path(where).expanduser()).resolve()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        beside = [p.name for p in path.parent.glob("*.py")]
        raise ConfigError(f"{path}: no such file{did_you_mean(path.name, beside)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _file_module(path: Path) -> types.ModuleType:
    """The module of a file, under a unique name. It runs once, and again if the file has changed, as in a notebook.

    The hashed bytes themselves are compiled: cached bytecode may be stale after two edits within a second.
    """
    source = _read(path)
    digest = hashlib.sha256(source).hexdigest()
    known = _loaded.get(path)
    if known and known[0] == digest:
        return known[1]
    # depends on the path alone, because pickles refer to it
    name = f"{path.stem}_by_path_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look here
    try:
        with _importable(path.parent):
            exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise ConfigError(f"{path}: cannot be imported: {describe_error(error, str(path))}") from error
    _loaded[path] = digest, module
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """While a file loads, modules in its folder can be imported. Those that files of other folders imported are hidden,
    so that two folders may each have a `utils.py`."""
    others = [pair for place, kept in _beside.items() if place != folder for pair in kept.items()]
    hidden = {name: sys.modules.pop(name) for name, module in others if sys.modules.get(name) is module}
    sys.modules.update(_beside.get(folder, {}))
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        new = {name: module for name, module in sys.modules.items() if name not in before}
        inside = {
            name: module
            for name, module in new.items()
            if folder in Path(getattr(module, "__file__", None) or "/").parents
        }
        _beside.setdefault(folder, {}).update(inside)
        sys.modules.update(hidden)


def _spec(where: str) -> Any:
    try:
        spec = importlib.util.find_spec(where)
    except ModuleNotFoundError:
        spec = None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: cannot be imported: {describe_error(error, '')}") from error
    if spec is None:
        raise ConfigError(f"{where}: no such module is installed; a file of yours is named as file.py:Name")
    return spec


def _package_module(where: str) -> types.ModuleType:
    path = str(_spec(where).origin)
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: cannot be imported: {describe_error(error, path)}") from error


def describe_error(error: BaseException, path: str) -> str:
    """An error in the user's code: its message, and the file and line that it comes from."""
    if isinstance(error, SyntaxError):
        file, line = error.filename or path, error.lineno
    else:
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename != __file__ and not f.filename.startswith("<frozen")
        ]
        # rather than a line deep in a library
        own = [f for f in frames if path and Path(path).parent in Path(f.filename).parents] or frames
        file, line = (own[-1].filename, own[-1].lineno) if own else (path, None)
    where = "" if line is None else f"line {line}: " if file == path else f"{file}, line {line}: "
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{where}{type(error).__name__}" + (f": {text}" if text else "")
