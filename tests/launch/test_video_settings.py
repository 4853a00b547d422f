"""Settings of video recipes: the published sizes follow from them, and mistakes are named."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from terrella.core.errors import ConfigError
from terrella.core.mesh import Mesh
from terrella.launch import recipe, released
from terrella.launch.recipe_files import find
from terrella.launch.settings.video import VideoReal2Sim, VideoReward


def test_shipped_recipes_have_the_published_layouts() -> None:
    multi, single = (recipe.load(name).video for name in ("video-rt1", "video-rt1-single"))
    assert multi is not None and single is not None
    assert (multi.layout.total, multi.layout.prompt, multi.layout.response, multi.layout.vocab) == (2024, 1373, 651, 9008)
    assert (single.layout.total, single.layout.prompt, single.layout.response, single.layout.vocab) == (1654, 1333, 321, 4633)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("world=language", "video"),
        ("video.action_dims=5", "action_dims"),
        ("video.tokenizer.height=60", "height"),
        ("video.horizon=40", "max_positions"),
        ("stages.4.reward={mae: 0, lpips: 0}", "at least one metric"),
        ("stages.6.headline=lpips", "headline"),
        ("stages.3.data=nowhere", "nowhere"),
        ("stages.1.window=1", "window"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.load("video-tiny", (override,))


def test_other_worlds_have_no_video_stages(tmp_path: Path) -> None:
    text = find("video-tiny").path.read_text().replace("world: video", "world: language")
    path = tmp_path / "r.yaml"
    path.write_text(text[: text.index("video:\n")] + text[text.index("model:\n") :])
    with pytest.raises(ConfigError, match="does not fit the world"):
        recipe.load(str(path))


def test_reward_weights() -> None:
    assert VideoReward().weights == {"mae": 1.0, "mse": 0.0, "psnr": 0.0, "ssim": 0.0, "lpips": 1.0, "lpips_alex": 0.0}


def test_published_updates_control_and_export() -> None:
    for name in ("video-rt1", "video-rt1-single"):
        stages = {stage.name: stage for stage in recipe.load(name).stages}
        rlvr, control = stages["rlvr"], stages["control"]
        assert (rlvr.prompts_per_step, rlvr.samples_per_prompt, rlvr.updates_per_rollout, rlvr.steps) == (128, 16, 4, 200)
        assert control.match_tokens_of == "rlvr" and stages["evaluate"].control == "control" and stages["export"].model == "rlvr"
        table = {stage.name: stage for stage in recipe.load(f"{name}-released").stages}
        assert all(table[arm].released for arm in ("tokenizer", "pretrain", "rlvr")) and table["evaluate"].models == ["pretrain", "rlvr"]


def test_what_a_stage_needs_is_checked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from terrella.launch.recipe import with_vocab
    from terrella.launch.worker import STAGES, check_stages

    monkeypatch.setenv("TERRELLA_LPIPS", str(tmp_path))
    size = ("video.tokenizer.height=32", "video.tokenizer.width=64")
    narrow = tuple(released.stand_ins("video-rt1", tmp_path, 16, 1, size))
    loaded = recipe.load("video-rt1", (*size, *narrow))
    assert loaded.video is not None
    job = SimpleNamespace(recipe=loaded, model=with_vocab(loaded, loaded.video.layout.vocab), mesh=Mesh())
    stages = {stage.name: stage for stage in loaded.stages}
    world, kept = (str(tmp_path / name) for name in ("rt1-world-model-multi-step-base", "rt1-compressive-tokenizer"))
    check_stages([replace(stages["tokenizer"], released=kept), replace(stages["pretrain"], released=world)], job)  # type: ignore[arg-type]
    for stage, told in (
        (stages["tokenizer"], r"LPIPS needs .*vgg\.safetensors"),
        (stages["rlvr"], r"LPIPS needs .*vgg\.safetensors"),
        (replace(stages["evaluate"], metrics=["mae", "lpips_alex"], headline="mae"), r"LPIPS needs .*alex\.safetensors"),
        (replace(stages["pretrain"], released=str(tmp_path / "nowhere")), "nowhere: neither a folder nor a pinned hub id"),
        (replace(stages["tokenizer"], released=world), r"block_out_channels|channels is|config\.json"),
        (VideoReal2Sim("video-real2sim", "sim", ["pretrain"], "tokens"), "RT-1's policies are TensorFlow files"),
    ):
        assert stage.kind in STAGES
        with pytest.raises(ConfigError, match=told):
            check_stages([stage], job)  # type: ignore[arg-type]
    job.model = replace(job.model, ffn=64)
    with pytest.raises(ConfigError, match="ffn is 192, the engine's model has 64"):
        check_stages([replace(stages["pretrain"], released=world)], job)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "setting"), [("pretrain", "sequences_per_step = 32"), ("rlvr", "prompts_per_step = 128")])
def test_a_batch_that_cannot_be_dealt_evenly_is_refused_before_the_first_stage(stage: str, setting: str) -> None:
    from terrella.launch.worker import check_stages

    chosen = next(s for s in recipe.load("video-rt1").stages if s.name == stage)
    with pytest.raises(ConfigError, match=f"stages: {stage}.{setting} must be a multiple of the 3 data ranks"):
        check_stages([chosen], SimpleNamespace(mesh=Mesh(0, 3)))
