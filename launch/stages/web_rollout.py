"""A model plays tasks; trajectories go to shards, judged by the world or by the outcome reward model."""

from __future__ import annotations

import shutil
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.webrl.episode import WebEpisode
from ...rl.webrl.orm import accuracy
from ...rl.webrl.steps import WebTrajectory, write_trajectories
from ...rl.worlds.web.generate import SiteTask
from ..job import Job
from ..settings.web import WebRollout
from .common import build_engine
from .session import open_session
from .web import SHOWN, STEPS, Players, begin_phase, read_tasks, strip
from .web_orm import judge

Seat = tuple[int, SiteTask, int]


def run(stage: WebRollout, job: Job) -> dict[str, Any]:
    """Play all tasks. After a kill what was sampled is not sampled again; shards are written last."""
    tasks = read_tasks(job, stage.tasks)
    seats: list[Seat] = list(job.mesh.share([(i, task, s) for i, task in enumerate(tasks) for s in range(stage.samples)]))
    if stage.orm is None and not all(task.task.evaluation.checkable for task in tasks):
        raise ConfigError(f"stages: {stage.name}.orm: the tasks of '{stage.tasks}' have no ground truth; name an outcome reward model")
    engine = build_engine(job, None, stage.model)
    begin_phase(job)
    players = Players(job)
    progress = Progress(stage.name, len(seats), speak=job.mesh.is_main)
    kept: list[WebTrajectory] = []
    shown: list[dict[str, Any]] = []

    def note(seat: Seat, episode: WebEpisode) -> None:
        if len(shown) < SHOWN:
            shown.append(strip(seat, episode))
        kept.append(episode.trajectory(f"{seat[0]:06d}-{seat[2]}"))
        progress.update(len(kept))

    with open_session(job, stage.name, engine, stage.rollouts, 0, {}) as session:
        if session.publish is not None:
            session.publish(engine.steps)
        seed = fold(job.recipe.seed, 31)

        def play() -> tuple[list[WebTrajectory], int]:
            played = players.play(session.sampler, seats, stage.temperature, seed, stage.at_once, note)
            return kept, len(played) - len(kept)

        kept, invalid = job.mesh.from_leader(play)
    told: dict[str, Any] = {}
    if stage.orm is not None:
        scores = judge(job, stage.orm, kept)
        judged = [(p, t.success) for p, t in zip(scores, kept, strict=True) if t.score is not None]
        found = accuracy([p for p, _ in judged], [truth for _, truth in judged]) if judged else {}
        told = {f"orm/{name}": getattr(value, "value", value) for name, value in found.items()}
        kept = [t.labelled(p) for t, p in zip(kept, scores, strict=True)]
    folder = make_folder(job.stage_folder(stage.name))
    if job.mesh.is_main:
        job.run.guard()
        shutil.rmtree(folder / STEPS, ignore_errors=True)
        job.run.write_rollouts(stage.name, 0, shown)
    job.mesh.barrier()
    steps = job.mesh.from_leader(lambda: write_trajectories(folder / STEPS, kept, f"rank{job.mesh.data_rank:03d}"))
    mine = {
        "trajectories": len(kept),
        "invalid": invalid,
        "steps": steps,
        "successes": sum(t.success for t in kept),
        "solved": sum((t.score or 0.0) >= 1.0 for t in kept),
    }
    parts = job.mesh.gather(mine)
    job.mesh.barrier()  # all shards are written
    total = {key: sum(part[key] for part in parts) for key in mine}
    return {**total, "success_rate": total["successes"] / max(total["trajectories"], 1), **told}
