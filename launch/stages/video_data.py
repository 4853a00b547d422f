"""Video episodes: recorded in the table-top scene, or the shards that a recipe names."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.progress import Progress
from ...rl.video.clips import Episodes
from ...rl.video.config import VideoEnvironment
from ..job import Job
from ..settings.video import VideoData


def video_settings(job: Job) -> VideoEnvironment:
    """The recipe's environment, which the stages of video agree on."""
    assert isinstance(job.recipe.env, VideoEnvironment), "a recipe of video stages has an env of kind video"
    return job.recipe.env


def check(stage: VideoData, job: Job) -> None:
    """Shards that are named are there, and both splits have episodes."""
    if stage.shards is not None and job.mesh.is_main:
        _episodes(stage)


def _episodes(stage: VideoData) -> dict[str, Any]:
    assert stage.shards is not None
    held = {
        split: len(Episodes(stage.shards, every=stage.heldout_every, heldout=split == "heldout"))
        for split in ("train", "heldout")
    }
    if not held["train"] or not held["heldout"]:
        raise ConfigError(
            f"stages: {stage.name}.shards has {held['train']} + {held['heldout']} episodes; lower heldout_every"
        )
    return {"episodes": held["train"], "heldout_episodes": held["heldout"]}


def run(stage: VideoData, job: Job) -> dict[str, Any]:
    """Record both splits; seeds of the held-out one are never trained on."""
    if stage.shards is not None:
        return _episodes(stage)
    if job.mesh.is_main:
        from ...rl.video.record import plans, record

        t = video_settings(job).tokenizer
        made = (stage.tasks, stage.policies, stage.frames, t.height, t.width)
        for split, count, seed in (
            ("train", stage.episodes, stage.first_seed),
            ("heldout", stage.heldout_episodes, stage.first_seed + stage.episodes),
        ):
            progress = Progress(f"recording, {split}", count)
            record(
                job.stage_folder(stage.name) / split, list(plans(count, seed, *made)), stage.workers, progress.update
            )
    job.mesh.barrier()
    return {"episodes": stage.episodes, "heldout_episodes": stage.heldout_episodes}
