"""What is a world model worth to train in? A small agent that has imitated a player of middling skill is trained by
policy gradient in the games that the model imagines, and judged in the true ones.

The agent is a softmax over the actions of a start, linear in the facts of the state, so that what is measured is the
model and not the agent: the same agent, starts and seeds serve every model, the true world among them.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from .crawl import advance, find_game
from .world import Predictor, View, ask, plain_number, true_predictor, view_of

IMITATED, SHARE, EPOCHS = 24, 0.5, 2  # walks of each game that are imitated, the share of their actions that is random
STARTS, SAMPLES = 4, 8  # of one update: starts, and episodes of each, whose mean is the baseline
IMITATION_RATE, RATE = 2.0, 0.25  # in logits
NUMBER = re.compile(r" \(ID: \d+\)")


@dataclass
class Decision:
    """One choice: the facts, what could be done, with which chances, and what was."""

    facts: list[str]
    actions: list[str]
    chances: list[float]
    chosen: int


@dataclass
class Agent:
    """A weight for each fact and action."""

    weights: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def decide(self, game: str, view: View, actions: list[str], coin: random.Random) -> Decision:
        """Draw an action."""
        facts, get = facts_of(game, view), self.weights.get
        words = [label(action) for action in actions]
        logits = [sum(get((fact, word), 0.0) for fact in facts) for word in words]
        top = max(logits)
        parts = [math.exp(logit - top) for logit in logits]
        total = sum(parts)
        chances = [part / total for part in parts]
        return Decision(facts, actions, chances, coin.choices(range(len(actions)), chances)[0])

    def learn(self, decision: Decision, worth: float) -> None:
        """One step up the log-probability of what was chosen, times its worth."""
        for place, (action, chance) in enumerate(zip(decision.actions, decision.chances, strict=True)):
            change, word = worth * ((place == decision.chosen) - chance) / len(decision.facts), label(action)
            for fact in decision.facts:
                self.weights[fact, word] += change

    def copy(self) -> Agent:
        """Another with the same weights."""
        return Agent(self.weights.copy())


def label(text: str) -> str:
    """Without the numbers of things, which differ from start to start."""
    return NUMBER.sub("", text)


def facts_of(game: str, view: View) -> list[str]:
    """What is seen, as words; a model may imagine anything, so nothing is read as more than that."""
    found = {game}
    for thing in view.objects:
        name = f"{game}: {label(str(thing['name']))}"
        found |= {f"{name} {key} {value!r}" for key, value in thing["properties"].items()}
        found |= {f"{name} has {label(inner)}" for inner in thing["contains"]}
    return sorted(found)


@dataclass
class _Episode:
    game: str
    view: View
    actions: list[str]
    coin: random.Random
    decisions: list[Decision] = field(default_factory=list)

    @classmethod
    def of(cls, game: str, seed: int, sample: str) -> _Episode:
        start = find_game(game).start(seed)
        coin = random.Random(f"{game}/{seed}/{sample}")
        return cls(game, view_of(game, start), find_game(game).actions(start), coin)


def play(agent: Agent, episodes: Sequence[_Episode], steps: int, predict: Predictor) -> None:
    """Play the episodes side by side in the games that `predict` imagines."""
    for _ in range(steps):
        alive = [episode for episode in episodes if not episode.view.score["gameOver"]]
        if not alive:
            return
        rows = []
        for episode in alive:
            decision = agent.decide(episode.game, episode.view, episode.actions, episode.coin)
            episode.decisions.append(decision)
            action = decision.actions[decision.chosen]
            rows.append(episode.view.question(episode.game, find_game(episode.game).task, action))
        for episode, answer in zip(alive, ask(predict, rows), strict=True):
            episode.view = episode.view.imagined(answer)


def imitated(games: Sequence[str], steps: int, first_seed: int) -> Agent:
    """The agent before training: it has imitated walks of the games' expert mixed with random actions."""
    agent = Agent()
    walks = [(game, first_seed + number) for _ in range(EPOCHS) for number in range(IMITATED) for game in games]
    for game, seed in walks:
        played, coin = find_game(game), random.Random(f"imitated/{game}/{seed}")
        state = played.start(seed)
        actions = played.actions(state)
        for _ in range(steps):
            if played.points(state)[1]:
                break
            expert = played.resolve(state, played.expert(state))
            taken = coin.choice(actions) if coin.random() < SHARE or expert not in actions else expert
            decision = agent.decide(game, view_of(game, state), actions, coin)
            decision.chosen = actions.index(taken)
            agent.learn(decision, IMITATION_RATE)
            state = advance(played, state, taken)
    return agent


def trained(agent: Agent, games: Sequence[str], updates: int, steps: int, predict: Predictor, first_seed: int) -> Agent:
    """The agent after so many updates on final scores in the games that `predict` imagines."""
    agent = agent.copy()
    for update in range(updates):
        numbers = [STARTS * update + place for place in range(STARTS)]
        groups = [
            [_Episode.of(games[number % len(games)], first_seed + number, f"{sample}") for sample in range(SAMPLES)]
            for number in numbers
        ]
        play(agent, [episode for group in groups for episode in group], steps, predict)
        for group in groups:
            scores = [plain_number(episode.view.score["score"]) for episode in group]
            middle = sum(scores) / len(scores)
            spread = math.sqrt(sum((score - middle) ** 2 for score in scores) / len(scores))
            for episode, score in zip(group, scores, strict=True):
                for decision in episode.decisions if spread else ():
                    agent.learn(decision, RATE * (score - middle) / spread)
    return agent


def true_scores(agent: Agent, games: Sequence[str], episodes: int, steps: int, first_seed: int) -> list[float]:
    """Final scores in the true games, one of each start; the same coin for every agent."""
    starts = [_Episode.of(games[number % len(games)], first_seed + number, "judged") for number in range(episodes)]
    play(agent, starts, steps, true_predictor)
    return [plain_number(episode.view.score["score"]) for episode in starts]


@dataclass(frozen=True)
class TrainingGain:
    """True scores of the same starts by the agent that only imitated, and by the one that was trained."""

    before: list[float]
    after: list[float]

    @property
    def gains(self) -> list[float]:
        return [after - before for before, after in zip(self.before, self.after, strict=True)]


def training_gain(
    games: Sequence[str], updates: int, episodes: int, steps: int, predict: Predictor, *, first_seed: int = 10_000
) -> TrainingGain:
    """Train in the games that `predict` imagines, judge in the true ones, on starts that were not trained on."""
    judged = first_seed + IMITATED + STARTS * updates
    agent, before = _untrained(tuple(games), episodes, steps, first_seed, judged)
    after = trained(agent, games, updates, steps, predict, first_seed + IMITATED)
    return TrainingGain(before, true_scores(after, games, episodes, steps, judged))


@cache
def _untrained(games: tuple[str, ...], episodes: int, steps: int, seed: int, judged: int) -> tuple[Agent, list[float]]:
    """The agent that every model is given, and its scores."""
    agent = imitated(games, steps, seed)
    return agent, true_scores(agent, games, episodes, steps, judged)
