"""A tiny video world for tests: a small tokenizer with fixed weights, its layout, true clips, and painted pictures
of the table.
"""

import math

import numpy as np
import torch

from terrella.data.video_layout import VideoLayout
from terrella.models.video.config import TokenizerConfig
from terrella.models.video.tokenizer import build_tokenizer
from terrella.rl.rollout.sampler import Sample, SampleRequest, interleave
from terrella.rl.video.detector import CAMERA, HALF_HEIGHT, TOPS
from terrella.rl.video.imagine import ClipDecoder, ClipTask, to_pictures
from terrella.tests.data.helpers import policy_mask

SMALL = {"height": 16, "width": 16, "channels": [8, 8, 8], "latent": 8, "groups": 4, "levels": [4, 4]}
FRAME = TokenizerConfig(**SMALL)
COMPRESSIVE = TokenizerConfig(kind="compressive", patch=2, **SMALL)


def layout_of(config: TokenizerConfig, history: int = 1, horizon: int = 3) -> VideoLayout:
    return VideoLayout(
        config.codebook,
        config.frame_tokens,
        config.context_tokens,
        history,
        horizon,
        markers=not config.context_tokens,
        action_dims=2,
        action_bins=8,
    )


def decoder_of(config: TokenizerConfig, **sizes: int) -> ClipDecoder:
    torch.manual_seed(0)
    return ClipDecoder(build_tokenizer(config).eval(), layout_of(config, **sizes))


def tasks_of(decoder: ClipDecoder, count: int, seed: int = 0) -> list[ClipTask]:
    layout, rng = decoder.layout, np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, layout.frames + 1, 16, 16, 3), dtype=np.uint8)
    x = to_pictures(pixels, "cpu")
    codes = decoder.tokenizer.tokenize(x[:, 1:], x[:, 0] if layout.context_tokens else None)
    actions = rng.integers(0, layout.action_bins, (count, layout.frames, layout.action_dims))
    context = codes.context_BK.numpy() if codes.context_BK is not None else None
    rows = layout.assemble(codes.frames_BTN.numpy(), actions, context)
    h = layout.history
    return [ClipTask(i, rows[i], pixels[i, 1 + h :], pixels[i, h]) for i in range(count)]


class Oracle:
    """A sampler that knows the true clips; `wrong` gives how many of the first sampled tokens are replaced, by
    sample index.
    """

    def __init__(self, tasks: list[ClipTask], layout: VideoLayout, wrong: tuple[int, ...] = (0,)) -> None:
        self.tasks, self.layout, self.wrong, self.calls = {t.prompt_id: t for t in tasks}, layout, wrong, 0

    def generate(self, requests: list[SampleRequest]) -> list[Sample]:
        self.calls += bool(requests)
        out = []
        for r in requests:
            _, prompt, index, _ = r.key
            ids = self.tasks[prompt].row_L[policy_mask(self.layout)].tolist()
            for i in range(self.wrong[index % len(self.wrong)]):
                ids[i] = (ids[i] + 5) % self.layout.codebook
            out.append(interleave(ids, [-1.0] * len(ids), r, "length", 0))
        return out


def paint(places: dict[str, tuple[float, float]], height: int = 64, width: int = 80) -> np.ndarray:
    """A picture of the table with things at these positions, as the camera would show them."""
    colours = {"goal": (40, 190, 60), "block": (210, 30, 25), "handle": (240, 215, 25), "pusher": (25, 50, 230)}
    sizes = {"goal": (0.05, 0.05), "block": (0.035, 0.035), "handle": (0.06, 0.012), "pusher": (0.02, 0.02)}
    picture = np.full((height, width, 3), (180, 175, 165), np.uint8)
    for name, (x, y) in places.items():
        metre = height / (2 * HALF_HEIGHT) * CAMERA / (CAMERA - TOPS[name])
        column, row = width / 2 + x * metre, height / 2 - y * metre
        w, h = sizes[name][0] * metre, sizes[name][1] * metre
        rows, columns = np.mgrid[:height, :width] + 0.5
        picture[(abs(columns - column) <= w) & (abs(rows - row) <= max(h, math.sqrt(0.5)))] = colours[name]
    return picture
