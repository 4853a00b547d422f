"""Real2Sim on recorded episodes, such as RT-1's: where a trial begins, what a user's policy answers, who judges, and
what happened in reality.

A policy is a class named by path. An object of it plays one episode: `reset(seed)`, where it has one, then
`act(frame, instruction)` for every frame, uint8 [H, W, 3], gives the next action. A judge is a function of the imagined
frames, the instruction and the recorded frames; it says whether the task was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ...core.by_path import ByPath, describe_error
from ...core.errors import ConfigError
from ...data.convert.rt1 import ACTION_PARTS
from ..worlds.tabletop import PLAIN, Table
from .clips import Episodes
from .policies import SKILLS, VideoPolicy, make_policy
from .real2sim import Rate

AT_REST = ("base_displacement_vector", "base_displacement_vertical_rotation")  # the arm's policies leave them out


@dataclass(frozen=True)
class Recording:
    """An episode that really happened, whose first frame a trial begins with."""

    instruction: str
    frames_THW3: np.ndarray
    actions_TA: np.ndarray


def name_of(policy: str | ByPath) -> str:
    """How tables and the file of true rates call a policy."""
    return policy.path.rpartition(":")[2] if isinstance(policy, ByPath) else policy


def find_episodes(episodes: Episodes, tasks: Sequence[str], count: int, where: str) -> dict[str, list[int]]:
    """The first `count` episodes of each task: an instruction, in which * stands for any words."""
    found: dict[str, list[int]] = {task: [] for task in tasks}
    for number in range(len(episodes)):
        if all(len(numbers) == count for numbers in found.values()):
            break
        said = instruction_of(episodes.raw(number))
        for task, numbers in found.items():
            if len(numbers) < count and matches(said, task):
                numbers.append(number)
    short = next((task for task, numbers in found.items() if len(numbers) < count), None)
    if short is not None:
        raise ConfigError(
            f"{where}: {len(found[short])} of the {len(episodes)} episodes have the instruction '{short}', {count} are "
            "asked for; lower episodes, or give the stage shards with more"
        )
    return found


def instruction_of(raw: Mapping[str, bytes]) -> str:
    """What the robot was told; nothing where the episode does not say."""
    return raw.get("instruction.txt", b"").decode("utf-8").strip()


def matches(instruction: str, task: str) -> bool:
    """Whether an instruction is one of the task's."""
    return fnmatchcase(instruction.lower(), task.lower())


def recording(episodes: Episodes, number: int, height: int, width: int) -> Recording:
    """An episode whole; frames of another size than the world model's are refused."""
    steps = range(episodes.length(number))
    frames = episodes.frames(number, steps)
    if frames.shape[1:] != (height, width, 3):
        raise ConfigError(
            f"episode {number}: its frames are {frames.shape[1]} x {frames.shape[2]}, env.tokenizer has "
            f"{height} x {width}"
        )
    return Recording(instruction_of(episodes.raw(number)), frames, episodes.actions(number, steps))


class Replay:
    """The recorded actions, whatever is seen: they did the task when it was recorded."""

    def __init__(self, actions_TA: np.ndarray) -> None:
        self.actions_TA, self.at = actions_TA, -1

    def reset(self, seed: int) -> None:
        self.at = -1

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
        self.at += 1
        return np.asarray(self.actions_TA[min(self.at, len(self.actions_TA) - 1)], np.float64)


class Still:
    """Never moves, and never says that it is done."""

    def __init__(self, action_A: np.ndarray) -> None:
        self.action_A = action_A

    def reset(self, seed: int) -> None: ...

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
        return self.action_A.copy()


