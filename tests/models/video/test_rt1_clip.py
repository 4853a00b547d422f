"""A real RT-1 clip through tokenizer, layout and decoder at 256 x 320. The geometry is the published one; the
networks are narrow.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from terrella.data.video_actions import RT1_RANGES, ActionBins
from terrella.models.video.config import TokenizerConfig
from terrella.models.video.tokenizer import build_tokenizer
from terrella.rl.video.imagine import ClipDecoder, to_pictures
from terrella.tests.data.helpers import RT1_MULTI, RT1_SINGLE

DATA = Path(os.environ.get("TERRELLA_SHARED_DATA", "")) / "rt1" / "fractal_sample.npz"
NARROW = {"latent": 8, "groups": 4, "encoder_resnets": 1, "decoder_resnets": 1}
pytestmark = pytest.mark.skipif(
    not os.environ.get("TERRELLA_SHARED_DATA") or not DATA.is_file(), reason="TERRELLA_SHARED_DATA is not set"
)


@pytest.mark.parametrize("kind", ["frame", "compressive"])
def test_rt1_clip(kind: str) -> None:
    with np.load(DATA) as held:
        pixels = held["image"]
    assert pixels.shape[1:] == (256, 320, 3)
    layout = RT1_SINGLE if kind == "frame" else RT1_MULTI
    channels = [4, 8, 8, 8, 8] if kind == "frame" else [4, 8, 8, 8]
    config = TokenizerConfig(kind=kind, channels=channels, **NARROW)
    assert (config.frame_tokens, config.context_tokens) == (layout.frame_tokens, layout.context_tokens)
    torch.manual_seed(0)
    model = build_tokenizer(config).eval()
    frames = to_pictures(pixels[1 : 1 + layout.frames][None], "cpu")
    codes = model.tokenize(frames, to_pictures(pixels[:1], "cpu"))
    actions = ActionBins(RT1_RANGES).encode(np.zeros((1, layout.frames, 13)))
    rows = layout.assemble(
        codes.frames_BTN.numpy(), actions, codes.context_BK.numpy() if codes.context_BK is not None else None
    )
    assert rows.shape == (1, layout.total) and rows.max() < layout.vocab
    pictures, shown = ClipDecoder(model, layout).pictures(rows)
    assert pictures.shape == (1, layout.horizon, 3, 256, 320)
    assert torch.equal(shown[:, 1:], codes.frames_BTN[:, layout.history :])
    # convolutions round differently for other batch sizes; a grey level is 4e-3
    assert torch.allclose(pictures, model.detokenize(codes)[:, layout.history :], atol=1e-4)
