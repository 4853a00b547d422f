"""Rebuilding transitions by running the games of a GPT-simulator checkout.

This runs the checkout's own Python files: use a checkout you trust. For each prefix of a game's gold playthrough the
game is restarted, the prefix replayed, and every possible action tried, in the order of the published data. A game
that cannot be read or fails on the way is reported, and the others go on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import ConfigError
from .base import Item
from .text_game import WHICH, find_material, item_of

# games with several rooms have a root that contains them and is not a place itself
SEVERAL_ROOMS = frozenset({"metal-detector", "space-walk", "sunburn"})

_NESTED_QUOTES = re.compile(r"""(\{[\w.]+)\["(\w+)"\]""")  # f"{self.properties["name"]}"


def gold_actions(playthrough: str) -> list[str]:
    """The actions of a playthrough: lines that begin with ">"."""
    commands = [line[1:].strip() for line in playthrough.splitlines() if line.startswith(">")]
    return [action for action in commands if action not in ("", "help")]


def ordered_actions(possible: Iterable[str], gold: str) -> list[str]:
    """The actions tried from one state, in the order that gives the published `state_id`s.

    They are grouped by verb, verbs and actions as they first appear; the gold action is last. "look around" repeats
    "look" and is left out.
    """
    by_verb: dict[str, list[str]] = {}
    for action in possible:
        if action not in (gold, "look around"):
            by_verb.setdefault(action.split()[0], []).append(action)
    return [*(action for actions in by_verb.values() for action in actions), gold]


def crawl_game(module: ModuleType, name: str, gold: list[str]) -> Iterator[dict[str, Any]]:
    """Every transition of one game, numbered in crawl order."""
    state_id = 0
    for step in range(len(gold)):
        game = _replay(module, gold[:step])
        current = _snapshot(game, module, gold[step - 1] if step else "", name)
        score = _score(game)
        for action in ordered_actions(game.generatePossibleActions(), gold[step]):
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
    """Crawl `data/games/*.py` of a checkout; `games` is a comma-separated choice. A resumed crawl begins the game it
    stood in again.
    """
    if which not in WHICH:
        raise ConfigError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    folder = source / "data" / "games"
    if not folder.is_dir():
        raise ConfigError(f"{source}: no data/games folder; name the root of a GPT-simulator checkout")
    prompts = find_material(source, rules, examples)
    chosen = set(games.split(",")) if games else None
    files = sorted((p for p in folder.glob("*.py") if chosen is None or p.stem in chosen), key=lambda p: p.stem)
    at = cursor or ["", -1]
    for number, path in enumerate(files):
        name = path.stem
        if name < at[0]:
            continue
        walkthrough = source / "data" / "playthroughs" / f"{name}-playthrough.txt"
        if not walkthrough.is_file():
            yield Item([name, -1], dropped="no playthrough", where=name, done=(number + 1) / len(files))
            continue
        done, last = number / len(files), -1
        for row in _rows(path, gold_actions(walkthrough.read_text(encoding="utf-8"))):
            if isinstance(row, str):
                kept = f"after {last + 1} transitions, which are kept" if last >= 0 else "before its first transition"
                yield Item([name, last], dropped="the game failed", where=f"{path.name}: {row}, {kept}", done=done)
                break
            last = row["state_id"]
            if name == at[0] and last <= at[1]:
                continue
            yield item_of(Item([name, last], where=f"{name} {last}", done=done), row, prompts, "crawl", which)


def _rows(path: Path, gold: list[str]) -> Iterator[dict[str, Any] | str]:
    """The transitions of a game; what the game raises comes last, in words, so that it costs no other game."""
    try:
        yield from crawl_game(load_game(path), path.stem, gold)
    except (Exception, SystemExit) as error:
        yield f"{type(error).__name__}: {str(error)[:200]}"


def load_game(path: Path) -> ModuleType:
    """A game file as a module. An f-string that reuses its own quotes, legal from Python 3.12 on, is rewritten where
    it is not.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    while True:
        try:
            code = compile("\n".join(lines), str(path), "exec")
            break
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            mended = _NESTED_QUOTES.sub(r"\1['\2']", lines[at]) if 0 <= at < len(lines) else None
            if mended is None or mended == lines[at]:
                raise
            lines[at] = mended
    module = ModuleType(f"terrella_game_{path.stem.replace('-', '_')}")
    module.__file__ = str(path)
    exec(code, module.__dict__)
    return module
