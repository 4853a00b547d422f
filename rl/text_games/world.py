"""Text games as worlds: the true one, and the one a world model imagines; and how far the second drifts from the
first.
"""

from __future__ import annotations

import random
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.trajectory import Invalid
from ..rewards.loose_json import Unreadable
from ..rewards.text_game import merge, read_difference, state_difference
from ..rewards.text_game_transition import Transition
from ..statistics import proportion
from ..worlds.base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from .crawl import GAMES, advance, find_game
from .engine import State, Thing

Row = dict[str, Any]
MOST_POINTS = 1_000_000
Predictor = Callable[[list[Row]], "list[str | Invalid]"]  # questions in, responses out


@dataclass(frozen=True)
class View:
    """What a world model sees of a game, and all that it predicts: objects, score and the next free uuid."""

    objects: list[dict[str, Any]]
    score: dict[str, Any]
    next_uuid: int

    def key(self) -> tuple[Any, ...]:
        """Equal for equal states; the order of objects and of contents does not count."""
        things = sorted(({**o, "contains": sorted(o["contains"])} for o in self.objects), key=lambda o: o["uuid"])
        return repr(things), repr(sorted(self.score.items()))

    def question(self, game: str, task: str, action: str) -> Row:
        """The row that asks for what follows."""
        current = {"objects": self.objects, "max_UUID": self.next_uuid, "taskDesc": task}
        return {
            "game": game,
            "state_id": 0,
            "current_state": current,
            "tick_state": {"objects": self.objects, "lastAction": action},
            "current_score_state": self.score,
            "next_score_state": self.score,
        }

    def after(self, response: str) -> View:
        """The state that a response makes of this one, created objects included; raises Unreadable for no answer."""
        step = Transition(self.objects, self.score, self.objects, self.score)
        try:
            objects, score = merge(step, read_difference(response))
            view = View(
                [_whole(o) for o in objects.values()],
                {k: score[k] for k in ("score", "gameOver", "gameWon")},
                self.next_uuid,
            )
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise Unreadable(f"{type(error).__name__}: {str(error)[:100]}") from error
        top = max((o["uuid"] for o in view.objects), default=0)
        return View(view.objects, view.score, max(self.next_uuid, top + 1))

    def imagined(self, response: str) -> View:
        """The state after a response; one that says nothing readable leaves it as it was."""
        try:
            return self.after(response)
        except Unreadable:
            return self


def plain_number(score: object) -> float:
    """An imagined score; what is no number, or beyond any that a game gives, counts as none gained."""
    return float(score) if isinstance(score, int | float) and abs(score) <= MOST_POINTS else 0.0


def ask(predict: Predictor, rows: list[Row]) -> list[str]:
    """The world model's responses; that one failed is a fault of the world."""
    answers: list[str] = []
    for answer in predict(rows):
        if isinstance(answer, Invalid):
            raise WorldFault(f"the world model gave no answer: {answer.reason}")
        answers.append(answer)
    return answers


def _whole(thing: dict[str, Any]) -> dict[str, Any]:
    made = {key: thing[key] for key in ("name", "uuid", "type", "properties", "contains")}
    if not (
        isinstance(made["uuid"], int) and isinstance(made["properties"], dict) and isinstance(made["contains"], list)
    ):
        raise Unreadable("an object without uuid, properties or contents")
    return {**made, "contains": [str(name) for name in made["contains"]]}


def _text(view: View) -> str:
    return repr({"game_state": [*view.objects, view.score]})


def _seen(text: str) -> View:
    """A state from its text."""
    *objects, score = literal_eval(text)["game_state"]
    return View(objects, score, 1 + max((thing["uuid"] for thing in objects), default=0))


def view_of(game_name: str, state: State) -> View:
    """What is to be seen of a true state."""
    return View(state.objects(), find_game(game_name).score(state), state.next_uuid)


@dataclass(frozen=True)
class GameConfig:
    """Which of the games of rl/text_games it is."""

    game: str = next(iter(GAMES))
    skill: float = 0.0  # of the random policy: the share of its actions that an expert chooses

    def __post_init__(self) -> None:
        if not 0 <= self.skill <= 1:
            raise ValueError(f"skill: {self.skill} must be between 0 and 1")


