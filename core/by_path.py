"""What a user brings: `file.py:Name` or `package.module:Name`, wherever a setting accepts the name of something of
ours.
"""

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

_loaded: dict[Path, tuple[str, types.ModuleType]] = {}  # file -> digest of what was loaded, its module
_beside: dict[Path, dict[str, types.ModuleType]] = {}  # folder -> modules that its files imported from beside them


class OwnFile(str):
    """A setting that names a file or folder of the user's, relative to the recipe. What is not there is refused
    where it is opened.
    """


class OwnText(str):
    """A setting that is a text, or names a file with it; the file is read with the recipe, so that a run keeps what
    it was started with.
    """


@dataclass(frozen=True)
class ByPath:
    """An object of the user's own. In YAML a plain string `my.py:score` or `package.module:score`; a file is
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
        """The object; a file that is not the one the run was started with is refused."""
        return load_object(self.path, Path(), self.digest)


@dataclass(frozen=True)
class KindByPath(ByPath):
    """A section whose `kind` is `file.py:Name` or `package.module:Name`; its further keys are passed to that as
    arguments.
    """

    kind: Literal["path"] = "path"
    args: dict[str, Any] = field(default_factory=dict)  # what the object is called with

    @classmethod
    def named(cls, kind: str) -> tuple[str, dict[str, Any]]:
        """What a kind with a colon names: a path, and the arguments that it stands for. A section may have short
        names for some.
        """
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

    With a digest, a file that has another one is refused.
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
    """Refuse a file that has another digest than the one that was noted, where one was."""
    if digest and file_digest(text, base) != digest:
        raise ConfigError(
            f"{text}: the file has changed since this run was started; restore it, or start a run in another --run "
            "folder"
        )


def named_in(settings: Any) -> Iterator[ByPath]:
    """Everything that a section of settings, or one within it, names by path."""
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
    """sha256, by path, of the files beside the one that `file.py:Name` names which it imports, and which those import.

    Read off their source without running it: a name that is made up at run time is not seen.
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
    """Refuse files of the user's, given by path with their digests, that are others than those that are known."""
    changed = next((path for path, digest in now.items() if known.get(path, digest) != digest), None)
    if changed is not None:
        raise ConfigError(
            f"{changed}: has changed since this run was started; restore it, or start a run in another --run folder"
        )


def _imports(path: Path, source: bytes, folder: Path) -> list[Path]:
    """The files in a folder that a source names in its import statements."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # said in full where the file is loaded
        return []
    places: list[tuple[Path, str]] = []  # where the search begins, and a dotted name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places += [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [folder, *path.parents][min(node.level, len(path.parents))]
            # a name that is imported from a package may be a module of it
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
    """The same with the file's whole path, so that it means the same from any folder; a package's module stays as it
    is.
    """
    where, name = _parts(text)
    return f"{_file(where, base)}:{name}" if _is_file(where) else text


def existing(text: str, *folders: Path) -> Path | None:
    """The file or folder that a text names, looked for in these folders and then from the current one; None where it
    names none, as most texts do.
    """
    if "\n" in text:
        return None
    try:
        places = (*(folder / text for folder in folders), Path(text).expanduser())
        return next((path for path in places if path.exists()), None)
    except (OSError, RuntimeError, ValueError):  # too long for a name, ~ of no user, a zero byte
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
    """The module of a file, under a name of its own. It is run once, and again where the file has changed in between,
    as in a notebook.

    The source is compiled from the bytes that are hashed: cached bytecode may be that of an edit in the same second.
    """
    source = _read(path)
    digest = hashlib.sha256(source).hexdigest()
    known = _loaded.get(path)
    if known and known[0] == digest:
        return known[1]
    # of the path alone: pickles name it
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
    """Modules beside a file can be imported while it loads; those that files of other folders imported from beside them
    are out of sight, so that two folders may each have a `utils.py`."""
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
    """An error of the user's code in its own words, with the line of the file, or of the other file that it comes
    from.
    """
    if isinstance(error, SyntaxError):
        file, line = error.filename or path, error.lineno
    else:
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename != __file__ and not f.filename.startswith("<frozen")
        ]
        # not deep in a library
        own = [f for f in frames if path and Path(path).parent in Path(f.filename).parents] or frames
        file, line = (own[-1].filename, own[-1].lineno) if own else (path, None)
    where = "" if line is None else f"line {line}: " if file == path else f"{file}, line {line}: "
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{where}{type(error).__name__}" + (f": {text}" if text else "")
