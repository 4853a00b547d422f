"""Recorded episodes and their clips: every kind of episode in both splits, parts that share none, one table for all."""

from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrella.core.errors import ConfigError
from terrella.data.convert.npz import episode_sample
from terrella.data.schema import VIDEO, VIDEO_TOKENS
from terrella.data.shards import ShardWriter
from terrella.data.video_layout import VideoLayout
from terrella.rl.language_tasks import Made
from terrella.rl.video.artifacts import Clips
from terrella.rl.video.clips import Episodes
from terrella.rl.video.collect import count_episodes
from terrella.rl.video.config import VideoEnvironment
from terrella.rl.video.record import plans, record, require_table
from terrella.rl.video.tasks import VideoTasks
from terrella.rl.worlds.tabletop import PLAIN, TASKS, Table
from terrella.tests.rl.video.test_tasks import SETTINGS

LAYOUT = VideoLayout(16, 4, 0, 1, 1, True, 3, 8)
META = {"schema": VIDEO_TOKENS, "layout": LAYOUT.describe(), "start": 0, "context": 0}
KINDS = list(product(("scripted", "random"), ("push", "open", "close")))


def write_episodes(folder: Path, count: int, **meta: Any) -> None:
    frames, actions = np.zeros((2, 16, 16, 3), np.uint8), np.zeros((2, 3), np.float32)
    with ShardWriter(folder, kind=VIDEO) as writer:
        for i in range(count):
            policy, task = KINDS[i % len(KINDS)]
            about = {"source": "tabletop", "task": task, "policy": policy, **meta}
            writer.write(episode_sample({"image": frames}, actions, TASKS[task], **about), key=f"{i:05d}")


def settings(folder: Path, **changes: Any) -> VideoEnvironment:
    table = {"shards": str(folder), "actions": "tabletop", "action_dims": 3}
    return VideoEnvironment(**(SETTINGS | table | changes))


def test_a_split_that_holds_out_some_kinds_whole_is_refused(tmp_path: Path) -> None:
    write_episodes(tmp_path / "shards", 288)
    made = Made("data", tmp_path, {})
    for every in (5, 7):
        told = count_episodes(settings(tmp_path / "shards", heldout_every=every), made)
        assert told["episodes"] + told["heldout_episodes"] == 288
    for every in (2, 3, 4, 6):
        with pytest.raises(ConfigError, match=rf"env.heldout_every = {every}: no episode of .* no factor in common"):
            count_episodes(settings(tmp_path / "shards", heldout_every=every), made)


def test_episodes_of_another_table_are_refused(tmp_path: Path) -> None:
    write_episodes(tmp_path / "old", 3)  # of an earlier release, which had one table
    write_episodes(tmp_path / "wide", 3, stride=3, large=True)
    require_table(Episodes(tmp_path / "old"), PLAIN, "old")
    require_table(Episodes(tmp_path / "wide"), Table(stride=3, large=True), "wide")
    with pytest.raises(ConfigError, match="frame_stride = 1 and large_objects = false, 3 and true are asked for"):
        record(tmp_path / "old", list(plans(9, 0, ["push"], ["random"], 2, Table(stride=3, large=True))))
    with pytest.raises(ConfigError, match=r"env\.shards: .*frame_stride = 3"):
        count_episodes(settings(tmp_path / "wide", heldout_every=3), Made("data", tmp_path, {}))


def test_parts_of_the_training_clips_share_no_episode(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", kind=VIDEO_TOKENS, max_samples=7) as writer:
        for i in range(40):
            writer.write(
                {"tokens.npy": np.zeros(LAYOUT.total, np.uint16), "meta.json": META | {"episode": i // 4}}, key=f"{i}"
            )
    found = []
    for part in ((0.0, 0.7), (0.7, 1.0), (0.0, 1.0)):
        env = settings(tmp_path, clips_per_episode=4, train_part=part)
        tasks = VideoTasks(env, Made("tokens", tmp_path, {}))
        clips = Clips(env, Made("tokens", tmp_path, {}), "train")
        order = tasks.lesson_order(3)
        drawn = {clips[order(i)].number for i in range(len(clips))}
        assert drawn == {clip.number for clip in clips} and len(drawn) == len(clips)
        found.append({clip._sample["meta.json"]["episode"] for clip in islice(clips, len(clips))})
    assert [len(part) for part in found] == [7, 3, 10]
    assert not found[0] & found[1] and found[0] | found[1] == found[2]
    before = Clips(env, Made("tokens", tmp_path, {}, finished=False), "train")
    assert len(before) == len([*islice(before, 3)]) == 1  # the stand-in before the stage has run ends too
    with pytest.raises(ValueError, match="train_part"):
        settings(tmp_path, train_part=(0.5, 0.5))
