"""Self-play of agents: episodes, their turns with the states that the stage asks for, shards of turns to imitate."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...core.progress import Progress
from ...core.rng import fold
from ...data.schema import TEXT
from ...data.shards import ShardWriter
from ...data.trajectory import Invalid, Role
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
    if job.ranks > 1 and stage.groups % job.ranks:
        raise ConfigError(f"stages: {stage.name}.groups = {stage.groups} must be a multiple of the {job.ranks} ranks")
    tokenizer = tokenizer_of(job)
    tags = weights_of(job, stage.tags)
    seats: list[Seat] = list(job.share(deal(tasks_of(job, tags), tags, stage.groups, stage.samples_per_group, stage.first_seed)))
    player = Player(tokenizer, stage.agent)
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=(tokenizer.eos_id,))
    progress = Progress(stage.name, len(seats), speak=job.speaks)
    trajectories = []

    def play(sampler: Sampler) -> None:
        each = stage.groups_at_once * stage.samples_per_group
        for at in range(0, len(seats), each):
            trajectories.extend(player.play(sampler, seats[at : at + each], params, fold(job.recipe.seed, 4)))
            progress.update(len(trajectories))

    if stage.again is not None:
        play(ReplaySampler(job.stage_folder(stage.again) / "journal"))
    elif stage.model is None:
        play(RandomPlayer(world_finder(seats), tokenizer, min(stage.random_actions, stage.agent.actions_per_turn), stage.agent.fmt))
    else:
        engine = build_engine(job, None, stage.model)
        with open_session(job, stage.name, engine, stage.rollouts, 0, {}) as session:
            if session.publish is not None:
                session.publish(engine.steps)
            play(session.sampler)
    whole = [s for s, t in zip(seats, trajectories, strict=True) if not isinstance(t.reward, Invalid)]
    written = [(seat, lesson) for seat in whole for lesson in _lessons(stage, seat)]
    if job.speaks:
        job.run.write_rollouts(stage.name, 0, picture(0, seats, trajectories, turns_of))
    counts = write(stage, job, written)
    told = job.gather(
        {
            "trajectories": len(whole),
            "invalid": len(seats) - len(whole),
            "actions": actions_taken(trajectories),
            "successes": sum(bool(t.info.get("success")) for t in trajectories),
            "turns": sum(len(s.episode.parsed) for s in whole if s.episode),
            "tagged": round(tagged_share([s.episode for s in whole if s.episode]) * sum(len(s.episode.parsed) for s in whole if s.episode)),
            **counts,
        }
    )
    total = {key: sum(part[key] for part in told) for key in told[0]}
    return {**total, "kept_share": total["tagged"] / max(total["turns"], 1)}


def _lessons(stage: AgentPlay, seat: Seat) -> list[Lesson]:
    assert seat.episode is not None
    return lessons(seat.episode, stage.states, stage.only_tagged, stage.validation_share, stage.learn_blanks)


def write(stage: AgentPlay, job: Job, written: list[tuple[Seat, Lesson]]) -> dict[str, int]:
    """One sample a turn: its text, its very token ids with their roles, and where it comes from. Every rank writes its own shards."""
    folder, counts = job.stage_folder(stage.name), {}
    if job.speaks:
        job.run.guard()
        for part in (TRAIN, HELD_OUT):
            shutil.rmtree(folder / part, ignore_errors=True)
            make_folder(folder / part)
    job.barrier()
    for part in (TRAIN, HELD_OUT):
        with ShardWriter(folder / part, kind=TEXT, prefix=f"rank{job.rank:03d}") as writer:
            for seat, lesson in written:
                if lesson.held_out == (part == HELD_OUT):
                    writer.write(sample_of(seat, lesson))
        counts[f"{part}_lessons"] = writer.samples
    job.barrier()
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
