"""Rebuilding transitions by running the games of a GPT-simulator checkout.

This runs the checkout's own Python files: use a checkout you trust. For each prefix of a game's gold playthrough the game is started
anew, the prefix replayed, and every possible action tried. Checked against games of our own with the same interface only.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import ConfigError
from .base import Item
from .text_game import WHICH, find_material, pair_of, row_problem, wanted

# games of several rooms keep their rooms inside a root that is no place itself
SEVERAL_ROOMS = frozenset({"metal-detector", "space-walk", "sunburn"})


def gold_actions(playthrough: str) -> list[str]:
    """The actions of a playthrough: lines that begin with ">"."""
    told = [line[1:].strip() for line in playthrough.splitlines() if line.startswith(">")]
    return [action for action in told if action not in ("", "help")]


def crawl_game(module: ModuleType, name: str, gold: list[str]) -> Iterator[dict[str, Any]]:
    """Every transition of one game, numbered in crawl order."""
    state_id = 0
    for step in range(len(gold)):
        game = _replay(module, gold[:step])
        current = _snapshot(game, module, gold[step - 1] if step else "", name)
        score = _score(game)
        actions = [a for a in game.generatePossibleActions() if a != gold[step] and (a != "look around" or gold[step] == "look around")]
        for action in [*actions, gold[step]]:
            branch = _replay(module, gold[:step])
            branch.step_action(action)
            acted = _snapshot(branch, module, action, name)
            branch.step_tick()
            ticked = _snapshot(branch, module, action, name)
            branch.step_calculate_score()
            yield {
                "game": name,
                "state_id": state_id,
                "current_state": current,
                "action_state": acted,
                "tick_state": ticked,
                "current_score_state": score,
                "next_score_state": _score(branch),
            }
            state_id += 1


def _replay(module: ModuleType, actions: list[str]) -> Any:
    game = module.TextGame(randomSeed=module.randomSeed)
    game.generatePossibleActions()
    for action in actions:
        game.step(action)
        game.generatePossibleActions()
    return game


def _score(game: Any) -> dict[str, Any]:
    return {"score": game.score, "gameOver": game.gameOver, "gameWon": game.gameWon}


def _snapshot(game: Any, module: ModuleType, action: str, name: str) -> dict[str, Any]:
    inside = game.rootObject.getAllContainedObjectsRecursive()
    objects = inside if name in SEVERAL_ROOMS else [game.rootObject, *inside]
    return {
        "observation": game.observationStr,
        "look": game.actionLook(),
        "inventory": game.actionInventory() if hasattr(game, "actionInventory") else "No inventory available.",
        "taskDesc": game.getTaskDescription(),
        "lastAction": action,
        "objects": [
            {
                "name": o.name,
                "uuid": o.uuid,
                "type": type(o).__name__,
                "properties": copy.deepcopy(o.properties),
                "contains": [c.name for c in o.contains],
            }
            for o in objects
        ],
        "max_UUID": module.UUID,
    }


def read(
    source: Path,
    cursor: list[Any] | None,
    *,
    which: str = "all",
    rules: str | Path | None = None,
    examples: str | Path | None = None,
    games: str | None = None,
) -> Iterator[Item]:
    """Crawl `data/games/*.py` of a checkout; `games` is a comma-separated choice. A resumed crawl begins the game it stood in again."""
    if which not in WHICH:
        raise ConfigError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    folder = source / "data" / "games"
    if not folder.is_dir():
        raise ConfigError(f"{source}: no data/games folder; name the root of a GPT-simulator checkout")
    prompts = find_material(source, rules, examples)
    chosen = set(games.split(",")) if games else None
    files = [p for p in sorted(folder.glob("*.py")) if chosen is None or p.stem in chosen]
    at = cursor or ["", -1]
    for number, path in enumerate(files):
        name = path.stem
        if name < at[0]:
            continue
        told = source / "data" / "playthroughs" / f"{name}-playthrough.txt"
        if not told.is_file():
            yield Item([name, -1], dropped="no playthrough", where=name, done=(number + 1) / len(files))
            continue
        for row in crawl_game(_load_game(path), name, gold_actions(told.read_text(encoding="utf-8"))):
            here = [name, row["state_id"]]
            if name == at[0] and row["state_id"] <= at[1]:
                continue
            where, done = f"{name} {row['state_id']}", number / len(files)
            problem = row_problem(row) or (None if wanted(row, which) else f"not {which}")
            if problem is not None:
                yield Item(here, dropped=problem, where=where, done=done)
                continue
            yield Item(here, pair_of(row, prompts, "crawl"), key=f"{name}-{row['state_id']:06d}", where=where, done=done)


def _load_game(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"terrella_game_{path.stem.replace('-', '_')}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
