"""Policies that see pictures only, of graded skill: scripted from detected positions, noisy, and random.

A policy is asked `act(frame, instruction)` and answers (dx, dy, done), so it runs in the simulator and in a world model
alike.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...core.rng import fold, uniform
from ..worlds.tabletop import CLOSED, OPENED, PLAIN, REACHED, TASKS, Table
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

    def __init__(self, skill: float = 1.0, table: Table = PLAIN) -> None:
        if not 0 <= skill <= 1:
            raise ValueError(f"skill: {skill} must be between 0 and 1")
        self.skill, self.table = skill, table
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
            held = count * self.table.stride // 3  # a direction lasts 0.3 s, or it would average out
            angle = 2 * np.pi * uniform(self.key, held, 1)
            return np.array([self.table.reach * np.cos(angle), self.table.reach * np.sin(angle), 0.0])
        there = push(seen, self.goal, self.table) if task == "push" else drawer(seen, task, self.table)
        if there is None:
            return np.array([0.0, 0.0, 1.0])
        way = there - seen.pusher
        far = float(np.linalg.norm(way))
        way = way * min(1.0, self.table.reach / far) if far > 0 else way
        return np.array([way[0], way[1], 0.0])


def push(seen: Seen, goal: np.ndarray | None, table: Table) -> np.ndarray | None:
    """Where to go next: behind the block, around it where it is in the way, then with it towards the goal; None when it
    is there.
    """
    assert seen.pusher is not None
    if seen.block is None or goal is None:
        return seen.pusher
    way = goal - seen.block
    far = float(np.linalg.norm(way))
    if far < REACHED * 0.6:
        return None
    way = way / far
    across = np.array([-way[1], way[0]])
    offset = seen.pusher - seen.block
    along, side = float(offset @ way), float(offset @ across)
    if along < -0.045 - table.grown and abs(side) < 0.022:
        return seen.pusher + way * min(table.reach, far + 0.01) - side * across
    behind = BEHIND + table.grown
    start = seen.block - way * behind
    if along < -0.03 - table.grown or float(np.linalg.norm(seen.pusher - start)) < 0.05:
        return start
    lane = 0.1 + table.grown
    beside = seen.block + across * (lane if side >= 0 else -lane)  # pass beside the block first
    if abs(side) < 0.075 + table.grown:
        return beside + way * min(along, lane)
    return beside - way * behind


def drawer(seen: Seen, task: str, table: Table) -> np.ndarray | None:
    """Where to go next. Open: slip in behind the handle's bar from the side and pull. Close: push against the bar from
    the front.
    """
    assert seen.pusher is not None
    if seen.handle is None or seen.drawer is None:
        return seen.pusher
    bar, here = seen.handle, seen.pusher
    side = 0.1 if here[0] >= 0 else -0.1
    if task == "open":
        if seen.drawer > OPENED + 0.01:
            return None
        gap = bar[1] + 0.0335
        if here[1] > bar[1] + 0.02 and abs(here[0]) < 0.065:
            return np.array([here[0], here[1] - table.reach])  # inside: pull
        if here[1] > bar[1] + 0.02:
            return np.array([side * 0.4, gap])
        if abs(here[0]) < 0.085:
            return np.array([side, min(here[1], bar[1] - 0.04)])
        return np.array([side, gap])
    if seen.drawer < CLOSED - 0.015:
        return None
    if here[1] < bar[1] - 0.02 and abs(here[0]) < 0.04:
        return np.array([here[0] * 0.5, here[1] + table.reach])
    if here[1] > bar[1] - 0.04:
        return np.array([side, bar[1] - 0.06 if abs(here[0]) > 0.075 else here[1]])
    return np.array([0.0, bar[1] - 0.045])


SKILLS = {"scripted": 1.0, "noisy": 0.85, "weak": 0.65, "random": 0.0}


def make_policy(name: str, table: Table = PLAIN) -> ScriptedPolicy:
    """A policy by name."""
    if name not in SKILLS:
        raise ValueError(f"policy: '{name}' is none of {', '.join(SKILLS)}")
    return ScriptedPolicy(SKILLS[name], table)
