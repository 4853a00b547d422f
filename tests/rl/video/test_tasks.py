"""Video as an environment: what a check sees before anything is recorded, and what an evaluation makes of its
samples.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrella.core.errors import ConfigError
from terrella.data.trajectory import Role
from terrella.rl.evaluation import TEST, Evaluation
from terrella.rl.language_tasks import Made
from terrella.rl.video.config import VideoEnvironment, VideoReward
from terrella.rl.video.tasks import HeldOutClip, VideoTasks
from terrella.tests.rl.video.helpers import FRAME, Oracle, decoder_of, tasks_of

SETTINGS: dict[str, Any] = {
    "kind": "video",
    "episodes": "data",
    "shards": "nowhere",
    "tokenizer_stage": "tokenizer",
    "data": "tokens",
    "tokenizer": FRAME,
    "horizon": 3,
    "actions": "quantiles",
    "action_dims": 2,
    "action_bins": 8,
    "reward": VideoReward(lpips=0.0),
    "metrics": ["mae", "psnr"],
    "headline": "mae",
}


def opened(folder: Path, **changes: Any) -> VideoTasks:
    return VideoTasks(VideoEnvironment(**(SETTINGS | changes)), Made("tokens", folder, {}, finished=False))


def test_before_its_clips_are_made_there_is_one_to_check_with(tmp_path: Path) -> None:
    tasks = opened(tmp_path)
    ((lesson,),) = tasks.lessons(tasks.of("train")[:1], "stages: pretrain")
    assert len(lesson.ids) == tasks.layout.total and lesson.roles.count(Role.STATE) == tasks.lesson_tokens
    assert tasks.params(None, 1.0).max_new_tokens == tasks.layout.sampled


def test_what_would_only_be_missed_at_the_end_is_refused_before(tmp_path: Path) -> None:
    opened(tmp_path, best_of=[1, 2], runs=2).require_judge("test", 2)
    with pytest.raises(
        ConfigError, match=r"env\.best_of, env\.runs: 4 samples of a clip are asked for, the eval stage has samples = 2"
    ):
        opened(tmp_path, best_of=[1, 4]).require_judge("test", 2)


def test_a_collect_stage_of_videos_says_which_episodes_it_misses(tmp_path: Path) -> None:
    tasks = opened(tmp_path, shards=str(tmp_path / "none"))
    tasks.made.uses["episodes"] = Made("data", tmp_path, {"prompts": 3})
    with pytest.raises(ConfigError, match=r"stages: data\.prompts: env says what is made of videos"):
        tasks.require_source()
    tasks.made.uses["episodes"] = Made("data", tmp_path, {})
    tasks.require_source()  # clips are asked for when the episodes are there
    tasks.stage = "data"
    with pytest.raises(ConfigError, match="none"):
        tasks.require_source()


def test_an_evaluation_averages_its_runs_and_rejects_repeats_where_it_is_asked_to(tmp_path: Path) -> None:
    decoder = decoder_of(FRAME)
    truths = tasks_of(decoder, 3)
    stuck = [replace(t, row_L=np.array(t.row_L)) for t in truths]  # whose last two frames are the same codes
    last, before = [s for s in decoder.layout.segments if s.part == "frame"][:-3:-1]
    for task in stuck:
        task.row_L[last.start : last.stop] = task.row_L[before.start : before.stop]

    class Stuck(Oracle):
        """Repeats the last frame of every clip when it is asked first."""

        def generate(self, requests):
            self.tasks = {t.prompt_id: t for t in (truths if self.calls else stuck)}
            return super().generate(requests)

    class Given:
        """A clip that needs no shards."""

        rewarded = False

        def __init__(self, number: int) -> None:
            self.number = number

        def task(self, prompt_id: int):
            return truths[self.number]

    def judged(**changes: Any) -> tuple[VideoTasks, list]:
        tasks = opened(tmp_path, **changes)
        tasks.__dict__["decoder"] = decoder
        clips = [tasks.episode(Given(i), i, k) for i in range(3) for k in range(2)]
        assert all(isinstance(clip, HeldOutClip) for clip in clips)
        played = tasks.play(Stuck(truths, decoder.layout), clips, tasks.params(None, 1.0), 0)
        made = tasks.judgements(clips, played)
        return tasks, [made[i : i + 2] for i in range(0, 6, 2)]

    tasks, plain = judged()
    _, again = judged(reject_repeats=2)
    asked = {TEST: [Given(i) for i in range(3)]}
    both = {("one", 1.0, TEST): plain, ("two", 1.0, TEST): again}
    asked_for = Evaluation(["one", "two"], [1.0], 2, asked, both, "one", "two")
    greedy = {(name, 0.0, TEST): [samples[:1] for samples in found] for (name, _, _), found in both.items()}
    at_two = replace(asked_for, temperatures=[0.0, 1.0], judged=both | greedy)
    for tables, name in (
        (judged(runs=1)[0].results(asked_for).tables, ""),
        (judged(runs=2)[0].results(at_two).tables, "t0"),
    ):
        assert "sampling runs (1)" in tables[name]["note"] and "Standard deviation" not in tables[name]["note"]
    results = tasks.results(asked_for)
    rows = {row["name"]: row["cells"] for row in results.tables[""]["rows"]}
    assert list(rows) == [
        "the last given frame for ever",
        "one",
        "two",
        "two, repeats sampled again",
        "the true tokens, decoded",
    ]
    assert [rows[name][-1]["value"] for name in list(rows)[1:]] == [0.5, 0.5, 0.0, 0.0]
    assert rows["two, repeats sampled again"][0]["value"] == pytest.approx(
        rows["the true tokens, decoded"][0]["value"], abs=1e-6
    )
    assert results.outcome["two minus one/mae"]["value"] == 0 and len(results.pages["videos"]["clips"]) == 3
