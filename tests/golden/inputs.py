"""What the golden cases read: small made-up videos and a table of what policies do in a simulator. Helper module,
not a test.
"""

import tarfile
from pathlib import Path

import numpy as np

from terrella.core.files import write_json
from terrella.data.convert.npz import episode_sample
from terrella.data.schema import VIDEO
from terrella.data.shards import ShardWriter
from terrella.launch.released import stand_ins

ARCHIVE = Path(__file__).parent / "begun-run.tar.xz"  # see old_run.py
RENAMED = ARCHIVE.with_name("old-run.tar.xz")  # the same, by code whose kinds of stages had other names
EPISODES, FRAMES, SIDE = 8, 10, 32
RELEASED = (  # sizes of the released checkpoints' stand-ins, as the case has them
    "env.tokenizer={kind: compressive, height: 32, width: 32, channels: [8, 16, 32], encoder_resnets: 1, "
    "decoder_resnets: 2, latent: 16, "
    "groups: 4, levels: [8, 6, 5], patch: 2}",
    "env.horizon=2",
    "model={family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, max_positions: 8192}",
)


def clip(rng: np.random.Generator, actions: np.ndarray) -> np.ndarray:
    """A square that goes where the actions push it, [frames, side, side, 3]; whole numbers only, so that every
    machine draws the same.
    """
    ground, colour = rng.integers(0, 96, 3), rng.integers(128, 256, 3)
    place, frames = rng.integers(4, SIDE - 12, 2), []
    for action in actions:
        frame = np.broadcast_to(ground, (SIDE, SIDE, 3)).astype(np.uint8)
        y, x = place
        frame[y : y + 8, x : x + 8] = colour
        frames.append(frame)
        place = np.clip(place + 3 * np.sign(action[:2]).astype(np.int64), 0, SIDE - 8)
    return np.stack(frames)


def make_inputs(folder: Path) -> None:
    """Video shards with actions of the table-top scene and of RT-1, what real2sim asks a simulator, and released
    checkpoints.
    """
    rng = np.random.default_rng(7)
    for name, dims in (("video", 3), ("rt1", 13)):
        with ShardWriter(folder / name, kind=VIDEO) as writer:
            for number in range(EPISODES):
                actions = (rng.integers(-8, 9, (FRAMES, dims)) / 8).astype(np.float32)
                writer.write(
                    episode_sample({"image": clip(rng, actions)}, actions, "push the square", source="made up"),
                    key=f"{number:04d}",
                )
    first = np.stack([clip(rng, np.zeros((1, 2)))[0] for _ in range(2)])
    np.savez_compressed(folder / "first.npz", allow_pickle=False, close=first)
    rates = {
        f"close/{policy}": {"wins": wins, "judged": wins, "agree": 2}
        for policy, wins in (("scripted", 2), ("random", 0))
    }
    write_json(folder / "truth.json", {"episodes": 2, "rates": rates})
    stand_ins("video-rt1", folder, 1, 1, RELEASED)


def unpack_old_run(run: Path, packed: Path = ARCHIVE) -> None:
    """The run as its killed process left it."""
    run.mkdir(parents=True)
    with tarfile.open(packed) as archive:
        archive.extractall(run, filter="data")