class TextGame(World):
    """A true game. An action is a line of text; one that is not understood only lets time pass."""

    name = "text-game"
    Config = GameConfig

    def __init__(self, game: str = GameConfig.game, skill: float = GameConfig.skill) -> None:
        self.game, self.skill = find_game(game), skill
        self.state: State | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.state = self.game.start(seed)
        return self.render()

    def step(self, action: Action) -> StepResult:
        before = check_started(self, self.state)
        known = str(action) in self.game.actions(before)
        self.state = advance(self.game, before, str(action))
        was, now = self.game.points(before), self.game.points(self.state)
        changed = before.objects() != self.state.objects()
        info = {"success": float(now[2]), "action_is_valid": float(known), "action_is_effective": float(changed)}
        return StepResult(self.render(), float(now[0] - was[0]), now[1], info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        return _text(view_of(self.game.name, check_started(self, self.state)))

    def random_action(self, rng: random.Random) -> str:
        """One that the game understands in this state, or the expert's."""
        return _choose(self.game.name, check_started(self, self.state), rng, self.skill)

    def change(self, before: str, after: str) -> str:
        """What differs, as the questions about games ask for it."""
        was, now = _seen(before), _seen(after)
        return repr(state_difference(Transition(was.objects, was.score, now.objects, now.score)))

    def changed(self, before: str, written: str) -> str | None:
        try:
            text = _text(_seen(before).after(written))
            _seen(text)  # the next turn reads it: a number beyond all floats has no text that can be
        except (Unreadable, ValueError):
            return None
        return text

    def snapshot(self) -> Snapshot:
        state = check_started(self, self.state).copy()
        things = [[t.uuid, t.label, t.type, t.properties, t.contains] for t in state.things.values()]
        return {"game": self.game.name, "things": things, "next_uuid": state.next_uuid}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("game") != self.game.name:
            raise WorldFault(f"a snapshot of {snapshot.get('game')!r} cannot be restored in {self.game.name!r}")
        things = {t[0]: Thing(*t) for t in snapshot["things"]}
        self.state = State(things, snapshot["next_uuid"]).copy()


class ImaginedGame(World):
    """The same game as a world model imagines it: only the start is true. An unreadable answer leaves the state as
    it was.
    """

    name = "imagined-text-game"
    Config = GameConfig

    def __init__(self, predict: Predictor, game: str = GameConfig.game) -> None:
        self.game, self.predict = find_game(game), predict
        self.view: View | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.view = view_of(self.game.name, self.game.start(seed))
        return self.render()

    def step(self, action: Action) -> StepResult:
        before = check_started(self, self.view)
        answer = ask(self.predict, [before.question(self.game.name, self.game.task, str(action))])[0]
        try:
            after, read = before.after(answer), True
        except Unreadable:
            after, read = before, False
        self.view = after
        gained = plain_number(after.score["score"]) - plain_number(before.score["score"])
        info = {
            "success": float(bool(after.score["gameWon"])),
            "action_is_effective": float(before.key() != after.key()),
            "readable": float(read),
        }
        return StepResult(self.render(), gained, bool(after.score["gameOver"]), info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        return _text(check_started(self, self.view))

    def snapshot(self) -> Snapshot:
        view = check_started(self, self.view)
        return {"game": self.game.name, "objects": view.objects, "score": view.score, "next_uuid": view.next_uuid}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("game") != self.game.name:
            raise WorldFault(f"a snapshot of {snapshot.get('game')!r} cannot be restored in {self.game.name!r}")
        self.view = View(snapshot["objects"], snapshot["score"], snapshot["next_uuid"])


def true_predictor(rows: list[Row]) -> list[str | Invalid]:
    """The ceiling: the game itself answers, from the objects of the question."""
    found: list[str | Invalid] = []
    for row in rows:
        game = find_game(row["game"])
        state = state_of(row["current_state"]["objects"], row["current_state"]["max_UUID"])
        after = view_of(game.name, advance(game, state, row["tick_state"]["lastAction"]))
        step = Transition(row["current_state"]["objects"], row["current_score_state"], after.objects, after.score)
        found.append(repr(state_difference(step)))
    return found


def state_of(objects: Sequence[dict[str, Any]], next_uuid: int) -> State:
    """The state of a true game from its objects; names end in (ID: uuid)."""
    by_name = {o["name"]: o["uuid"] for o in objects}
    order = sorted(objects, key=lambda o: o["uuid"])
    things = {
        o["uuid"]: Thing(
            o["uuid"],
            o["name"].rsplit(" (ID: ", 1)[0],
            o["type"],
            dict(o["properties"]),
            [by_name[n] for n in o["contains"]],
        )
        for o in order
    }
    return State(things, next_uuid)


@dataclass
class Walk:
    """A true game and an imagined one by the same actions: after each step, whether the imagined state is the true one.

    Actions are the expert's or any other, by a coin of the walk's own. `copy` tells the same of a state that never
    changes.
    """

    name: str
    true: State
    coin: random.Random
    steps: int
    model: list[bool] = field(default_factory=list)
    copy: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.view = view_of(self.name, self.true)
        self.action = ""

    def question(self) -> Row | None:
        """What the world model is asked next; None after the last step, or when the true game is over."""
        game = find_game(self.name)
        if len(self.model) == self.steps or game.points(self.true)[1]:
            return None
        self.action = _choose(self.name, self.true, self.coin)
        return self.view.question(self.name, game.task, self.action)

    def take(self, answer: str) -> None:
        """Go on in both games."""
        self.true = advance(find_game(self.name), self.true, self.action)
        self.view = self.view.imagined(answer)
        truth = view_of(self.name, self.true).key()
        self.model.append(self.view.key() == truth)
        self.copy.append(self.start.key() == truth)


def walks_of(games: Sequence[str], numbers: Sequence[int], steps: int, first_seed: int) -> list[Walk]:
    """The walks of these numbers, through the games in turn; a number decides the start and the coin."""
    named = [(i, games[i % len(games)]) for i in numbers]
    return [Walk(name, find_game(name).start(first_seed + i), random.Random(i), steps) for i, name in named]


def drift(
    games: Sequence[str], episodes: int, steps: int, predict: Predictor, *, first_seed: int = 10_000
) -> dict[str, list[list[bool]]]:
    """Walk true and imagined games together; the lists are by step, and shorter where games ended early."""
    walks = walks_of(games, range(episodes), steps, first_seed)
    for _ in range(steps):
        asked = [(walk, row) for walk in walks if (row := walk.question()) is not None]
        answers = ask(predict, [row for _, row in asked]) if asked else []
        for (walk, _row), answer in zip(asked, answers, strict=True):
            walk.take(answer)
    hits = {"model": [walk.model for walk in walks], "copy": [walk.copy for walk in walks]}
    return {name: by_step(of_walks, steps) for name, of_walks in hits.items()}


def by_step(hits: Sequence[Sequence[bool]], steps: int) -> list[list[bool]]:
    """By step, of each walk that had not ended."""
    return [[walk[k] for walk in hits if k < len(walk)] for k in range(steps)]


def _choose(name: str, state: State, coin: random.Random, skill: float = 0.5) -> str:
    game = find_game(name)
    if skill and coin.random() < skill:
        try:
            return game.resolve(state, game.expert(state))
        except LookupError:
            pass  # what the expert needs is gone, as food that was given to the wrong fish
    return coin.choice(game.actions(state))


def drift_table(by_model: dict[str, list[list[bool]]], title: str) -> dict[str, Any]:
    """States still exact after k steps, as the report draws it; `by_model` must hold `copy`."""
    steps = len(by_model["copy"])

    def line(name: str, kind: str, hits: list[list[bool]]) -> dict[str, Any]:
        return {"name": name, "kind": kind, "cells": [proportion(sum(h), len(h)).to_cell() for h in hits]}

    lines = [line("copy the start", "baseline", by_model["copy"])]
    lines += [line(name, "model", hits) for name, hits in by_model.items() if name != "copy"]
    lines.append(line("the true world", "ceiling", [[True] * len(h) for h in by_model["copy"]]))
    counts = ", ".join(str(len(h)) for h in by_model["copy"])
    note = (
        f"Share of imagined states that equal the true one after k steps by the same actions; n = {counts} (games "
        "end), 95 % intervals."
    )
    return {"title": title, "columns": [f"k = {k + 1}" for k in range(steps)], "rows": lines, "note": note}
