"""Records table-top episodes, and the truth that Real2Sim compares with, for machines without MuJoCo:

python -m terrella.launch.tabletop runs/tabletop --episodes 1200 --frames 24 --workers 2
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..core.progress import Progress
from ..rl.video.policies import SKILLS
from ..rl.video.record import plans, record
from ..rl.worlds.tabletop import TASKS, Table
from .settings.video import VideoReal2Sim


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--episodes", default=1200, help="Episodes for training and held-out clips.")
@click.option("--frames", default=24, help="Frames of an episode.")
@click.option("--size", nargs=2, type=int, default=(64, 64), help="Height and width of a frame.")
@click.option("--stride", default=1, help="Tenths of a second from frame to frame: env.frame_stride.")
@click.option("--large", is_flag=True, help="Larger block, goal and pusher: env.large_objects.")
@click.option("--workers", default=2, help="Processes.")
@click.option("--first-seed", default=100_000, help="Seed of the first episode.")
@click.option(
    "--truth-episodes", default=30, help="Episodes of each task and policy in the true simulator; 0 for none."
)
def main(
    out: Path,
    episodes: int,
    frames: int,
    size: tuple[int, int],
    stride: int,
    large: bool,
    workers: int,
    first_seed: int,
    truth_episodes: int,
) -> None:
    """Write OUT/shards, and OUT/truth for the stage `video-real2sim`. The same command again goes on where it was
    stopped.
    """
    start = time.monotonic()
    progress = Progress("episodes", episodes)
    table = Table(*size, stride, large)
    wanted = list(plans(episodes, first_seed, list(TASKS), list(SKILLS), frames, table))
    record(out / "shards", wanted, workers, progress.update)
    took = time.monotonic() - start
    click.echo(
        f"{episodes} episodes of {frames} frames in {took:.0f} s: {3600 * episodes / took:.0f} an hour if none was "
        "there before"
    )
    if truth_episodes:
        from .stages.video_real2sim import make_truth

        stage = VideoReal2Sim(kind="video-real2sim", name="truth", models=[], episodes=truth_episodes, frames=frames)
        make_truth(stage, out / "truth", table)


if __name__ == "__main__":
    main()
