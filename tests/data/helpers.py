"""Functions that worker processes of the data tests import; the published video layouts, and episodes as they were
before they became samples.
"""

from typing import Any

import numpy as np

from terrella.data.pictures import decode_picture
from terrella.data.shards.writer import encode_sample
from terrella.data.video_layout import VideoLayout

RT1_SINGLE = VideoLayout()
RT1_MULTI = VideoLayout(frame_tokens=80, context_tokens=1280, history=1, horizon=7, markers=False)


def square(i: int) -> list[tuple[str, bytes]]:
    return encode_sample({"n.json": i * i})


def policy_mask(layout: VideoLayout) -> np.ndarray:
    """What a rollout samples: forced actions carry no policy, KL or entropy term."""
    return np.concatenate([np.full(s.tokens, not s.given) for s in layout.segments])


def episode_views(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    """The frames of each view of a sample, as they were before episode_sample."""
    meta, names = sample["meta.json"], sorted(f for f in sample if f.startswith("frames.") and f != "frames.mp4")
    count = meta["frames"]
    pictures = [decode_picture(sample[n]).reshape(meta["shape"]).astype(meta["dtype"]) for n in names]
    return {view: np.stack(pictures[i * count : (i + 1) * count]) for i, view in enumerate(meta["views"])}
