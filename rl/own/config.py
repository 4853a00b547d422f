"""Settings of a user's own tasks: rows of data with a reward, or an environment by path. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...core.by_path import ByPath, KindByPath, OwnFile, OwnText
from ..agents.config import TransitionsEnvironment, WorldsEnvironment
from ..grid.config import GridEnvironment
from ..rewards.answers import Rule
from ..text_games.config import TextGameEnvironment
from ..video.config import VideoEnvironment
from ..web_pages.config import WebPageEnvironment
from ..webrl.config import WebSiteEnvironment


@dataclass(frozen=True)
class DataEnvironment:
    """Rows of your own data, one turn each: a prompt, and a reward that judges the answer."""

    kind: Literal["data"]
    # JSONL, JSON or parquet file, a folder of them, a Hugging Face datasets folder, or shards
    train: OwnFile | None = None
    test: OwnFile | None = None  # rows to evaluate on; default: every `hold_out_every`-th row of train
    # exact, contains or number, or `file.py:function`; supervised fine-tuning needs none
    reward: Rule | ByPath | None = None
    # jinja template over the columns, or its file; default: the column `messages`, or `prompt`
    template: OwnText | None = None
    # the column with the true answer; default: the last assistant message, or a column named answer
    answer: str | None = None
    system: OwnText | None = None  # the system message
    hold_out_every: int = 10  # without `test`, hold out every n-th row
    deadline_s: float = 30.0  # deadline of one call of the reward

    def __post_init__(self) -> None:
        if self.hold_out_every < 2:
            raise ValueError("hold_out_every: at least 2, or nothing is left to train on")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s: {self.deadline_s} must be above 0")


# environments of other projects, such as `gymnasium:CartPole-v1`: the prefix, and the class that plays them
ELSEWHERE = {
    "gymnasium": "terrella.rl.exchange.from_gymnasium:GymnasiumEnvironment",
    "openenv": "terrella.rl.exchange.from_openenv:OpenEnvEnvironment",
    "reasoning-gym": "terrella.rl.exchange.from_reasoning_gym:ReasoningGymEnvironment",
    "verifiers": "terrella.rl.exchange.from_verifiers:VerifiersEnvironment",
}


@dataclass(frozen=True)
class OwnEnvironment(KindByPath):
    """Your own `Environment`, named as `kind: file.py:Name` or `kind: package.module:Name`; other keys are its
    arguments.

    One of another project is named as `gymnasium:ID`, `openenv:URL`, `reasoning-gym:TASK` or `verifiers:NAME`.
    """

    max_turns: int = 100  # answers after which an unfinished episode is Invalid
    deadline_s: float = 30.0  # deadline of one call of its methods, or one turn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1 or self.deadline_s <= 0:
            raise ValueError("max_turns: at least 1, and deadline_s above 0")

    @classmethod
    def named(cls, kind: str) -> tuple[str, dict[str, Any]]:
        """The class that plays an environment of another project, and which one it is; a path as it is."""
        project, _, which = kind.partition(":")
        return (ELSEWHERE[project], {"id": which}) if project in ELSEWHERE and which else (kind, {})


EnvironmentSettings = (
    DataEnvironment
    | GridEnvironment
    | TextGameEnvironment
    | TransitionsEnvironment
    | WebPageEnvironment
    | WebSiteEnvironment
    | WorldsEnvironment
    | VideoEnvironment
    | OwnEnvironment
)
