"""Does a world model rank policies as the true games do, and does choosing by it gain anything? The same actions are
played in both, and the scores compared.

A policy is the expert with a share of other actions. What it does is decided in the true game, so that only the model's
answers differ.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .crawl import advance, find_game
from .world import Predictor, View, ask, plain_number, view_of

OTHER_ACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)  # the policies, by the share of their actions that is not the expert's


@dataclass
class _Walk:
    policy: int
    game: str
    actions: list[str]
    view: View
    true_score: float

    @classmethod
    def of(cls, policy: int, game: str, seed: int, steps: int) -> _Walk:
        played, coin = find_game(game), random.Random(f"{policy}/{game}/{seed}")
        state, actions = played.start(seed), []
        start = view_of(game, state)
        while len(actions) < steps and not played.points(state)[1]:
            other = coin.random() < OTHER_ACTIONS[policy]
            actions.append(coin.choice(played.actions(state)) if other else played.resolve(state, played.expert(state)))
            state = advance(played, state, actions[-1])
        return cls(policy, game, actions, start, float(view_of(game, state).score["score"]))


@dataclass(frozen=True)
class PolicyScores:
    """Mean final scores of the policies, in the true games and in the imagined ones; and what planning gains.

    A plan is what one of the policies does from a start. Of the plans of a start the one that ends best in the model is
    chosen; its gain is its true score above the mean of all of them (of equally good ones, their mean).
    """

    true: list[float]
    imagined: list[float]
    gains: list[float]  # of each start


def policy_scores(
    games: Sequence[str], episodes: int, steps: int, predict: Predictor, *, first_seed: int = 10_000
) -> PolicyScores:
    """Play every policy from every start, in the true games and in those that `predict` imagines."""
    numbers = range(episodes)
    walks = [
        _Walk.of(p, games[i % len(games)], first_seed + i, steps) for p in range(len(OTHER_ACTIONS)) for i in numbers
    ]
    for step in range(steps):
        alive = [walk for walk in walks if step < len(walk.actions) and not walk.view.score["gameOver"]]
        if not alive:
            break
        rows = [walk.view.question(walk.game, find_game(walk.game).task, walk.actions[step]) for walk in alive]
        for walk, answer in zip(alive, ask(predict, rows), strict=True):
            walk.view = walk.view.imagined(answer)

    by_policy = [walks[p * episodes : (p + 1) * episodes] for p in range(len(OTHER_ACTIONS))]
    true = [[walk.true_score for walk in part] for part in by_policy]
    imagined = [[plain_number(walk.view.score["score"]) for walk in part] for part in by_policy]
    gains = [plan_gain(*scores) for scores in zip(zip(*true, strict=True), zip(*imagined, strict=True), strict=True)]
    return PolicyScores([_mean(part) for part in true], [_mean(part) for part in imagined], gains)


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def plan_gain(true: Sequence[float], imagined: Sequence[float]) -> float:
    """What choosing by the imagined scores gains over choosing blindly, of the plans of one start."""
    best = max(imagined)
    return _mean([t for t, i in zip(true, imagined, strict=True) if i == best]) - _mean(true)
