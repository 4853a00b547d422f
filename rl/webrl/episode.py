"""Episodes of web agents: a model, the scripted oracle or the random policy on a task of a web world."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ...data.trajectory import Invalid
from ..language import readable
from ..rollout.sampler import Sample
from ..worlds.base import attempt
from ..worlds.web.generate import SiteTask
from ..worlds.web.world import WebWorld
from .prompts import Prompter
from .steps import WebStep, WebTrajectory

HARMLESS = ('do(action="Scroll Down")', 'do(action="Scroll Up")', 'do(action="Wait")')


@dataclass
class WebEpisode:
    """One task in one world, as the rollout drives it: every round's context is a prompt of its own."""

    world: WebWorld
    task: SiteTask
    prompt_id: int
    sample_index: int
    prompter: Prompter
    rounds: list[tuple[tuple[int, ...], tuple[int, ...], str, str, bool]] = field(default_factory=list)
    fault: Invalid | None = None
    cut: int = 0  # page tokens that did not fit, the most of any round
    reward: float = 0.0  # this and the next three when it has ended
    answer: str = ""
    intent: str = ""
    ended: bool = False

    def __post_init__(self) -> None:
        started = attempt(self.world.open_task, self.task.task, self.task.steps)
        self.fault = started if isinstance(started, Invalid) else None
        self.asked: tuple[int, ...] = ()

    def _prompt(self, html: str, intent: str) -> tuple[int, ...]:
        ids, cut = self.prompter.round(intent, [action for _, action, _, _, _ in self.rounds], html)
        self.cut = max(self.cut, cut)
        return ids

    def context(self) -> tuple[int, ...] | None:
        if self.fault is not None or self.world.done:
            return None
        assert self.world.task is not None
        self.asked = self._prompt(self.world.html, self.world.task.intent)
        return self.asked

    def receive(self, sample: Sample) -> None:
        self.act(sample.ids, readable(self.prompter.tokenizer, self.prompter.action(sample.ids)))

    def act(self, ids: tuple[int, ...], response: str, learn: bool = True) -> None:
        """Carry out a response and keep the round."""
        html = self.world.html
        taken = attempt(self.world.step, response)
        if isinstance(taken, Invalid):
            self.fault = taken
            return
        self.rounds.append((self.asked, tuple(ids), html, response, learn))

    def score(self) -> tuple[list[float], float | Invalid, dict[str, Any]]:
        if self.fault is not None:
            return [], self.fault, {}
        self.end()
        info = {"success": self.solved, "steps": len(self.rounds), "site": self.task.task.sites[0]}
        return [], self.reward, info

    def end(self) -> None:
        """Keep what the world says at the end: it may be used for another episode afterwards."""
        assert self.world.task is not None  # its intent: some pages say themselves what they ask for
        self.reward, self.answer, self.intent = max(0.0, self.world.score), self.world.answer, self.world.task.intent
        self.ended = True

    @property
    def solved(self) -> bool:
        return self.reward >= 1.0

    def trajectory(self, key: str) -> WebTrajectory:
        """What is kept of an ended episode. After the last step there is no page: its own is shown again, as the
        next round.
        """
        task, html = self.task.task, self.rounds[-1][2]
        following = [prompt for prompt, _, _, _, _ in self.rounds[1:]] + [self._prompt(html, self.intent)]
        steps = tuple(
            WebStep(r[0], r[1], after, r[2], r[3], r[4]) for r, after in zip(self.rounds, following, strict=True)
        )
        known = self.reward if task.evaluation.checkable else None
        return WebTrajectory(task.task_id, self.intent, task.sites[0], steps, known or 0.0, known, key)


def demonstrate(episode: WebEpisode, noise: float, rng: random.Random) -> None:
    """Let the oracle act to the end. With probability `noise` a round holds an action without effect, which is not
    to be imitated.
    """
    while episode.context() is not None:
        idle = (
            rng.random() < noise and len(episode.rounds) + len(episode.world.steps) + 1 < episode.world.config.max_steps
        )
        text = rng.choice(HARMLESS) if idle else episode.world.demonstrate().split("\n")[-1]
        episode.act((*episode.prompter.tokenizer.encode(text), episode.prompter.stop_id), text, learn=not idle)
    episode.score()


def act_randomly(episode: WebEpisode, rng: random.Random) -> None:
    """Clicks, words of the task typed into fields, and exits, each element equally likely."""
    while not episode.world.done and episode.fault is None:
        episode.act((), episode.world.random_action(rng))
    episode.score()
