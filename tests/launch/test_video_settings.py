"""Settings of video recipes: the published sizes follow from them, and mistakes are named."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from terrella.core.by_path import ByPath, OwnFile
from terrella.core.errors import ConfigError, StorageError
from terrella.core.mesh import Mesh
from terrella.core.rng import fold
from terrella.launch import recipe, released
from terrella.launch.commands.check_recipe import look
from terrella.launch.recipe_warnings import find_warnings
from terrella.launch.settings.video import VideoReal2Sim, VideoTokenizerTraining
from terrella.rl.video.artifacts import action_bins
from terrella.rl.video.clips import Episodes, place_in, training_clip
from terrella.rl.video.config import VideoEnvironment, VideoReward
from terrella.tests.rl.video import drawers


def test_shipped_recipes_have_the_published_layouts() -> None:
    multi, single = (recipe.load(name).env for name in ("video-rt1", "video-rt1-single"))
    assert isinstance(multi, VideoEnvironment) and isinstance(single, VideoEnvironment)
    assert (multi.layout.total, multi.layout.prompt, multi.layout.response, multi.layout.vocab) == (
        2024,
        1373,
        651,
        9008,
    )
    assert (single.layout.total, single.layout.prompt, single.layout.response, single.layout.vocab) == (
        1654,
        1333,
        321,
        4633,
    )


class Numbered(Episodes):
    """Episodes of 40 frames, each of which is its own number."""

    def __init__(self) -> None:
        self.numbers = [*range(5)]

    def length(self, episode: int) -> int:
        return 40

    def frames(self, episode: int, wanted: Sequence[int]) -> np.ndarray:
        return np.array(wanted)


@pytest.mark.parametrize("window", [0, 12])
def test_the_distances_that_a_tokenizer_is_told_to_see_are_those_it_is_trained_on(window: int) -> None:
    stage = next(s for s in recipe.load("video-tiny").stages if isinstance(s, VideoTokenizerTraining))
    stage, seen = replace(stage, window=window, frames_per_clip=3), set[int]()
    for number in range(1500):
        frames, context = training_clip(Numbered(), 0, number, 3, True, window)
        seen |= {int(frame - context) for frame in frames}
    assert seen == {*stage.context_distances} and (0 in seen) == (window == 0)
    env, shown = recipe.load("video-tiny").env, set[int]()
    assert isinstance(env, VideoEnvironment)
    env = replace(env, recording=None, shards="shards", context_reach=6)
    for number in range(1500):
        place = place_in(Numbered(), 0, (fold(0, number),), env.layout.frames, env.context_reach)
        shown |= {place.start + i - place.context for i in range(env.layout.frames)}
    assert shown == {*env.context_distances}


def test_distances_that_a_tokenizer_never_saw_are_told_of(tmp_path: Path) -> None:
    """Of the clips and of Real2Sim, with the setting; none where the tokenizer's window reaches as far."""
    given = ("env.context_reach=4", "stages.tokenizer.window=9", "stages.real2sim.frames=14", "env.horizon=4")
    told = dict(find_warnings(recipe.load("video-tiny", given)))
    trained = "behind their context frame; stage 'tokenizer' trains the tokenizer on 1 to 8 (window = 9) and never on 0"
    assert told == {
        "stages.tokens": f"by env.context_reach, history and horizon pictures lie 0 to 8 {trained}",
        "stages.real2sim": f"by its frames pictures lie 0 to 13 {trained} and 9 to 13",
    }
    found = [check.what for check in look(recipe.load("video-tiny", given), tmp_path / "run") if check.level == "warn"]
    assert found == ["stages.tokens", "stages.real2sim"]
    near = (*given, "stages.tokenizer.window=0")
    assert [*find_warnings(recipe.load("video-tiny", near))] == []
    assert [*find_warnings(recipe.load("video-rt1-single"))] == []  # frames without a context


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.action_dims=5", "action_dims"),
        ("env.tokenizer.height=60", "height"),
        ("env.horizon=40", "max_positions"),
        ("env.reward={mae: 0, lpips: 0}", "at least one metric"),
        ("env.headline=lpips", "headline"),
        ("env.best_of=[0, 4]", "best_of: the best of 0 samples is none"),
        ("env.recording.tasks=[]", "tasks: name at least one"),
        ("env.recording.tasks=[push, pul]", "tasks: 'pul' is none of push, open, close"),
        ("env.recording.policies=[scriptd]", "policies: 'scriptd' is none of scripted, noisy, weak, random"),
        ("env.data=nowhere", "nowhere"),
        ("video={horizon: 2}", "the section 'video' is part of env now"),
        ("stages.1.window=1", "window"),
        ("env.recording=null", "recording: name the episodes to record, or shards"),
        ("env.heldout_every=1", "heldout_every"),
        ("env.episodes=nowhere", "'data' refers to 'nowhere', which is no earlier stage"),
        ("env.tokenizer_stage=data", "'tokenizer' makes a tokenizer that env.tokenizer_stage does not name"),
        ("stages.real2sim.repetition_penalty=0", "repetition_penalty: 0.0 must be above 0"),
        ("stages.pretrain.init=tokenizer", "init: 'tokenizer' of kind video-tokenizer leaves no model"),
        ("stages.real2sim.models=[tokenizer]", "models: 'tokenizer' of kind video-tokenizer leaves no model"),
        ("stages.pretrain.env={history: 2}", "'pretrain': env.history: differs from that of 'data'"),
        ("stages.data.kind=video-data", "settings in an env of kind video whose episodes is this stage"),
        ("stages.tokens.kind=video-tokens", "'collect' now; write that, and its settings in an env of kind video"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.load("video-tiny", (override,))


def test_stages_of_video_need_its_environment(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: r\nmodel: {vocab: 300}\nstages:\n- {kind: video-real2sim, name: sim, models: []}\n")
    with pytest.raises(ConfigError, match="'sim' of kind video-real2sim needs an env of kind video"):
        recipe.load(str(path))


def test_reward_weights() -> None:
    assert VideoReward().weights == {"mae": 1.0, "mse": 0.0, "psnr": 0.0, "ssim": 0.0, "lpips": 1.0, "lpips_alex": 0.0}


def test_published_updates_control_and_export() -> None:
    for name in ("video-rt1", "video-rt1-single"):
        stages = {stage.name: stage for stage in recipe.load(name).stages}
        rlvr, control = stages["rlvr"], stages["control"]
        assert (rlvr.prompts_per_step, rlvr.samples_per_prompt, rlvr.updates_per_rollout, rlvr.steps) == (
            128,
            16,
            4,
            200,
        )
        assert (
            control.match_tokens_of == "rlvr"
            and stages["evaluate"].control == "control"
            and stages["export"].model == "rlvr"
        )
        table = {stage.name: stage for stage in recipe.load(f"{name}-released").stages}
        assert table["tokenizer"].released and table["pretrain"].folder and table["rlvr"].folder
        assert table["evaluate"].names == ["pretrain", "rlvr"]


def test_what_a_stage_needs_is_checked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from terrella.launch.commands.check_recipe import alone
    from terrella.launch.settings.verbs import Start
    from terrella.launch.worker import STAGES, check_stages

    monkeypatch.setenv("TERRELLA_LPIPS", str(tmp_path))
    size = ("env.tokenizer.height=32", "env.tokenizer.width=64")
    narrow = tuple(released.stand_ins("video-rt1", tmp_path, 16, 1, size))
    loaded = recipe.load("video-rt1", (*size, *narrow))
    job: Any = alone(loaded, tmp_path / "run")
    stages = {stage.name: stage for stage in loaded.stages}
    world, kept = (str(tmp_path / name) for name in ("rt1-world-model-multi-step-base", "rt1-compressive-tokenizer"))
    check_stages(
        [replace(stages["tokenizer"], released=kept), Start("start", "pretrain", world), stages["pretrain"]], job
    )
    own = ByPath(f"{drawers.__file__}:Skilled")
    alexnet = replace(loaded.env, metrics=["mae", "lpips_alex"], headline="mae")
    for stage, told in (
        (stages["tokenizer"], r"LPIPS needs .*vgg\.safetensors"),
        (stages["rlvr"], r"LPIPS needs .*vgg\.safetensors"),
        (replace(stages["evaluate"], env=alexnet), r"LPIPS needs .*alex\.safetensors"),
        (Start("start", "pretrain", str(tmp_path / "nowhere")), "nowhere: neither a folder nor a pinned hub id"),
        (replace(stages["tokenizer"], released=world), r"block_out_channels|channels is|config\.json"),
        (VideoReal2Sim("video-real2sim", "sim", ["pretrain"]), "'scripted' plays the table-top scene"),
        (VideoReal2Sim("video-real2sim", "sim", ["pretrain"], policies=[own]), "name a file with the true success"),
        (
            VideoReal2Sim(
                "video-real2sim", "sim", ["pretrain"], ["open"], [own], truth=OwnFile(tmp_path / "none.yaml")
            ),
            r"none\.yaml cannot be read",
        ),
    ):
        assert stage.kind in STAGES
        with pytest.raises(ConfigError, match=told):
            check_stages([stage], job)
    job.model = replace(job.model, ffn=64)
    with pytest.raises(ConfigError, match="ffn is 192, the engine's model has 64"):
        check_stages([Start("start", "pretrain", world)], job)


def test_real2sim_takes_policies_by_name_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Weak: ...\nclass weak: ...\n")
    for given, message in (
        ("[scripted, sctipted]", "did you mean 'scripted'"),
        (f"['{tmp_path}/mine.py:weak', weak]", "two are called 'weak'"),
        (f"['{tmp_path}/gone.py:Weak']", r"gone\.py"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe.load("video-tiny", (f"stages.real2sim.policies={given}",))
    held = recipe.load("video-tiny", (f"stages.real2sim.policies=['{tmp_path}/mine.py:Weak', weak]",))
    stage = next(s for s in held.stages if s.name == "real2sim")
    assert stage.policies[1] == "weak" and stage.policies[0].path.endswith("mine.py:Weak")


def test_a_batch_that_cannot_be_dealt_evenly_is_refused_before_the_first_stage() -> None:
    from terrella.launch.worker import check_stages

    chosen = next(s for s in recipe.load("video-rt1").stages if s.name == "rlvr")
    with pytest.raises(
        ConfigError, match=r"stages: rlvr\.prompts_per_step = 128 must be a multiple of the 3 data ranks"
    ):
        check_stages([chosen], SimpleNamespace(mesh=Mesh(0, 3)))
    tiny = recipe.load("video-tiny", ("ranks=3", "stages.tokenizer.clips_per_step=4", "stages.tokenizer.loss.lpips=0"))
    tokenizer = next(s for s in tiny.stages if s.name == "tokenizer")
    with pytest.raises(ConfigError, match=r"stages: tokenizer\.clips_per_step = 4 must be a multiple of the 3 ranks"):
        check_stages([tokenizer], SimpleNamespace(mesh=Mesh(), recipe=tiny))


def test_a_truth_of_other_trials_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    from terrella.launch.stages.video_real2sim import FIRST, TRUTH, check, keep_truth, made_under

    tiny = recipe.load("video-tiny")
    env: Any = tiny.env
    stage = next(s for s in tiny.stages if s.name == "real2sim")
    stage = replace(stage, truth=OwnFile(tmp_path / TRUTH))
    job: Any = SimpleNamespace(recipe=tiny)
    rates = {f"{t}/{p}": {"wins": 1, "judged": 1, "agree": 1} for t in stage.tasks for p in stage.policies}
    np.savez_compressed(tmp_path / FIRST, close=np.zeros((1, 2, 2, 3), np.uint8))
    keep_truth(tmp_path, stage.episodes, rates, made_under(stage, env.table))
    check(stage, job)
    with pytest.raises(ConfigError, match=r"truth\.json was made with first_seed = "):
        check(replace(stage, first_seed=7), job)
    keep_truth(tmp_path, stage.episodes, dict([*rates.items()][:-1]), made_under(stage, env.table))
    with pytest.raises(ConfigError, match=f"truth\\.json has no {[*rates][-1]}"):
        check(stage, job)
    (tmp_path / FIRST).unlink()
    with pytest.raises(StorageError, match=r"first\.npz: is not there"):
        check(stage, job)
    (tmp_path / TRUTH).write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"truth\.json has no rates of tasks and policies"):
        check(stage, job)


def test_the_table_is_the_one_that_the_settings_say_for_everybody() -> None:
    env: Any = recipe.load("video-tiny", ("env.frame_stride=3", "env.large_objects=true")).env
    assert (env.table.height, env.table.stride, env.table.large) == (32, 3, True)
    assert action_bins(env, cast(Any, None)).ranges[0] == (-env.table.reach, env.table.reach)
    assert env.table.reach == pytest.approx(3 * recipe.load("video-tiny").env.table.reach)  # type: ignore[union-attr]
    for setting in ("env.frame_stride=2", "env.large_objects=true"):
        with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]}: belongs to the table-top scene"):
            recipe.load("video-rt1", (setting,))
    with pytest.raises(ConfigError, match="frame_stride: 0 must be above 0"):
        recipe.load("video-tiny", ("env.frame_stride=0",))
