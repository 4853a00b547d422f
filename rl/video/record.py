"""Episodes of the table-top scene as video shards: policies of graded skill, an instruction and a label of success
each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...data.convert.npz import episode_sample
from ...data.schema import VIDEO
from ...data.shards import ShardWriter
from ...data.shards.writer import encode_sample, ordered_map
from ..worlds.tabletop import PLAIN, TASKS, Table, Tabletop
from .clips import Episodes
from .policies import VideoPolicy, make_policy


@dataclass(frozen=True)
class EpisodePlan:
    """What decides an episode."""

    seed: int
    task: str
    policy: str
    frames: int
    table: Table = PLAIN


@lru_cache(maxsize=1)
def world(table: Table) -> Tabletop:
    """This process's scene; a renderer is made once."""
    return Tabletop(table)


def play(
    plan: EpisodePlan, policy_seed: int | None = None, policy: VideoPolicy | None = None
) -> tuple[np.ndarray, np.ndarray, bool]:
    """(frames, actions, success): action t is taken in frame t; after the policy says done it stands still. It is the
    plan's by name where none is given.
    """
    scene, policy = world(plan.table), policy or make_policy(plan.policy, plan.table)
    scene.reset(plan.seed, plan.task)
    policy.reset(plan.seed if policy_seed is None else policy_seed)
    frames, actions = [], []
    done = success = False
    for _ in range(plan.frames):
        frames.append(scene.frame())
        success = scene.scene().success(plan.task)  # as the last frame shows it
        action = policy.act(frames[-1], TASKS[plan.task])
        done = done or action[2] >= 0.5
        actions.append(np.array([0.0, 0.0, 1.0]) if done else action)
        scene.step(actions[-1])
    return np.stack(frames), np.stack(actions).astype(np.float32), success


def encoded_episode(plan: EpisodePlan) -> list[tuple[str, bytes]]:
    """An episode as the members of a sample."""
    frames, actions, success = play(plan)
    about = {"source": "tabletop", "task": plan.task, "policy": plan.policy, "seed": plan.seed, "success": success}
    about |= {"stride": plan.table.stride, "large": plan.table.large}
    return encode_sample(episode_sample({"image": frames}, actions, TASKS[plan.task], **about))


def plans(
    count: int, first_seed: int, tasks: Sequence[str], policies: Sequence[str], frames: int, table: Table
) -> Iterator[EpisodePlan]:
    """Tasks and policies in turn, a seed each."""
    for i in range(count):
        policy = policies[i // len(tasks) % len(policies)]
        yield EpisodePlan(first_seed + i, tasks[i % len(tasks)], policy, frames, table)


def require_table(episodes: Episodes, table: Table, where: str) -> None:
    """Refuse episodes of the scene that were recorded with another stride or other sizes of things."""
    for number in {0, len(episodes) - 1} if len(episodes) else ():
        meta = json.loads(episodes.raw(number).get("meta.json", b"{}"))
        has = (meta.get("stride", 1), meta.get("large", False))
        if meta.get("source") == "tabletop" and has != (table.stride, table.large):
            raise ConfigError(
                f"{where}: its episodes have frame_stride = {has[0]} and large_objects = {str(has[1]).lower()}, "
                f"{table.stride} and {str(table.large).lower()} are asked for; change env, or record into another "
                "folder"
            )


def record(folder: Path, wanted: Sequence[EpisodePlan], workers: int = 0, tick: Any = None) -> int:
    """Write the episodes; a killed recording goes on after its last whole shard. The bytes do not depend on
    `workers`.
    """
    if folder.exists() and any(folder.glob("*.tar")):
        require_table(Episodes(folder), wanted[0].table, str(folder))
    with ShardWriter(folder, kind=VIDEO, max_bytes=64 << 20, max_samples=100, resume=folder.exists()) as writer:
        for plan, members in zip(
            islice(wanted, writer.samples, None),
            ordered_map(encoded_episode, wanted[writer.samples :], workers, chunk=4),
            strict=True,
        ):
            writer.write_encoded(members, key=f"{plan.task}-{plan.policy}-{plan.seed:07d}")
            if tick is not None:
                tick(writer.samples)
    return writer.samples
