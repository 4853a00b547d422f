"""Settings of WebRL: its stages, and the block of phases that becomes stages. Importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.config import OptimizerConfig
from ...rl.algorithms.config import GRPO
from ...rl.rollout.config import Rollouts
from .base import positive
from .web_live import WebPlan, WebReinforce, WebSitePages

Method = Literal["paper", "released", "filtered_bc", "awr", "digirl", "reinforce"]
PhaseMethod = Literal["paper", "released", "filtered_bc", "awr", "digirl", "reinforce", "grpo"]


@dataclass(frozen=True)
class Training:
    """How a model of WebRL is trained on steps or states."""

    optimizer: OptimizerConfig
    sequences_per_step: int
    epochs: float = 1.0  # passes over the data
    microbatch_tokens: int = 16384
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        positive(self, "sequences_per_step", "epochs", "microbatch_tokens", "checkpoint_every", "log_every")


@dataclass(frozen=True)
class WebStart:
    """Where web agents begin: tasks, the shape of prompts, and a Hugging Face folder or a model from scratch with a small tokenizer."""

    kind: Literal["web-start"]
    name: str
    max_prompt_tokens: int  # of actor and critic; pages are cut to fit
    max_new_tokens: int  # of one action
    tag: str = "WebSites"  # of the tasks that are trained on
    test_tag: str = "WebSitesTest"  # of the tasks that are evaluated on
    tag_files: list[str] = field(default_factory=list)  # YAML files with tags beside those that ship
    templates: list[int] = field(default_factory=list)  # of the local sites; empty for all
    max_verdict_tokens: int = 16384  # of the outcome reward model
    pad_prompts_to: int = 1  # in front, to a multiple of this: the CPU sampler decodes prompts of one length together
    folder: str | None = None  # a Hugging Face folder; its sizes must be those of `model`

    def __post_init__(self) -> None:
        positive(self, "max_prompt_tokens", "max_new_tokens", "max_verdict_tokens", "pad_prompts_to")


@dataclass(frozen=True)
class WebDemos:
    """Demonstrations by the scripted oracles, with rounds of actions without effect between; or shards of converted ones. With `astray`
    some hold one mistake, so that an outcome reward model sees near misses: other items, wrong answers, steps left out."""

    kind: Literal["web-demos"]
    name: str
    count: int  # tasks of the training split; of shards, tasks of the first rollout
    shards: str | None = None  # a folder that `terrella shards make webrl` or `terrella shards make sharegpt` wrote; then nothing is played
    noise: float = 0.0  # chance of such a round
    astray: float = 0.0  # chance that a demonstration holds a mistake; it is judged by the world and never imitated
    samples: int = 1  # demonstrations of each task

    def __post_init__(self) -> None:
        positive(self, "count", "samples")
        if not 0 <= self.noise < 1 or not 0 <= self.astray <= 1:
            raise ValueError(f"noise: {self.noise} must be in [0, 1), astray: {self.astray} in [0, 1]")


@dataclass(frozen=True)
class WebSupervised:
    """Imitation of demonstrations: cross-entropy over the actions."""

    kind: Literal["web-sft"]
    name: str
    data: str  # the web-demos stage
    init: str
    training: Training
    prompts: float = 0.0  # weight of the tokens that were read: a model from scratch learns to copy words from them
    uses: ClassVar[tuple[str, ...]] = ("data", "init")

    def __post_init__(self) -> None:
        if self.prompts < 0:
            raise ValueError(f"prompts: {self.prompts} must be 0 (actions only) or above")


@dataclass(frozen=True)
class WebTasks:
    """New instructions from failures: instances of failed templates, or written by a language model where `url` is set; then filters."""

    kind: Literal["web-tasks"]
    name: str
    failures: list[str]  # rollout stages
    count: int  # instructions to write
    critic: str | None = None  # keeps tasks whose first state it values in [low, high]; without one nothing is filtered by value
    low: float = 0.05  # the least value
    high: float = 0.75  # the greatest value
    url: str = ""  # an OpenAI-compatible API; its key is read from OPENAI_API_KEY
    model: str = ""  # the name of the API's model
    uses: ClassVar[tuple[str, ...]] = ("failures", "critic")

    def __post_init__(self) -> None:
        positive(self, "count")
        if bool(self.url) != bool(self.model):
            raise ValueError("model: give both url and model, or neither")


@dataclass(frozen=True)
class WebRollout:
    """A model plays tasks; the world or the outcome reward model says what succeeded."""

    kind: Literal["web-rollout"]
    name: str
    model: str  # the stage whose model plays
    tasks: str  # a web-demos or web-tasks stage
    samples: int = 1  # of each task
    temperature: float = 1.0
    orm: str | None = None  # judges in place of the world
    at_once: int = 64
    rollouts: Rollouts = field(default_factory=Rollouts)
    uses: ClassVar[tuple[str, ...]] = ("model", "tasks", "orm")

    def __post_init__(self) -> None:
        positive(self, "samples", "temperature", "at_once")


@dataclass(frozen=True)
class WebOrm:
    """The outcome reward model: YES or NO after intent, actions and last page, learnt from rollouts that the world judged."""

    kind: Literal["web-orm"]
    name: str
    init: str
    data: list[str]  # demonstrations and rollouts
    training: Training
    prompts: float = 0.0  # weight of the tokens that are read
    heldout_every: int = 5  # every so many-th task is held out
    uses: ClassVar[tuple[str, ...]] = ("init", "data")

    def __post_init__(self) -> None:
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")
        if self.prompts < 0:
            raise ValueError(f"prompts: {self.prompts} must not be negative")


@dataclass(frozen=True)
class WebReplay:
    """A phase's experience: all new steps, and earlier successes' steps that the actor finds neither sure nor unlikely."""

    kind: Literal["web-replay"]
    name: str
    actor: str  # the stage whose probabilities filter
    new: str  # a rollout stage
    earlier: list[str]  # demonstrations and rollouts of earlier phases
    low: float = 0.5  # of the geometric mean probability of an action's tokens
    high: float = 0.95  # likewise, the upper bound
    ratio: float = 2.0  # of replayed to new steps, at most; 0 replays nothing
    microbatch_tokens: int = 16384
    uses: ClassVar[tuple[str, ...]] = ("actor", "new", "earlier")


@dataclass(frozen=True)
class WebCritic:
    """The critic: twin heads on the last token of a state learn whether the trajectory succeeded."""

    kind: Literal["web-critic"]
    name: str
    init: str  # the trunk's first weights
    data: str  # a web-replay stage
    training: Training
    resume: str | None = None  # an earlier critic to go on from
    uses: ClassVar[tuple[str, ...]] = ("init", "data", "resume")


@dataclass(frozen=True)
class WebActor:
    """One phase of the actor, against its weights at the start of the phase."""

    kind: Literal["web-actor"]
    name: str
    init: str
    data: str  # the web-replay stage
    training: Training
    critic: str | None = None  # every method but filtered_bc needs one
    method: Method = "paper"  # the loss: the publication's, the released code's, or a baseline
    beta: float = 1.0  # paper: the strength of the pull to the reference
    length_normalize: bool = True  # paper: mean rather than sum of the token log-ratios
    lam: float = 0.5  # paper: weight of one-step advantages, the rest is the outcome's; digirl: trust in the outcome, a step
    uses: ClassVar[tuple[str, ...]] = ("init", "data", "critic")

    def __post_init__(self) -> None:
        positive(self, "beta")
        if self.method != "filtered_bc" and self.critic is None:
            raise ValueError(f"critic: method {self.method} needs one")


@dataclass(frozen=True)
class WebEvaluate:
    """Agents on held-out tasks, by site, beside the random policy and the oracle."""

    kind: Literal["web-eval"]
    name: str
    models: list[str]  # the stages whose models are evaluated
    n: int = 0  # tasks of the test split, 0 for all
    samples: int = 1  # episodes of each task
    temperature: float = 1.0
    at_once: int = 64
    headline: str | None = None  # the model whose rates the summary tells
    rollouts: Rollouts = field(default_factory=Rollouts)
    random_elsewhere: bool = False  # play the random policy on the sites of a task file too: it clicks anywhere, and they keep it
    uses: ClassVar[tuple[str, ...]] = ("models",)

    def __post_init__(self) -> None:
        positive(self, "samples", "at_once")
        if self.temperature < 0 or self.n < 0:
            raise ValueError("temperature: must be 0 (greedy) or above, n 0 (all) or above")
        if self.headline is not None and self.headline not in self.models:
            raise ValueError(f"headline: '{self.headline}' is not in models")


@dataclass(frozen=True)
class WebPhases:
    """WebRL's phases. The block is replaced by the stages NAME-1-tasks, -rollout, -replay, -critic, -actor, NAME-2-tasks and so on, and at
    the end NAME-eval with a row for every phase; each is resumed like any other stage."""

    kind: Literal["webrl"]
    name: str
    phases: int  # how many
    init: str  # the imitation stage
    demos: str  # the replay store begins with these
    first: str  # the rollout of `init` on the demonstrations' tasks: its failures are the first seeds
    tasks: int  # instructions of a phase
    actor: Training  # how the actor is trained in a phase
    critic: Training  # how the critic is trained in a phase
    orm: str | None = None  # the web-orm stage that judges in place of the world
    method: PhaseMethod = "paper"  # grpo is on-policy: its episodes are played as it learns, `samples` of a task at a time
    beta: float = 1.0  # as in web-actor
    length_normalize: bool = True  # as in web-actor
    lam: float = 0.5  # as in web-actor
    samples: int = 1  # episodes of each instruction
    temperature: float = 1.0
    at_once: int = 64
    low: float = 0.05  # the critic's filter of instructions
    high: float = 0.75  # its upper bound
    url: str = ""  # of the API that writes instructions, as in web-tasks
    model: str = ""  # the name of the API's model
    replay_ratio: float = 2.0  # as `ratio` of web-replay
    replay_low: float = 0.5  # as `low` of web-replay
    replay_high: float = 0.95  # as `high` of web-replay
    evaluated: bool = True  # false where a web-eval stage of the recipe compares several such blocks
    evaluate: int = 0  # test tasks, 0 for all
    evaluate_samples: int = 1  # episodes of each test task
    evaluate_temperature: float = 1.0  # sampling temperature of the evaluation
    rollouts: Rollouts = field(default_factory=Rollouts)

    def __post_init__(self) -> None:
        positive(self, "phases", "tasks")
        if self.url and self.orm is None:
            raise ValueError("orm: written instructions have no ground truth; name the stage of an outcome reward model")
        if self.method == "grpo" and (self.samples < 2 or self.url):
            raise ValueError("samples: method grpo compares samples of one task, at least 2, by the world's score; it takes no url")

    def _on_policy(self, actor: str, played: list[str], tasks: str, policy: str, rollout: str) -> list[WebStage]:
        """A phase of GRPO: its tasks, the actor on them, and a rollout of the new actor whose failures are the next seeds."""
        groups = max(1, self.actor.sequences_per_step // self.samples)
        training = WebReinforce(
            kind="web-rl",
            name=policy,
            init=actor,
            tasks=tasks,
            algorithm=GRPO(),
            prompts_per_step=groups,
            samples_per_prompt=self.samples,
            steps=max(1, round(self.actor.epochs * self.tasks / groups)),
            optimizer=self.actor.optimizer,
            temperature=self.temperature,
            checkpoint_every=self.actor.checkpoint_every,
            rollouts_every=self.actor.log_every,
            rollouts=self.rollouts,
            microbatch_tokens=self.actor.microbatch_tokens,
            at_once=self.at_once,
        )
        return [
            WebTasks("web-tasks", tasks, played, self.tasks),
            training,
            WebRollout("web-rollout", rollout, policy, tasks, 1, self.temperature, self.orm, self.at_once, self.rollouts),
        ]

    def stages(self) -> list[WebStage]:
        """The stages of all phases in order."""
        found: list[WebStage] = []
        actor, critic, played = self.init, None, [self.first]
        for number in range(1, self.phases + 1):
            prefix = f"{self.name}-{number}"
            tasks, rollout, replay, judge, policy = (f"{prefix}-{part}" for part in ("tasks", "rollout", "replay", "critic", "actor"))
            if self.method == "grpo":
                found += self._on_policy(actor, list(played), tasks, policy, rollout)
                actor, played = policy, [*played, rollout]
                continue
            found += [
                WebTasks("web-tasks", tasks, list(played), self.tasks, critic, self.low, self.high, self.url, self.model),
                WebRollout("web-rollout", rollout, actor, tasks, self.samples, self.temperature, self.orm, self.at_once, self.rollouts),
                WebReplay(
                    "web-replay",
                    replay,
                    actor,
                    rollout,
                    [self.demos, *played],
                    self.replay_low,
                    self.replay_high,
                    self.replay_ratio,
                    self.actor.microbatch_tokens,
                ),
            ]
            if self.method != "filtered_bc":
                found.append(WebCritic("web-critic", judge, self.init, replay, self.critic, critic))
                critic = judge
            found.append(
                WebActor("web-actor", policy, actor, replay, self.actor, critic, self.method, self.beta, self.length_normalize, self.lam)
            )
            actor, played = policy, [*played, rollout]
        if not self.evaluated:
            return found
        models = [self.init, *(f"{self.name}-{n}-actor" for n in range(1, self.phases + 1))]
        found.append(
            WebEvaluate(
                "web-eval",
                f"{self.name}-eval",
                models,
                self.evaluate,
                self.evaluate_samples,
                self.evaluate_temperature,
                self.at_once,
                models[-1],
                self.rollouts,
            )
        )
        return found


WebStage = (
    WebStart
    | WebDemos
    | WebSupervised
    | WebTasks
    | WebRollout
    | WebOrm
    | WebReplay
    | WebCritic
    | WebActor
    | WebReinforce
    | WebEvaluate
    | WebPlan
    | WebSitePages
    | WebPhases
)


def expand(stages: Sequence[object]) -> list:
    """The stages with every block of phases replaced by its own."""
    return [inner for stage in stages for inner in (stage.stages() if isinstance(stage, WebPhases) else [stage])]
