"""Self-play of agents: episodes, their turns with the states that the stage asks for, shards of turns to imitate."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np

from ...core.files import make_folder
from ...core.progress import Progress
from ...core.rng import fold
from ...data.schema import TEXT
from ...data.shards import ShardWriter
from ...data.trajectory import Invalid, Role, Trajectory
from ...rl.agents.rollout import Player, Seat, actions_taken, deal, turns_of, world_finder
from ...rl.agents.selfplay import Lesson, RandomPlayer, lessons, tagged_share
from ...rl.journal import ReplaySampler
from ...rl.rollout.sampler import Sampler, SamplingParams
from ..job import Job
from ..settings.agent import AgentPlay
from .agent import HELD_OUT, TRAIN, tasks_of, tokenizer_of, weights_of
from .common import build_engine
from .on_policy import picture
from .session import open_session


def run(stage: AgentPlay, job: Job) -> dict[str, Any]:
    """Play all groups and write the lessons. After a kill what was sampled is not sampled again; shards are written last."""
    job.mesh.require_even(stage.groups, f"stages: {stage.name}.groups")
    tokenizer = tokenizer_of(job)
    tags = weights_of(job, stage.tags)
    seats: list[Seat] = list(job.mesh.share(deal(tasks_of(job, tags), tags, stage.groups, stage.samples_per_group, stage.first_seed)))
    player = Player(tokenizer, stage.agent)
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=tokenizer.stop_ids)
    progress = Progress(stage.name, len(seats), speak=job.mesh.is_main)

    def play(sampler: Sampler) -> list[Trajectory]:
        each, played = stage.groups_at_once * stage.samples_per_group, []
        for at in range(0, len(seats), each):
            played += player.play(sampler, seats[at : at + each], params, fold(job.recipe.seed, 4))
            progress.update(len(played))
        return played

    def learn(sampler: Sampler) -> dict[str, int]:
        """Play, and write what the leader's episodes teach."""
        trajectories = play(sampler)
        whole = [s for s, t in zip(seats, trajectories, strict=True) if not isinstance(t.reward, Invalid)]
        if job.mesh.is_main:
            job.run.write_rollouts(stage.name, 0, picture(0, seats, trajectories, turns_of))
        episodes = [s.episode for s in whole if s.episode]
        turns = sum(len(e.parsed) for e in episodes)
        return {
            "trajectories": len(whole),
            "invalid": len(seats) - len(whole),
            "actions": actions_taken(trajectories),
            "successes": sum(bool(t.info.get("success")) for t in trajectories),
            "turns": turns,
            "tagged": round(tagged_share(episodes) * turns),
            **write(stage, job, [(seat, lesson) for seat in whole for lesson in _lessons(stage, seat)]),
        }

    empty(stage, job)
    if stage.again is not None:
        told = job.mesh.from_leader(lambda: learn(ReplaySampler(job.stage_folder(str(stage.again)) / "journal")))
    elif stage.model is None:
        actions = min(stage.random_actions, stage.agent.actions_per_turn)
        told = job.mesh.from_leader(lambda: learn(RandomPlayer(world_finder(seats), tokenizer, actions, stage.agent.fmt)))
    else:
        engine = build_engine(job, None, stage.model)
        with open_session(job, stage.name, engine, stage.rollouts, 0, {}) as session:
            if session.publish is not None:
                session.publish(engine.steps)
            told = job.mesh.from_leader(lambda: learn(session.sampler))
    parts = job.mesh.gather(told)
    job.mesh.barrier()  # all shards are written
    total = {key: sum(part[key] for part in parts) for key in told}
    return {**total, "kept_share": total["tagged"] / max(total["turns"], 1)}


def _lessons(stage: AgentPlay, seat: Seat) -> list[Lesson]:
    assert seat.episode is not None
    return lessons(seat.episode, stage.states, stage.only_tagged, stage.validation_share, stage.learn_blanks)


def empty(stage: AgentPlay, job: Job) -> None:
    """Folders for the lessons; what a killed stage had begun to write goes."""
    if job.mesh.is_main:
        job.run.guard()
        for part in (TRAIN, HELD_OUT):
            shutil.rmtree(job.stage_folder(stage.name) / part, ignore_errors=True)
            make_folder(job.stage_folder(stage.name) / part)
    job.mesh.barrier()


def write(stage: AgentPlay, job: Job, written: list[tuple[Seat, Lesson]]) -> dict[str, int]:
    """One sample a turn: its text, its very token ids with their roles, and where it comes from. Every data rank has its own shards."""
    counts = {}
    for part in (TRAIN, HELD_OUT):
        with ShardWriter(job.stage_folder(stage.name) / part, kind=TEXT, prefix=f"rank{job.mesh.data_rank:03d}") as writer:
            for seat, lesson in written:
                if lesson.held_out == (part == HELD_OUT):
                    writer.write(sample_of(seat, lesson))
        counts[f"{part}_lessons"] = writer.samples
    return counts


def sample_of(seat: Seat, lesson: Lesson) -> dict[str, Any]:
    """A lesson as a sample of the text kind."""
    episode = seat.episode
    assert episode is not None
    prompt = [i for i, role in zip(lesson.sequence.ids, lesson.sequence.roles, strict=True) if role == Role.PROMPT]
    return {
        "messages.json": [
            {"role": "user", "content": episode.tokenizer.decode(prompt[: lesson.asked])},
            {"role": "assistant", "content": lesson.text},
        ],
        "states.json": [episode.states[lesson.turn], episode.states[lesson.turn + 1]],
        "meta.json": {
            "schema": TEXT,
            "task": seat.task.name,
            "seed": seat.seed,
            "sample": seat.sample_index,
            "turn": lesson.turn,
            "success": episode.success,
            "reward": float(sum(turn.reward for turn in episode.turns)),
        },
        "tokens.npy": np.asarray(lesson.sequence.ids, np.int32),
        "roles.npy": np.asarray(lesson.sequence.roles, np.int8),
    }
