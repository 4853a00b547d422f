"""Policies that see pictures only, of graded skill: scripted from detected positions, noisy, and random.

A policy is asked `act(frame, instruction)` and answers (dx, dy, done), so it runs in the simulator and in a world model
alike.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...core.rng import fold, uniform
from ..worlds.tabletop import CLOSED, OPENED, REACHED, STEP, TASKS
from .detector import Seen, look

BEHIND = 0.085  # from the block's middle to where a push begins


class VideoPolicy(Protocol):
    """Anything that acts on pictures."""

    def reset(self, seed: int) -> None: ...

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray: ...


class ScriptedPolicy:
    """Solves the three tasks from what it sees. With probability 1 - skill a step goes in a random direction
    instead.
    """

    def __init__(self, skill: float = 1.0) -> None:
        if not 0 <= skill <= 1:
            raise ValueError(f"skill: {skill} must be between 0 and 1")
        self.skill = skill
        self.reset(0)

    def reset(self, seed: int) -> None:
        self.key, self.count, self.goal = fold(seed, 77), 0, None

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
        seen = look(frame)
        if self.goal is None:
            self.goal = seen.goal  # later the block covers it
        count, self.count = self.count, self.count + 1
        task = next((t for t, text in TASKS.items() if text == instruction), None)
        if task is None:
            raise ValueError(f"no policy for the instruction '{instruction}'")
        if uniform(self.key, count, 0) >= self.skill or seen.pusher is None:
            held = count // 3  # a direction lasts a few steps, or it would average out
            angle = 2 * np.pi * uniform(self.key, held, 1)
            return np.array([STEP * np.cos(angle), STEP * np.sin(angle), 0.0])
        return push(seen, self.goal) if task == "push" else drawer(seen, task)


def toward(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """One step at most."""
    way = there - here
    far = float(np.linalg.norm(way))
    way = way * min(1.0, STEP / far) if far > 0 else way
    return np.array([way[0], way[1], 0.0])


def push(seen: Seen, goal: np.ndarray | None) -> np.ndarray:
    """Go behind the block, around it where it is in the way, and push it towards the goal."""
    if seen.block is None or goal is None or seen.pusher is None:
        return np.zeros(3)
    way = goal - seen.block
    far = float(np.linalg.norm(way))
    if far < REACHED * 0.6:
        return np.array([0.0, 0.0, 1.0])
    way = way / far
    offset = seen.pusher - seen.block
    along, side = float(offset @ way), float(offset @ np.array([-way[1], way[0]]))
    if along < -0.045 and abs(side) < 0.022:
        step = toward(seen.pusher, seen.pusher + way * min(STEP, far + 0.01) - side * np.array([-way[1], way[0]]))
        return step
    behind = seen.block - way * BEHIND
    if along < -0.03 or float(np.linalg.norm(seen.pusher - behind)) < 0.05:
        return toward(seen.pusher, behind)
    lane = 0.1 if side >= 0 else -0.1  # pass beside the block first
    beside = seen.block + np.array([-way[1], way[0]]) * lane
    if abs(side) < 0.075:
        return toward(seen.pusher, beside + way * min(along, 0.1))
    return toward(seen.pusher, beside - way * BEHIND)


def drawer(seen: Seen, task: str) -> np.ndarray:
    """Open: slip in behind the handle's bar from the side and pull. Close: push against the bar from the front."""
    if seen.handle is None or seen.pusher is None or seen.drawer is None:
        return np.zeros(3)
    bar, here = seen.handle, seen.pusher
    if task == "open":
        if seen.drawer > OPENED + 0.01:
            return np.array([0.0, 0.0, 1.0])
        gap = bar[1] + 0.0335
        if here[1] > bar[1] + 0.02 and abs(here[0]) < 0.065:
            return toward(here, np.array([here[0], here[1] - STEP]))  # inside: pull
        side = 0.1 if here[0] >= 0 else -0.1
        if here[1] > bar[1] + 0.02:
            return toward(here, np.array([side * 0.4, gap]))
        if abs(here[0]) < 0.085:
            return toward(here, np.array([side, min(here[1], bar[1] - 0.04)]))
        return toward(here, np.array([side, gap]))
    if seen.drawer < CLOSED - 0.015:
        return np.array([0.0, 0.0, 1.0])
    if here[1] < bar[1] - 0.02 and abs(here[0]) < 0.04:
        return toward(here, np.array([here[0] * 0.5, here[1] + STEP]))
    side = 0.1 if here[0] >= 0 else -0.1
    if here[1] > bar[1] - 0.04:
        return (
            toward(here, np.array([side, bar[1] - 0.06]))
            if abs(here[0]) > 0.075
            else toward(here, np.array([side, here[1]]))
        )
    return toward(here, np.array([0.0, bar[1] - 0.045]))


SKILLS = {"scripted": 1.0, "noisy": 0.85, "weak": 0.65, "random": 0.0}


def make_policy(name: str) -> ScriptedPolicy:
    """A policy by name."""
    if name not in SKILLS:
        raise ValueError(f"policy: '{name}' is none of {', '.join(SKILLS)}")
    return ScriptedPolicy(SKILLS[name])
