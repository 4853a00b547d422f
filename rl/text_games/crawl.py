"""Transitions of the games: along an expert's way through every seed, each possible action is tried once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from ...core.errors import ConfigError
from ...data.convert.text_game import Prompts, is_changed
from .engine import Game, State
from .games_house import Candle, Laundry, Paint, Strongbox
from .games_kitchen import Bake, Ices, Tea, Toast
from .games_outside import Aquarium, Bucket, Greenhouse, Scale, Torch
from .rows import changed_by_action

EXAMPLE = Toast()
GAMES: dict[str, Game] = {
    g.name: g
    for g in (
        Bake(),
        Ices(),
        Tea(),
        Laundry(),
        Candle(),
        Strongbox(),
        Paint(),
        Greenhouse(),
        Aquarium(),
        Bucket(),
        Torch(),
        Scale(),
    )
}
KNOWN = {**GAMES, EXAMPLE.name: EXAMPLE}
MAX_STEPS = 40


def find_game(name: str) -> Game:
    """A game by name, the example game included."""
    if name not in KNOWN:
        raise ConfigError(f"games: '{name}' is not one of {', '.join(KNOWN)}")
    return KNOWN[name]


def advance(game: Game, state: State, action: str) -> State:
    """The state after an action and the time that passes with it; the given one is left alone."""
    after = state.copy()
    game.act(after, action)
    game.tick(after)
    return after


def expert_actions(game: Game, seed: int) -> list[str]:
    """The expert's actions from the start of a seed to the end of the game."""
    state, actions = game.start(seed), []
    while not game.points(state)[1]:
        if len(actions) == MAX_STEPS:
            raise RuntimeError(f"{game.name}: the expert has not ended the game of seed {seed} in {MAX_STEPS} actions")
        actions.append(game.resolve(state, game.expert(state)))
        state = advance(game, state, actions[-1])
    return actions


def transition(game: Game, state: State, action: str, last: str, state_id: int) -> dict[str, Any]:
    """The row of one action in one state."""
    current, score = game.snapshot(state, "", last), game.score(state)
    after = state.copy()
    message = game.act(after, action)
    acted = game.snapshot(after, message, action)
    game.tick(after)
    return {
        "game": game.name,
        "state_id": state_id,
        "current_state": current,
        "action_state": acted,
        "tick_state": game.snapshot(after, message, action),
        "current_score_state": score,
        "next_score_state": game.score(after),
    }


def crawl(game: Game, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every action in every state of the expert's way, numbered in order. Looking around is left out unless the
    expert does it.
    """
    number = 0
    for seed in seeds:
        state, last = game.start(seed), ""
        for chosen in expert_actions(game, seed):
            others = [a for a in game.actions(state) if a != chosen and a != "look around"]
            for action in [*others, chosen]:
                yield transition(game, state, action, last, number)
                number += 1
            state, last = advance(game, state, chosen), chosen


def crawl_all(names: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of several games."""
    return [row for name in names for row in crawl(find_game(name), seeds)]


@cache
def prompts() -> Prompts:
    """Prompts for our own games, with two worked examples from the example game: one changed by the action, one by
    time alone.
    """
    rules = {
        "object": {name: g.object_rules for name, g in KNOWN.items()},
        "action": {name: g.action_rules for name, g in KNOWN.items()},
        "score": {name: g.score_rules for name, g in KNOWN.items()},
    }
    rows = list(crawl(EXAMPLE, range(2)))
    acted = next(row for row in rows if changed_by_action(row))
    ticked = next(row for row in rows if is_changed(row) and not changed_by_action(row))
    return Prompts(rules, {"action": acted, "tick": ticked}, EXAMPLE.name)


def bare_prompt(row: dict[str, Any]) -> str:
    """The question alone, without rules or examples: for small models that learn the rules from the rows."""
    state = row["current_state"]
    asked = {"game_state": [*state["objects"], row["current_score_state"]]}
    return f"{row['game']}\n{asked!r}\nUUID base: {state['max_UUID']}\nAction: {row['tick_state']['lastAction']}\n"


def prompt_writer(style: str) -> Callable[[dict[str, Any]], str]:
    """How the questions of a style are written."""
    if style == "bare":
        return bare_prompt
    return prompts().without_examples if style == "rules" else prompts()
