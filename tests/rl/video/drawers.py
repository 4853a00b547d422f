"""A user's own folder for Real2Sim: recorded episodes in RT-1's layout, policies, a judge and the true rates. Helper
module, not a test.

A picture is a dark cabinet with a bright bar for its drawer; RT-1's world_vector moves the bar up and down.
"""

from pathlib import Path

import numpy as np

from terrella.data.convert.npz import episode_sample
from terrella.data.schema import VIDEO
from terrella.data.shards import ShardWriter

TASKS = ("open top drawer", "open middle drawer", "close top drawer")
POLICIES = '''
import numpy as np


class Skilled:
    """Pulls when it is told to open, pushes when it is told to close, says when it is done."""

    def reset(self, seed):
        self.steps = 0

    def act(self, frame, instruction):
        self.steps += 1
        way = 1.0 if instruction.startswith("open") else -1.0
        end = [1, 0, 0] if self.steps == 3 else [0, 1, 0]
        zero = np.zeros(3)
        return {"world_vector": [0.0, 0.0, way], "rotation_delta": zero, "gripper_closedness_action": [0.0],
                "terminate_episode": end}


class Idle:
    def act(self, frame, instruction):
        assert frame.dtype == np.uint8 and frame.ndim == 3
        return np.array([0.0] * 7 + [0.0, 1.0, 0.0] + [0.0] * 3)


class Short:
    def act(self, frame, instruction):
        return np.zeros(7)


class NoEnd:
    def act(self, frame, instruction):
        return {"world_vector": [0, 0, 0], "rotation_delta": [0, 0, 0], "gripper_closedness_action": [0]}
'''
JUDGE = '''
import numpy as np


def moved(frames, instruction, recorded):
    """Whether the bar is nearer to where the recording left it than to where it began."""
    rows = [frame.astype(float).sum((1, 2)) for frame in (recorded[0], frames[-1], recorded[-1])]
    start, now, end = (float((row * np.arange(len(row))).sum() / row.sum()) for row in rows)
    return bool(abs(now - end) < abs(now - start))


def unsure(frames, instruction, recorded):
    return 0.5
'''
TRUTH = """
open * drawer: {Skilled: [20, 27], Idle: [0, 27]}
close * drawer: {Skilled: 0.889, Idle: 0.0}
"""


def episode(rng: np.random.Generator, instruction: str, height: int, width: int, steps: int) -> dict:
    """A demonstration that succeeds; its last action ends it."""
    way = 1 if instruction.startswith("open") else -1
    place = int(height * (0.25 if way > 0 else 0.7)) + int(rng.integers(0, 3))
    frames, actions = [], []
    for t in range(steps):
        picture = np.full((height, width, 3), 40, np.uint8)
        picture[place : place + max(2, height // 10), 2:-2] = (220, 200, 60)
        end = [1, 0, 0] if t == steps - 1 else [0, 1, 0]
        frames.append(picture)
        actions.append([0.0] * 7 + end + [0.0, 0.0, float(way)])
        place += way * max(1, height // 16)
    return episode_sample({"image": np.stack(frames)}, np.array(actions, np.float32), instruction, source="made up")


def write_folder(folder: Path, height: int, width: int, episodes: int = 12, steps: int = 6) -> None:
    """Shards, policies.py, judge.py and real.yaml. Every third episode is of the first task, and so on."""
    rng = np.random.default_rng(3)
    with ShardWriter(folder / "shards", kind=VIDEO) as writer:
        for number in range(episodes):
            writer.write(episode(rng, TASKS[number // 2 % 3], height, width, steps), key=f"{number:04d}")
    for name, text in (("policies.py", POLICIES), ("judge.py", JUDGE), ("real.yaml", TRUTH)):
        (folder / name).write_text(text)
