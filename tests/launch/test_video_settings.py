"""Settings of video recipes: the published sizes follow from them, and mistakes are named."""

from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import recipe
from terrella.launch.settings.video import VideoReward


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
    text = (recipe.RECIPES / "video-tiny.yaml").read_text().replace("world: video", "world: SimpleSokoban")
    path = tmp_path / "r.yaml"
    path.write_text(text[: text.index("video:\n")] + text[text.index("model:\n") :])
    with pytest.raises(ConfigError, match="does not fit the world"):
        recipe.load(str(path))


def test_reward_weights() -> None:
    assert VideoReward().weights == {"mae": 1.0, "mse": 0.0, "psnr": 0.0, "ssim": 0.0, "lpips": 1.0, "lpips_alex": 0.0}