class OwnPolicy:
    """A user's policy; what it answers is checked."""

    def __init__(self, own: ByPath, dims: int) -> None:
        self.path, self.dims = own.path, dims
        self.inner = self._asked("cannot be made", own.load())
        if not callable(getattr(self.inner, "act", None)):
            raise ConfigError(f"{own.path}: has no method act(frame, instruction)")

    def reset(self, seed: int) -> None:
        if hasattr(self.inner, "reset"):
            self._asked("reset failed", self.inner.reset, seed)

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
        return self._action(self._asked("act failed", self.inner.act, frame, instruction))

    def _asked(self, fault: str, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:
            raise ConfigError(f"{self.path}: {fault}: {describe_error(error, self.path.rpartition(':')[0])}") from error

    def _action(self, said: Any) -> np.ndarray:
        try:
            action = np.asarray(join_parts(said) if isinstance(said, Mapping) else said, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: act: {error}") from error
        if action.shape != (self.dims,) or not np.isfinite(action).all():
            raise ConfigError(f"{self.path}: act must give {self.dims} finite numbers, not {str(said)[:200]}")
        return action


def join_parts(parts: Mapping[str, Any]) -> np.ndarray:
    """RT-1's 13 numbers from its named parts; the base stands still where they do not say."""
    unknown = sorted(set(parts) - set(ACTION_PARTS))
    if unknown:
        raise ValueError(f"'{unknown[0]}' is no part of RT-1's actions: {', '.join(ACTION_PARTS)}")
    joined = []
    for name, width in ACTION_PARTS.items():
        if name not in parts and name not in AT_REST:
            raise ValueError(f"the part {name} is missing")
        part = np.asarray(parts.get(name, np.zeros(width)), np.float64).reshape(-1)
        if part.size != width:
            raise ValueError(f"the part {name} has {part.size} numbers, not {width}")
        joined.append(part)
    return np.concatenate(joined)


def player(policy: str | ByPath, dims: int, table: Table = PLAIN) -> VideoPolicy:
    """One who plays one episode: a policy that ships, at the table it sees, or the user's."""
    return OwnPolicy(policy, dims) if isinstance(policy, ByPath) else make_policy(policy, table)


def require_own(policies: Sequence[str | ByPath], where: str) -> None:
    """Policies that ship see the table-top scene and nothing else."""
    ours = next((p for p in policies if not isinstance(p, ByPath)), None)
    if ours is not None:
        raise ConfigError(
            f"{where}: '{ours}' plays the table-top scene ({', '.join(SKILLS)} do); name yours as file.py:Name"
        )


def like_the_recorded_end(frames_THW3: np.ndarray, instruction: str, recorded_THW3: np.ndarray) -> bool:
    """Whether the last frame is nearer to the end of the recording than to its start, in mean absolute error. Crude,
    and only of use where what is recorded are successes.
    """
    start, last, end = (x.astype(np.float32) for x in (recorded_THW3[0], frames_THW3[-1], recorded_THW3[-1]))
    return float(np.abs(last - end).mean()) < float(np.abs(last - start).mean())


def verdict(judge: ByPath | None, frames_THW3: np.ndarray, recorded: Recording) -> bool:
    """What the user's judge says, or ours."""
    if judge is None:
        return like_the_recorded_end(frames_THW3, recorded.instruction, recorded.frames_THW3)
    try:
        said = judge.load()(frames_THW3, recorded.instruction, recorded.frames_THW3)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{judge.path}: failed: {describe_error(error, judge.path.rpartition(':')[0])}") from error
    if not isinstance(said, bool | np.bool_):
        raise ConfigError(f"{judge.path}: must say True or False, not {str(said)[:200]}")
    return bool(said)


def read_rates(path: str, tasks: Sequence[str], policies: Sequence[str]) -> dict[str, Rate]:
    """True success by `task/policy` from a YAML or JSON file of tasks with a value for each policy: a rate, or
    [successes, episodes].
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"truth: {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"truth: {path} must be a section of tasks, with a value for each policy")
    rates = {}
    for task in tasks:
        for policy in policies:
            row = tree.get(task)
            if not isinstance(row, dict) or policy not in row:
                raise ConfigError(f"truth: {path} has no value for the task '{task}' and the policy '{policy}'")
            rates[f"{task}/{policy}"] = _rate(row[policy], f"truth: {path}: {task}: {policy}")
    return rates


def _rate(value: Any, where: str) -> Rate:
    pair = isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value)
    if pair and 0 <= value[0] <= value[1] and value[1] > 0:
        return Rate(value[0] / value[1], value[1])
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return Rate(float(value))
    raise ConfigError(f"{where}: {value!r} must be a rate of 0 to 1, or [successes, episodes]")
