"""Finds recipes: by path, or by the name of one that ships.

A method that comes in several sizes is a folder, `recipes/METHOD/SIZE.yaml` or `recipes/METHOD/ENV-SIZE.yaml`. The
section `envs` of a file says what each of its environments changes; the recipe is then called METHOD-ENV-SIZE, e.g.
spa-sudoku-tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..core import schema
from ..core.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent / "recipes"
PARTS = "parts"  # the folder of what several recipes share
USUAL = ("paper", "gpu", "tiny")  # default sizes, in order of preference
MOST_FILES = 50  # files that one recipe may be built from


@dataclass(frozen=True)
class Place:
    """A recipe's file, and the section of its `envs` that is merged over it."""

    path: Path
    env: str | None = None
    name: str | None = None  # set if the file holds several recipes

    @property
    def source(self) -> str:
        """The file, as named in errors."""
        return f"recipe {self.path.relative_to(RECIPES)}" if RECIPES in self.path.parents else str(self.path)


def methods() -> list[str]:
    """The names of the methods that ship."""
    return sorted(
        path.stem for path in RECIPES.iterdir() if path.name != PARTS and (path.is_dir() or path.suffix == ".yaml")
    )


@cache
def recipes_of(method: str) -> dict[str, Place]:
    """A method's recipes by name."""
    if not (RECIPES / method).is_dir():
        return {method: Place(RECIPES / f"{method}.yaml")}
    return {
        name: place for path in sorted((RECIPES / method).glob("*.yaml")) for name, place in _recipes_in(path).items()
    }


def _recipes_in(path: Path) -> dict[str, Place]:
    """The recipes of one file of a method's folder: one, or one for each environment."""
    tree = tree_of(Place(path)).value
    if "envs" not in tree or tree["envs"].value is None:
        return {tree["name"].value: Place(path)}
    size = "" if path.stem == "paper" else f"-{path.stem}"  # names of the paper's size omit it
    names = {f"{path.parent.name}-{env}{size}": env for env in tree["envs"].value}
    return {name: Place(path, env, name) for name, env in names.items()}


def shipped() -> dict[str, Place]:
    """Every recipe that ships, by name."""
    return {name: place for method in methods() for name, place in recipes_of(method).items()}


def find(name: str) -> Place:
    """A recipe by path, or by the name of one that ships; the name of a method alone means its default recipe."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"{name}: no such recipe file; `terrella recipes` lists those that ship")
        return Place(path)
    flat = RECIPES / f"{name}.yaml"
    if flat.is_file():
        return Place(flat)
    for method in methods():
        if name == method:
            return recipes_of(method)[_usual(recipes_of(method))]
        if name.startswith(f"{method}-") and name in recipes_of(method):
            return recipes_of(method)[name]
    hint = did_you_mean(name, shipped()) or ";"
    raise ConfigError(f"'{name}' is neither a file nor a recipe that ships{hint} `terrella recipes` lists them")


def run_folder(recipe: str, name: str) -> Path:
    """The default run directory for a recipe: under runs/, or, if the recipe is a run's own config.yaml, that run."""
    path = Path(recipe)
    return path.parent if path.name == "config.yaml" and (path.parent / "lease.json").is_file() else Path("runs") / name


def comes_in_several(recipe: str) -> bool:
    """Whether this is a method that has recipes for several sizes or environments."""
    return recipe != PARTS and "/" not in recipe and (RECIPES / recipe).is_dir()


def chosen(recipe: str, size: str | None, env: str | None) -> str:
    """The name of a method's recipe for `--size` and `--env`; either may be left out."""
    if size is None and env is None:
        return recipe
    known = recipes_of(recipe) if recipe in methods() else {}
    fitting = {name: place for name, place in known.items() if _fits(place, size, env)}
    if not fitting:
        given = " ".join(f"--{option} {value}" for option, value in (("env", env), ("size", size)) if value is not None)
        there = f"there are {', '.join(known)}" if known else "`terrella recipes` lists those that come in several"
        raise ConfigError(f"{given}: the recipe {recipe} has none; {there}")
    return _usual(fitting)


def _fits(place: Place, size: str | None, env: str | None) -> bool:
    """Whether a recipe has this size and this environment."""
    own_env, _, own_size = place.path.stem.rpartition("-")
    return size in (None, own_size) and env in (None, place.env or own_env)


def _usual(recipes: dict[str, Place]) -> str:
    """The default recipe among several."""
    sizes = {name: place.path.stem.rpartition("-")[2] for name, place in recipes.items()}
    return next((name for size in USUAL for name in recipes if sizes[name] == size), next(iter(recipes)))


def tree_of(place: Place) -> schema.Located:
    """A recipe's settings: its file merged over those that its key `base` names (recipes, or parts under
    recipes/parts).
    """
    return _tree(place, (), [])


def _tree(place: Place, inside: tuple[Path, ...], loaded: list[Path]) -> schema.Located:
    path = place.path
    loaded.append(path)
    if len(loaded) > MOST_FILES:
        raise ConfigError(f"{path}: the recipe and its bases are more than {MOST_FILES} files")
    if path in inside:
        raise ConfigError(f"{path}: is its own base, through {' and '.join(p.name for p in inside)}")
    tree = schema.read_yaml(path, place.source)
    if not isinstance(tree.value, dict):
        return tree
    if "base" in tree.value:
        tree = _over_bases(tree, path, (*inside, path), loaded)
    if place.env is None:
        return tree
    whole = schema.merge(tree, tree.value.pop("envs").value[place.env])
    whole.value["name"] = schema.Located(place.name, place.source)
    return whole


def _over_bases(tree: schema.Located, path: Path, inside: tuple[Path, ...], loaded: list[Path]) -> schema.Located:
    named = tree.value.pop("base")
    bases = [item.value for item in named.value] if isinstance(named.value, list) else [named.value]
    if not bases or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{named.where}: base must be the name of a recipe, or a list of names")
    whole: schema.Located | None = None
    for base in bases:
        beside = path.parent / str(base)
        own = beside.suffix in (".yaml", ".yml") and beside.is_file()
        below = _tree(Place(beside) if own else find(str(base)), inside, loaded)
        whole = below if whole is None else schema.merge(whole, below)
    assert whole is not None
    return schema.merge(whole, tree)
