"""What a process of a run does before it computes."""

import pytest
import torch

from terrella.launch import recipe
from terrella.launch.worker import choose_kernels


def test_kernels_follow_from_the_settings_and_not_from_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch is built without oneDNN")
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    loaded = recipe.load("video-tiny")
    half = recipe.load("video-tiny", ("env.bf16=true",))
    tokenizer = next(s for s in recipe.load("video-gpu").stages if s.kind == "video-tokenizer")
    before = torch.backends.mkldnn.enabled
    try:
        for settings, plain in (
            ((loaded.precision, loaded.env, loaded.stages[0]), True),
            ((recipe.load("video-gpu").precision,), False),
            ((loaded.precision, half.env), False),
            ((loaded.precision, loaded.env, tokenizer), False),
            ((loaded.precision, None), True),
        ):
            for left_over in (True, False):
                torch.backends.mkldnn.enabled = left_over
                choose_kernels(*settings)
                assert torch.backends.mkldnn.enabled == (plain or supported), settings
    finally:
        torch.backends.mkldnn.enabled = before
