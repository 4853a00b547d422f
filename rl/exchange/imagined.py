"""A trained world model as a world: played beside the true one, so that every step says whether the two still agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ...data.trajectory import Invalid
from ..grid.imagination import GridDynamics
from ..text_games.world import ImaginedGame, TextGame, view_of
from ..video.world import FrameWorld, frame_drift
from ..web_pages.tree import items_f1
from ..web_pages.world import ImaginedPage
from ..worlds.base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from ..worlds.sokoban import Sokoban, decode, solved, step_reward
from ..worlds.sokoban_rooms import PLAYER

NextState = Callable[[str, int], "str | Invalid"]  # a flat state and an action id -> the predicted state
Report = Callable[[str], Any]


class ImaginedGrid(World):
    """Sokoban as a model imagines it: only the start is true. A prediction that is no room leaves the state as it
    was.
    """

    name = "imagined-sokoban"

    def __init__(self, true: Sokoban, dynamics: GridDynamics, predict: NextState) -> None:
        self.true, self.dynamics, self.predict = true, dynamics, predict
        self.action_words, self.state = true.action_words, ""

    def reset(self, seed: int, sample: int = 0) -> str:
        self.state = self.dynamics.flat(self.true.reset(seed, sample))
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.state or None)
        after = self.predict(self.state, int(action))
        if isinstance(after, Invalid):
            raise WorldFault(f"the world model gave no state: {after.reason}")
        readable = len(after) == len(self.state) and set(after) <= set(self.dynamics.symbols)
        before, self.state = self.state, after if readable else self.state
        old, new = decode(before), decode(self.state)
        won = bool(solved(new)) and any(code >= PLAYER for code in new)
        info = {"success": float(won), "action_is_effective": float(old != new), "readable": float(readable)}
        return StepResult(self.render(), float(step_reward(old, new)), won, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        return self.dynamics.grid(self.state)

    def snapshot(self) -> Snapshot:
        return {"state": self.state}

    def restore(self, snapshot: Snapshot) -> None:
        self.state = str(snapshot["state"])


class ComparedWorld(World):
    """An imagined world, played alongside the true one. The player sees the imagined one; `info` says how far it has
    drifted.

    `exact` is 1 while the two states are the same, `exact_steps` counts the steps until they first differed.
    """

    name = "imagined"

    def __init__(self, imagined: World, true: World, report: Report | None = None) -> None:
        self.imagined, self.true, self.report = imagined, true, report
        self.action_words = true.action_words
        self.steps, self.exact_steps, self.over = 0, 0, False

    def reset(self, seed: int, sample: int = 0) -> str:
        self.steps, self.exact_steps, self.over = 0, 0, False
        self.true.reset(seed, sample)
        return self.imagined.reset(seed, sample)

    def step(self, action: Action) -> StepResult:
        result = self.imagined.step(action)
        true_reward = 0.0
        if not self.over:
            truth = self.true.step(action)
            self.over, true_reward = truth.done, truth.reward
        drift = difference(self.imagined, self.true)
        exact = drift["exact"] == 1.0
        self.exact_steps += exact and self.exact_steps == self.steps
        self.steps += 1
        drift |= {"exact_steps": float(self.exact_steps), "true_reward": float(true_reward)}
        if self.report is not None:
            self.report(f"step {self.steps}: {'exact' if exact else 'drifted'}, exact for the first {self.exact_steps}")
        return StepResult(
            result.text, result.reward, result.done, {**result.info, **drift, "true_over": float(self.over)}
        )

    def render(self, mode: str = "text") -> str:
        return self.imagined.render(mode)

    def picture(self) -> Any:
        return self.imagined.picture()

    def random_action(self, rng: random.Random) -> str:
        return self.true.random_action(rng)

    def parse_action(self, word: str) -> Action | None:
        return self.true.parse_action(word)

    def snapshot(self) -> Snapshot:
        counts = {"steps": self.steps, "exact_steps": self.exact_steps, "over": self.over}
        return {"imagined": self.imagined.snapshot(), "true": self.true.snapshot(), **counts}

    def restore(self, snapshot: Snapshot) -> None:
        self.imagined.restore(snapshot["imagined"])
        self.true.restore(snapshot["true"])
        self.steps, self.exact_steps, self.over = (
            int(snapshot["steps"]),
            int(snapshot["exact_steps"]),
            bool(snapshot["over"]),
        )

    def close(self) -> None:
        self.true.close()


def difference(imagined: World, true: World) -> dict[str, float]:
    """How the two states differ: `exact` is 1 where they are the same; further numbers say how near they are.

    Of a text game the order of objects does not count, of a page the items' order, depth and numbers.
    """
    if isinstance(imagined, FrameWorld):
        return frame_drift(imagined.picture(), true.picture())
    if isinstance(imagined, ImaginedPage):
        f1 = items_f1(imagined.render(), true.render())
        return {"exact": float(f1 == 1.0), "items_f1": f1}
    if isinstance(imagined, ImaginedGame) and isinstance(true, TextGame) and imagined.view and true.state:
        return {"exact": float(imagined.view.key() == view_of(true.game.name, true.state).key())}
    return {"exact": float(imagined.render() == true.render())}
