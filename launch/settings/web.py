"""Settings of WebRL: its stages, and the block of phases that becomes stages. Importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ...core.config import OptimizerConfig
from ...rl.algorithms.config import GRPO
from ...rl.own.config import EnvironmentSettings
from ...rl.rollout.config import Rollouts
from ...rl.webrl.config import WebSiteEnvironment
from ...rl.webrl.plan_config import PlanArm
from .base import Retention, positive
from .verbs import Collect, Reinforce, Score

Method = Literal["paper", "released", "filtered_bc", "awr", "digirl", "reinforce"]
Curriculum = Literal["failures", "random", "first"]
PhaseMethod = Literal["paper", "released", "filtered_bc", "awr", "digirl", "reinforce", "grpo"]


@dataclass(frozen=True)
class Training:
    """How a model of WebRL is trained on steps or states."""

    optimizer: OptimizerConfig
    sequences_per_step: int
    epochs: float = 1.0  # passes over the data
    microbatch_tokens: int = 16384
    checkpoint_every: int = 100
    checkpoints: Retention = field(default_factory=Retention)  # which of them stay
    log_every: int = 10

    def __post_init__(self) -> None:
        positive(self, "sequences_per_step", "epochs", "microbatch_tokens", "checkpoint_every", "log_every")


@dataclass(frozen=True)
class WebTasks:
    """New instructions from failures: instances of failed templates, or written by a language model where `url` is
    set; then filters.
    """

    kind: Literal["web-tasks"]
    name: str
    failures: list[str]  # collect or web-judge stages
    count: int  # instructions to write
    # keeps tasks whose first state it values in [low, high]; without one nothing is filtered by value
    critic: str | None = None
    low: float = 0.05  # the least value
    high: float = 0.75  # the greatest value
    url: str = ""  # an OpenAI-compatible API; its key is read from OPENAI_API_KEY
    model: str = ""  # the name of the API's model
    # failures: like those that failed; random: any new ones; first: the tasks of the first stage of `failures` again
    curriculum: Curriculum = "failures"
    uses: ClassVar[tuple[str, ...]] = ("failures", "critic")

    def __post_init__(self) -> None:
        positive(self, "count")
        if bool(self.url) != bool(self.model):
            raise ValueError("model: give both url and model, or neither")
        if self.curriculum != "failures" and self.critic is not None:
            raise ValueError(f"critic: curriculum {self.curriculum} filters nothing; leave it out")
        if self.curriculum == "first" and self.url:
            raise ValueError("url: curriculum first plays known tasks, nothing is written; leave it out")


@dataclass(frozen=True)
class WebJudge:
    """The outcome reward model says what succeeded, in place of the world: verdicts on the episodes of a collect
    stage.
    """

    kind: Literal["web-judge"]
    name: str
    data: str  # the collect stage
    orm: str  # the web-orm stage, or a start stage with the folder of a reward model such as the released one
    uses: ClassVar[tuple[str, ...]] = ("data", "orm")


@dataclass(frozen=True)
class WebOrm:
    """The outcome reward model: YES or NO after intent, actions and last page, learnt from rollouts that the world
    judged.
    """

    kind: Literal["web-orm"]
    name: str
    init: str
    data: list[str]  # collect stages: demonstrations and a model's episodes
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
    """A phase's experience: all new steps, and earlier successes' steps that the actor finds neither sure nor
    unlikely.
    """

    kind: Literal["web-replay"]
    name: str
    actor: str  # the stage whose probabilities filter
    new: str  # the phase's episodes: a collect or web-judge stage
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
    # paper: weight of one-step advantages, the rest is the outcome's; digirl: trust in the outcome, a step
    lam: float = 0.5
    uses: ClassVar[tuple[str, ...]] = ("init", "data", "critic")

    def __post_init__(self) -> None:
        positive(self, "beta")
        if self.method != "filtered_bc" and self.critic is None:
            raise ValueError(f"critic: method {self.method} needs one")


@dataclass(frozen=True)
class WebPlan:
    """An actor on held-out tasks with and without a world model to plan with, by arms, beside the random policy and
    the oracle.
    """

    kind: Literal["web-plan"]
    name: str
    actor: str  # the stage whose model acts
    arms: list[PlanArm]  # the ways to act that are compared
    max_new_tokens: int  # of one action
    n: int = 0  # tasks of the test split, 0 for all
    temperature: float = 1.0
    top_p: float = 0.95  # share of probability to sample actions from
    headline: str | None = None  # the arm that is compared with every other one, over the same tasks
    rollouts: Rollouts = field(default_factory=Rollouts)
    uses: ClassVar[tuple[str, ...]] = ("actor", "models")

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "temperature")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be in (0, 1]")
        names = [arm.name for arm in self.arms]
        if not names or len(set(names)) != len(names):
            raise ValueError("arms: at least one is needed, and every name only once")
        if self.headline is not None and self.headline not in names:
            raise ValueError(f"headline: '{self.headline}' is no arm ({', '.join(names)})")

    @property
    def models(self) -> list[str]:
        """The stages whose models the arms ask."""
        return [name for arm in self.arms for name in (arm.model, arm.critic) if name]


@dataclass(frozen=True)
class WebPhases:
    """WebRL's phases. The block is replaced by the stages NAME-1-tasks, -rollout, -replay, -critic, -actor,
    NAME-2-tasks and so on, and at the end NAME-eval with a row for every phase; each is resumed like any other stage.
    """

    kind: Literal["webrl"]
    name: str
    phases: int  # how many
    init: str  # the imitation stage
    demos: str  # the replay store begins with these
    first: str  # a collect stage, `init` on the demonstrations' tasks: its failures are the first seeds
    tasks: int  # instructions of a phase
    max_new_tokens: int  # of one action
    actor: Training  # how the actor is trained in a phase
    critic: Training  # how the critic is trained in a phase
    orm: str | None = None  # the stage that judges in place of the world, as in web-judge
    # grpo is on-policy: its episodes are played as it learns, `samples` of a task at a time
    method: PhaseMethod = "paper"
    beta: float = 1.0  # as in web-actor
    length_normalize: bool = True  # as in web-actor
    lam: float = 0.5  # as in web-actor
    samples: int = 1  # episodes of each instruction
    temperature: float = 1.0
    curriculum: Curriculum = "failures"  # as in web-tasks; the critic filters with `failures` alone
    low: float = 0.05  # the critic's filter of instructions
    high: float = 0.75  # its upper bound
    critic_always: bool = False  # train a critic with filtered_bc too, so that it filters the instructions
    url: str = ""  # of the API that writes instructions, as in web-tasks
    model: str = ""  # the name of the API's model
    replay_ratio: float = 2.0  # as `ratio` of web-replay
    replay_low: float = 0.5  # as `low` of web-replay
    replay_high: float = 0.95  # as `high` of web-replay
    evaluated: bool = True  # false where an eval stage of the recipe compares several such blocks
    evaluate: int = 100_000  # test tasks at most
    evaluate_samples: int = 1  # episodes of each test task
    evaluate_temperature: float = 1.0  # sampling temperature of the evaluation
    rollouts: Rollouts = field(default_factory=Rollouts)

    def __post_init__(self) -> None:
        positive(self, "phases", "tasks", "max_new_tokens", "evaluate")
        if self.url and self.orm is None:
            raise ValueError(
                "orm: written instructions have no ground truth; name the stage of an outcome reward model"
            )
        if self.curriculum == "first" and self.url:
            raise ValueError("url: curriculum first plays known tasks, nothing is written; leave it out")
        if self.method == "grpo" and (self.samples < 2 or self.url):
            raise ValueError(
                "samples: method grpo compares samples of one task, at least 2, by the world's score; it takes no url"
            )

    def _rollout(
        self, env: WebSiteEnvironment, name: str, actor: str, tasks: str, samples: int
    ) -> list[Collect | WebJudge]:
        """The actor on a phase's tasks, judged by the world; or by the reward model, then what was played is a stage
        of its own.
        """
        played = name if self.orm is None else f"{name.removesuffix('rollout')}played"
        playing = Collect(
            kind="collect",
            name=played,
            env=replace(env, data=tasks),
            model=actor,
            prompts=self.tasks,
            prompts_at_once=self.tasks,
            samples_per_prompt=samples,
            validation_share=0.0,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            rollouts=self.rollouts,
        )
        return [playing] if self.orm is None else [playing, WebJudge("web-judge", name, played, self.orm)]

    def _on_policy(self, env: WebSiteEnvironment, actor: str, tasks: str, policy: str) -> Reinforce:
        """The actor of a phase of GRPO, on the phase's tasks."""
        groups = max(1, self.actor.sequences_per_step // self.samples)
        return Reinforce(
            kind="rl",
            name=policy,
            init=actor,
            env=replace(env, data=tasks),
            max_new_tokens=self.max_new_tokens,
            algorithm=GRPO(),
            prompts_per_step=groups,
            samples_per_prompt=self.samples,
            steps=max(1, round(self.actor.epochs * self.tasks / groups)),
            optimizer=self.actor.optimizer,
            temperature=self.temperature,
            checkpoint_every=self.actor.checkpoint_every,
            checkpoints=self.actor.checkpoints,
            rollouts_every=self.actor.log_every,
            rollouts=self.rollouts,
            microbatch_tokens=self.actor.microbatch_tokens,
        )

    def stages(self, env: EnvironmentSettings | None) -> list[WebStage | Collect | Reinforce | Score]:
        """The stages of all phases in order, on the sites of the recipe's `env`."""
        if not isinstance(env, WebSiteEnvironment):
            raise ValueError(
                f"env: the stage '{self.name}' of kind webrl needs web sites; give the recipe env: "
                f"{{kind: web-site, ...}}"
            )
        expanded: list[WebStage | Collect | Reinforce | Score] = []
        actor, critic, played = self.init, None, [self.first]
        for number in range(1, self.phases + 1):
            prefix = f"{self.name}-{number}"
            tasks, rollout, replay, judge, policy = (
                f"{prefix}-{part}" for part in ("tasks", "rollout", "replay", "critic", "actor")
            )
            if self.method == "grpo":
                expanded += [
                    WebTasks("web-tasks", tasks, list(played), self.tasks, curriculum=self.curriculum),
                    self._on_policy(env, actor, tasks, policy),
                ]
                expanded += self._rollout(env, rollout, policy, tasks, 1)  # its failures are the next seeds
                actor, played = policy, [*played, rollout]
                continue
            expanded += [
                WebTasks(
                    "web-tasks",
                    tasks,
                    list(played),
                    self.tasks,
                    critic if self.curriculum == "failures" else None,
                    self.low,
                    self.high,
                    self.url,
                    self.model,
                    self.curriculum,
                ),
                *self._rollout(env, rollout, actor, tasks, self.samples),
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
            if self.method != "filtered_bc" or self.critic_always:
                expanded.append(WebCritic("web-critic", judge, self.init, replay, self.critic, critic))
                critic = judge
            expanded.append(
                WebActor(
                    "web-actor",
                    policy,
                    actor,
                    replay,
                    self.actor,
                    None if self.method == "filtered_bc" else critic,
                    self.method,
                    self.beta,
                    self.length_normalize,
                    self.lam,
                )
            )
            actor, played = policy, [*played, rollout]
        if not self.evaluated:
            return expanded
        models = [self.init, *(f"{self.name}-{n}-actor" for n in range(1, self.phases + 1))]
        expanded.append(
            Score(
                kind="eval",
                name=f"{self.name}-eval",
                models=models,
                max_new_tokens=self.max_new_tokens,
                n=self.evaluate,
                samples=self.evaluate_samples,
                temperatures=[self.evaluate_temperature],
                before=models[0],
                after=models[-1],
                sampler=self.rollouts.sampler,
            )
        )
        return expanded


WebStage = WebTasks | WebJudge | WebOrm | WebReplay | WebCritic | WebActor | WebPlan | WebPhases


def expand(stages: Sequence[object], env: EnvironmentSettings | None) -> list:
    """The stages with every block of phases replaced by its own."""
    return [inner for stage in stages for inner in (stage.stages(env) if isinstance(stage, WebPhases) else [stage])]
