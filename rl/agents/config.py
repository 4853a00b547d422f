"""How an agent meets its world, and SPA's worlds as an environment; importable without torch or numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

Scalar = bool | int | str | float
Format = Literal["answer", "think", "state"]
Teaching = Literal["answers", "transitions"]
Variant = Literal["truth", "belief", "masked", "blanked", "random_coordinates"]


@dataclass(frozen=True)
class AgentSettings:
    """Shape of an episode: what is shown, what must be written, how long it lasts, and what is paid beside the
    world's reward.
    """

    fmt: Format = "think"  # answer, think, or state: with observation and prediction tags
    max_turns: int = 5  # turns of an episode at most
    actions_per_turn: int = 5  # actions that one answer may hold
    window: int = 0  # above 0: only so many last turns are shown
    format_penalty: float = -0.1  # added to the reward of a turn whose answer is malformed
    coordinates: bool = False  # states are shown and asked for with their coordinates (state estimation)
    prompt: Literal["full", "bare"] = "full"  # bare shows states alone, for models from scratch
    # world-modelling online: paid for a written observation that is right, in a turn of right format
    observation_reward: float = 0.0
    prediction_reward: float = 0.0  # likewise for the predicted next state
    signed: ClassVar[tuple[str, ...]] = ("format_penalty", "observation_reward", "prediction_reward")

    def __post_init__(self) -> None:
        if min(self.max_turns, self.actions_per_turn) < 1 or self.window < 0:
            raise ValueError(f"max_turns: turns and actions per turn are at least 1, window at least 0, not {self}")
        if (self.observation_reward or self.prediction_reward) and self.fmt != "state":
            raise ValueError("observation_reward: paying for written states needs fmt = state, which has their tags")


@dataclass(frozen=True, kw_only=True)
class WorldsEnvironment(AgentSettings):
    """Worlds that an agent acts in, turn by turn: a task is a seed of one of the tags."""

    kind: Literal["worlds"]
    tags: list[str]  # of rl/worlds/tags.yaml or tag_files
    # how often each tag comes in training; without any all come equally often
    weights: list[float] = field(default_factory=list)
    test_tags: list[str] = field(default_factory=list)  # of the held-out tasks; without any the same
    tag_files: list[str] = field(default_factory=list)  # YAML files with tags beside those that ship
    # settings of the tags' worlds in place of their own, as folder of WebShop or file of MetamathQA
    config: dict[str, Scalar] = field(default_factory=dict)
    first_seed: int = 10_000  # of the training tasks
    test_seed: int = 123  # the first of the held-out ones
    random_actions: int = 3  # a turn of the random policy
    # in the tags of collected turns; ablations: belief, masked, blanked (symbol by symbol), random_coordinates
    states: Variant = "truth"
    learn_blanks: bool = False  # blanked states carry a loss, so that the shape of an answer is learnt and nothing else
    only_tagged: bool = True  # turns whose tags are not all there are no lessons
    # what collected turns teach: how to answer, or a world model: what follows a state and actions
    teaches: Teaching = "answers"
    # the stage whose model, taught by transitions, plays the world in RL; held-out tasks stay in the true one
    imagined_by: str | None = None
    tasks: ClassVar[str] = "agents.tasks:WorldTasks"
    models: ClassVar[tuple[str, ...]] = ("imagined_by",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tags or self.random_actions < 1:
            raise ValueError("tags: at least one is needed, and random_actions at least 1")
        if self.weights and (len(self.weights) != len(self.tags) or min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError(
                f"weights: one for each of the {len(self.tags)} tags, none negative and not all 0, not {self.weights}"
            )


@dataclass(frozen=True, kw_only=True)
class TransitionsEnvironment:
    """What follows a state and actions: a task is a turn that a collect stage in worlds recorded, with `teaches:
    transitions`, and an answer is paid 1 where state, reward and outcome are the true ones, else 0.
    """

    kind: Literal["transitions"]
    data: str  # the collect stage to train on
    test: str | None = None  # the collect stage to evaluate on, all of it; default: what `data` held out
    tasks: ClassVar[str] = "agents.prediction:TransitionTasks"
    sources: ClassVar[tuple[str, ...]] = ("data", "test")
