"""An algorithm by path: its advantages reach the tokens, and what it may not give is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terrella.core import schema
from terrella.core.errors import ConfigError
from terrella.data.trajectory import Invalid, Role, TokenSequence, Trajectory
from terrella.launch.settings.verbs import Reinforce
from terrella.rl import algorithms
from terrella.rl.algorithms.common import Scores
from terrella.rl.algorithms.config import OwnAlgorithm

CODE = """
def shortfall(rewards, infos, bonus=0.0):
    return [r - max(rewards) + bonus * i.get("short", 0) for r, i in zip(rewards, infos)]

def few(rewards, infos):
    return [0.0]

def nan(rewards, infos):
    return [float("nan")] * len(rewards)

def raises(rewards, infos):
    return 1 / 0
"""


def own(folder: Path, name: str, **args: float) -> OwnAlgorithm:
    """The algorithm as a recipe beside its file names it."""
    (folder / "my.py").write_text(CODE)
    keys = "".join(f", {key}: {value}" for key, value in args.items())
    text = (
        "kind: rl\nname: rl\ninit: start\nprompts_per_step: 2\nsamples_per_prompt: 2\nsteps: 1\nmax_new_tokens: "
        "4\noptimizer: {lr: 1.0}\n"
    )
    (folder / "stage.yaml").write_text(text + f'algorithm: {{kind: "my.py:{name}"{keys}}}\n')
    algorithm = schema.load(Reinforce, folder / "stage.yaml").algorithm
    assert isinstance(algorithm, OwnAlgorithm)
    return algorithm


def trajectory(prompt: int, sample: int, reward: float | Invalid, **info: float) -> Trajectory:
    roles = (Role.PROMPT, Role.ACTION, Role.ACTION)
    return Trajectory(prompt, sample, [TokenSequence((1, 2, 3), roles, (0.0, -0.5, -0.5))], reward, info=info)


def test_advantages_reach_the_tokens(tmp_path: Path) -> None:
    group = [
        trajectory(0, 0, 1.0),
        trajectory(0, 1, 0.25, short=1.0),
        trajectory(0, 2, Invalid("lost")),
        trajectory(1, 0, 3.0, short=1.0),
    ]
    algorithm = own(tmp_path, "shortfall", bonus=0.5, clip_high=0.3)
    assert algorithm.args == {"bonus": 0.5} and algorithm.clip_high == 0.3 and len(algorithm.digest) == 64
    rows = algorithms.prepare(algorithm, group, Scores(device=torch.device("cpu")), lambda value: [value])
    # the best one has no advantage, and costs nothing
    assert [(row.source, row.advantage[1]) for row in rows] == [(1, -0.25), (3, 0.5)]
    assert algorithms.settings(algorithm, 1.0).clip_high == 0.3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("few", r"my.py:few gave \[0.0\] for 2 rewards; one finite number each is needed"),
        ("nan", "one finite number each is needed"),
        ("raises", r"my.py:raises failed on the rewards \[1.0, 0.0\]: .*line 12: ZeroDivisionError"),
    ],
)
def test_what_is_no_advantage_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    group = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)]
    with pytest.raises(ConfigError, match=words):
        algorithms.prepare(own(tmp_path, name), group, Scores(device=torch.device("cpu")), lambda value: [value])
