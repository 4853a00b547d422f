"""The recipe: what a person runs. A YAML file resolved into these dataclasses; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from ..core import schema
from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from ..core.errors import ConfigError
from ..core.sinks import SinkName
from ..models.config import ModelConfig
from ..rl.agent_config import AgentSettings, Variant
from ..rl.rollout.config import Rollouts
from .recipe_base import OnPolicy, positive
from .recipe_video import VideoSettings, VideoStage
from .recipe_video import references as video_references
from .recipe_web import WebStage, expand
from .recipe_web import references as web_references

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class SelfPlay:
    """A random policy plays the world and writes its transitions as shards; some rooms are held out for evaluation."""

    kind: Literal["self-play"]
    name: str
    rooms: int  # rooms to learn from
    heldout_rooms: int  # rooms never seen in training
    actions_per_room: int
    first_seed: int = 10_000
    samples_per_shard: int = 4096

    def __post_init__(self) -> None:
        positive(
            rooms=self.rooms,
            heldout_rooms=self.heldout_rooms,
            actions_per_room=self.actions_per_room,
            samples_per_shard=self.samples_per_shard,
        )


@dataclass(frozen=True)
class Supervised:
    """Next-state prediction by cross-entropy on shards."""

    kind: Literal["supervised"]
    name: str
    data: str  # the self-play stage whose shards are read
    sequences_per_step: int
    optimizer: OptimizerConfig
    steps: int | None = None
    match_tokens_of: str | None = None  # a finished stage: take as many steps as give the same number of gradient tokens
    init: str | None = None  # the stage whose weights to start from
    microbatch_sequences: int = 64
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        positive(
            sequences_per_step=self.sequences_per_step,
            microbatch_sequences=self.microbatch_sequences,
            checkpoint_every=self.checkpoint_every,
            log_every=self.log_every,
        )
        if (self.steps is None) == (self.match_tokens_of is None):
            raise ValueError("steps: give either steps or match_tokens_of")


@dataclass(frozen=True)
class Imagination:
    """Tasks for a world model: a start state and forced actions; it sees only its own last prediction."""

    source: str  # the self-play stage whose rooms are used
    steps: int = 4  # states to imagine
    walk: int = 8  # random actions before the start state, at most

    def __post_init__(self) -> None:
        positive(steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class Reinforce(OnPolicy):
    """RL with a verifiable reward on imagined rollouts."""

    kind: Literal["rlvr"]
    name: str
    tasks: Imagination
    microbatch_sequences: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(microbatch_sequences=self.microbatch_sequences)


@dataclass(frozen=True)
class Evaluate:
    """Held-out tasks for several stages' models, beside the copy baseline and the true world."""

    kind: Literal["evaluate"]
    name: str
    models: list[str]
    tasks: Imagination
    n: int = 1024
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    before: str | None = None  # the headline compares this stage ...
    after: str | None = None  # ... with this one, at the last temperature
    control: str | None = None

    def __post_init__(self) -> None:
        positive(n=self.n)
        for key in ("before", "after", "control"):
            if getattr(self, key) is not None and getattr(self, key) not in self.models:
                raise ValueError(f"{key}: '{getattr(self, key)}' is not in models")


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder of one stage's model, proven equal."""

    kind: Literal["export"]
    name: str
    model: str


@dataclass(frozen=True)
class TextGameData:
    """Transitions of our own text games as shards of questions and answers, with held-out rows and held-out games; and a tokenizer."""

    kind: Literal["text-game-data"]
    name: str
    games: list[str]
    unseen_games: list[str] = field(default_factory=list)  # never trained on, evaluated on their own
    seeds: int = 4  # start states of each game
    heldout_per_verb: int = 5  # of each game and verb: so many changed and so many unchanged rows
    prompt: Literal["bare", "full"] = "bare"  # full adds rules and two worked examples, for models that read
    pad_prompts_to: int = 32  # prompts are padded in front to a multiple of this, so that many are decoded together
    samples_per_shard: int = 4096

    def __post_init__(self) -> None:
        positive(
            seeds=self.seeds,
            heldout_per_verb=self.heldout_per_verb,
            pad_prompts_to=self.pad_prompts_to,
            samples_per_shard=self.samples_per_shard,
        )
        if not self.games:
            raise ValueError("games: at least one is needed")
        if both := set(self.games) & set(self.unseen_games):
            raise ValueError(f"unseen_games: '{sorted(both)[0]}' is also trained on")


@dataclass(frozen=True)
class WebPageData:
    """Recorded page transitions as shards of questions and change lists, with held-out episodes and held-out pages; and a tokenizer."""

    kind: Literal["web-page-data"]
    name: str
    transitions: str | None = None  # a JSONL file of recorded transitions; without one those that ship are taken
    unseen_pages: list[str] = field(default_factory=list)  # urls never trained on, evaluated on their own
    heldout_every: int = 5  # every so many-th episode is held out
    prompt: Literal["bare", "full"] = "bare"  # full adds the instructions
    pad_prompts_to: int = 32

    def __post_init__(self) -> None:
        positive(pad_prompts_to=self.pad_prompts_to)
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")


@dataclass(frozen=True)
class LanguageStart:
    """Where the models of a language recipe begin: a Hugging Face model, with its tokenizer and chat template."""

    kind: Literal["language-start"]
    name: str
    folder: str  # its folder, or a model of the hub pinned to a commit, owner/name@ and 40 hex digits; its sizes must be those of `model`


@dataclass(frozen=True)
class LanguageData:
    """Questions that lie in shards of pairs already, such as converted public data or the reasoned answers of a teacher."""

    kind: Literal["language-data"]
    name: str
    train: str | None = None  # folders of shards
    test: str | None = None
    unseen: str | None = None  # questions of worlds that are not in train, evaluated on their own
    pad_prompts_to: int = 1

    parts: ClassVar[tuple[str, ...]] = ("train", "test", "unseen")

    def __post_init__(self) -> None:
        positive(pad_prompts_to=self.pad_prompts_to)
        if not any(getattr(self, part) for part in self.parts):
            raise ValueError("train: name a folder of shards to train on, or test for one to evaluate on")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: everything else is frozen."""

    rank: int = 64
    alpha: float = 64.0

    def __post_init__(self) -> None:
        positive(rank=self.rank, alpha=self.alpha)


@dataclass(frozen=True)
class LanguageSupervised:
    """Cross-entropy on the true answers of a data stage: supervised fine-tuning, or the control arm of an RL stage."""

    kind: Literal["language-sft"]
    name: str
    data: str
    sequences_per_step: int
    optimizer: OptimizerConfig
    steps: int | None = None
    match_tokens_of: str | None = None  # a finished stage: take as many steps as give at least its gradient tokens
    init: str | None = None
    lora: Lora | None = None
    non_gold_ratio: float | None = 0.4  # rows without a changed object, for each with one; null takes all rows as they are
    microbatch_tokens: int = 8192
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        positive(
            sequences_per_step=self.sequences_per_step,
            microbatch_tokens=self.microbatch_tokens,
            checkpoint_every=self.checkpoint_every,
            log_every=self.log_every,
        )
        if (self.steps is None) == (self.match_tokens_of is None):
            raise ValueError("steps: give either steps or match_tokens_of")


@dataclass(frozen=True, kw_only=True)
class LanguageReinforce(OnPolicy):
    """RL on the questions of a data stage: one answer is one episode, a rule is its judge."""

    kind: Literal["language-rlvr"]
    name: str
    data: str
    reward: Literal["binary", "task_specific", "f1"]
    max_new_tokens: int
    mode: Literal["faithful", "strict"] = "strict"
    non_gold_ratio: float | None = 0.4  # as in imitation
    lora: Lora | None = None
    microbatch_tokens: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(max_new_tokens=self.max_new_tokens, microbatch_tokens=self.microbatch_tokens)


@dataclass(frozen=True)
class LanguageEvaluate:
    """Held-out questions for several stages' models, beside the answer that nothing changes and the true answer."""

    kind: Literal["language-eval"]
    name: str
    models: list[str]
    data: str
    max_new_tokens: int
    mode: Literal["faithful", "strict"] = "strict"
    n: int = 512  # held-out rows at most, and as many of unseen games
    temperature: float = 0.0
    drift_steps: int = 0  # text games: so many steps are imagined one after the other beside the true game, by the same actions
    drift_episodes: int = 64
    before: str | None = None  # the headline compares this stage ...
    after: str | None = None  # ... with this one
    control: str | None = None

    def __post_init__(self) -> None:
        positive(n=self.n, max_new_tokens=self.max_new_tokens, drift_episodes=self.drift_episodes)
        for key in ("before", "after", "control"):
            if getattr(self, key) is not None and getattr(self, key) not in self.models:
                raise ValueError(f"{key}: '{getattr(self, key)}' is not in models")


@dataclass(frozen=True)
class AgentStart:
    """Where the agents of a recipe begin: a Hugging Face folder, or a model from scratch with a tokenizer made for the tags."""

    kind: Literal["agent-start"]
    name: str
    tags: list[str]  # of every world that an agent of the recipe meets
    tag_files: list[str] = field(default_factory=list)  # YAML files with tags beside those that ship
    folder: str | None = None  # a Hugging Face folder or a pinned model of the hub; its sizes must be those of `model`

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError("tags: at least one is needed")


@dataclass(frozen=True)
class AgentPlay:
    """Self-play: a model, or the random policy, plays worlds; its turns become shards to imitate, their state tags filled as told."""

    kind: Literal["agent-play"]
    name: str
    start: str
    agent: AgentSettings
    groups: int  # seeds played
    tags: dict[str, float] = field(default_factory=dict)  # with their weights; without any those of the start, equally
    samples_per_group: int = 8
    model: str | None = None  # the stage whose model plays; without one actions are random
    again: str | None = None  # an agent-play stage with a model: its very turns are taken again, for other states in their tags
    states: Variant = "truth"  # the ablations are belief, masked, blanked (masked symbol by symbol) and random_coordinates
    learn_blanks: bool = False  # blanked states carry a loss, so that the shape of an answer is learnt and nothing else
    only_tagged: bool = True  # leave out turns whose tags are not all there
    validation_share: float = 0.2  # of the trajectories
    first_seed: int = 10_000
    random_actions: int = 3  # a turn of the random policy
    max_new_tokens: int = 400
    temperature: float = 1.0
    groups_at_once: int = 32
    rollouts: Rollouts = field(default_factory=Rollouts)

    def __post_init__(self) -> None:
        positive(
            groups=self.groups,
            samples_per_group=self.samples_per_group,
            random_actions=self.random_actions,
            max_new_tokens=self.max_new_tokens,
            groups_at_once=self.groups_at_once,
        )
        if self.again is not None and self.model is not None:
            raise ValueError("again: the turns are those of another stage; leave model out")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share: {self.validation_share} must be in [0, 1)")


@dataclass(frozen=True)
class AgentSupervised:
    """Imitation of self-play turns: cross-entropy over what was thought and answered, written states included."""

    kind: Literal["agent-sft"]
    name: str
    data: str  # the agent-play stage
    init: str
    sequences_per_step: int
    epochs: float
    optimizer: OptimizerConfig
    lora: Lora | None = None
    microbatch_tokens: int = 8192
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        positive(
            sequences_per_step=self.sequences_per_step,
            epochs=self.epochs,
            microbatch_tokens=self.microbatch_tokens,
            checkpoint_every=self.checkpoint_every,
            log_every=self.log_every,
        )


@dataclass(frozen=True)
class AgentValidation:
    """Held-out seeds played during training, by tags of their own."""

    tags: dict[str, float] = field(default_factory=dict)  # without any those of the start, equally
    every: int = 10
    groups: int = 128
    samples_per_group: int = 8
    first_seed: int = 123

    def __post_init__(self) -> None:
        positive(every=self.every, groups=self.groups, samples_per_group=self.samples_per_group)


@dataclass(frozen=True, kw_only=True)
class AgentReinforce(OnPolicy):
    """Multi-turn RL of an agent in worlds. prompts_per_step groups are dealt to the tags by weight; a group shares its seed."""

    kind: Literal["agent-rl"]
    name: str
    agent: AgentSettings
    max_new_tokens: int  # of one turn
    tags: dict[str, float] = field(default_factory=dict)  # with their weights; without any those of the start, equally
    first_seed: int = 10_000
    actions: int | None = None  # stop once this stage and those in `counting` have taken so many actions; `steps` is then the most
    counting: list[str] = field(default_factory=list)  # agent-play stages whose actions count as this arm's
    validation: AgentValidation | None = None
    lora: Lora | None = None
    microbatch_tokens: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(max_new_tokens=self.max_new_tokens, microbatch_tokens=self.microbatch_tokens)
        if self.actions is not None:
            positive(actions=self.actions)


@dataclass(frozen=True)
class Arm:
    """A model as it is evaluated and compared."""

    name: str
    model: str
    agent: AgentSettings | None = None  # that of the stage which made the model, unless told
    control: bool = False  # the report marks it as one


@dataclass(frozen=True)
class AgentEvaluate:
    """Agents on held-out seeds beside the random policy and the ceiling: Pass@1, Pass@k, what turns did, perplexity of states."""

    kind: Literal["agent-eval"]
    name: str
    arms: list[Arm]
    max_new_tokens: int
    tags: list[str] = field(default_factory=list)  # one table each; without any those of the start
    groups: int = 128
    samples_per_group: int = 8
    first_seed: int = 123
    temperature: float = 1.0
    headline: str | None = None  # the arm that is compared with every other one, over the same seeds

    def __post_init__(self) -> None:
        positive(groups=self.groups, samples_per_group=self.samples_per_group, max_new_tokens=self.max_new_tokens)
        names = [arm.name for arm in self.arms]
        if self.headline is not None and self.headline not in names:
            raise ValueError(f"headline: '{self.headline}' is no arm ({', '.join(names)})")


GridStage = SelfPlay | Supervised | Reinforce | Evaluate
AgentStage = AgentStart | AgentPlay | AgentSupervised | AgentReinforce | AgentEvaluate
LanguageStage = (
    LanguageStart
    | TextGameData
    | WebPageData
    | LanguageData
    | LanguageSupervised
    | LanguageReinforce
    | LanguageEvaluate
    | AgentStage
    | WebStage
)
Stage = (
    SelfPlay
    | Supervised
    | Reinforce
    | Evaluate
    | Export
    | LanguageStart
    | LanguageData
    | TextGameData
    | WebPageData
    | LanguageSupervised
    | LanguageReinforce
    | LanguageEvaluate
    | AgentStart
    | AgentPlay
    | AgentSupervised
    | AgentReinforce
    | AgentEvaluate
    | VideoStage
    | WebStage
)
LANGUAGE = "language"  # the world of recipes that train on text alone
VIDEO = "video"  # the world of recipes of video stages


@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    name: str
    world: str  # a tag of rl/worlds/tags.yaml, or `language` or `video` for recipes of such stages
    model: ModelConfig
    stages: list[Stage]
    seed: int = 0
    ranks: int = 1  # processes in all; on several nodes each starts an equal part
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sinks: list[SinkName] = field(default_factory=list)  # copies of the metrics for TensorBoard or Weights & Biases
    video: VideoSettings | None = None  # of the world `video`

    def __post_init__(self) -> None:
        positive(ranks=self.ranks)
        object.__setattr__(self, "stages", expand(self.stages))  # a block of phases becomes its stages, once
        if (self.world == VIDEO) != (self.video is not None):
            raise ValueError("video: the world 'video' has this section, and no other world does")
        if self.video is not None and self.video.layout.total > self.model.max_positions:
            raise ValueError(f"video: a clip has {self.video.layout.total} tokens, model.max_positions is {self.model.max_positions}")
        names: list[str] = []
        for stage in self.stages:
            if stage.name in names:
                raise ValueError(f"stages: the name '{stage.name}' stands twice")
            for used in _references(stage):
                if used not in names:
                    raise ValueError(f"stages: '{stage.name}' refers to '{used}', which is no earlier stage ({', '.join(names) or 'none'})")
            names.append(stage.name)
            if not isinstance(stage, Export | {LANGUAGE: LanguageStage, VIDEO: VideoStage}.get(self.world, GridStage)):
                raise ValueError(f"stages: '{stage.name}' of kind {stage.kind} does not fit the world '{self.world}'")
        if not names:
            raise ValueError("stages: a recipe needs at least one stage")


def _references(stage: Stage) -> list[str]:
    if isinstance(stage, Supervised):
        return [x for x in (stage.data, stage.init, stage.match_tokens_of) if x]
    if isinstance(stage, Reinforce):
        return [stage.init, stage.tasks.source]
    if isinstance(stage, Evaluate):
        return [*stage.models, stage.tasks.source]
    if isinstance(stage, LanguageSupervised):
        return [x for x in (stage.data, stage.init, stage.match_tokens_of) if x]
    if isinstance(stage, LanguageReinforce):
        return [stage.init, stage.data]
    if isinstance(stage, LanguageEvaluate):
        return [*stage.models, stage.data]
    if isinstance(stage, AgentPlay):
        return [stage.start, *(x for x in (stage.model, stage.again) if x)]
    if isinstance(stage, AgentSupervised):
        return [stage.data, stage.init]
    if isinstance(stage, AgentReinforce):
        return [stage.init, *stage.counting]
    if isinstance(stage, AgentEvaluate):
        return [arm.model for arm in stage.arms]
    if isinstance(stage, VideoStage):
        return video_references(stage)
    if isinstance(stage, WebStage):
        return web_references(stage)
    return [stage.model] if isinstance(stage, Export) else []


def find(name: str) -> Path:
    """A recipe by path, or by the name of one that ships with the project."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(f"{name}: no such recipe file; the recipes that ship are: {', '.join(shipped())}")
        return path
    known = RECIPES / f"{name}.yaml"
    if not known.is_file():
        raise ConfigError(f"'{name}' is neither a file nor a recipe that ships; those are: {', '.join(shipped())}")
    return known


def shipped() -> list[str]:
    """Names of the recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(name: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `a.b=value` overrides."""
    tree = _tree(name, ())
    for setting in overrides:
        schema.apply_override(tree, setting)
    return schema.build(Recipe, tree)


def _tree(name: str, inside: tuple[Path, ...]) -> schema.Located:
    """A recipe file laid over those its key `base` names: recipes, or parts of one under recipes/parts."""
    path = find(name)
    if path in inside:
        raise ConfigError(f"{path}: is its own base, through {' and '.join(p.name for p in inside)}")
    tree = schema.read_yaml(path, str(path) if RECIPES not in path.parents else f"recipe {path.relative_to(RECIPES)}")
    if not isinstance(tree.value, dict) or "base" not in tree.value:
        return tree
    named = tree.value.pop("base")
    bases = [item.value for item in named.value] if isinstance(named.value, list) else [named.value]
    if not bases or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{named.where}: base must be the name of a recipe, or a list of names")
    whole: schema.Located | None = None
    for base in bases:
        beside = path.parent / str(base)
        below = _tree(str(beside) if beside.suffix in (".yaml", ".yml") and beside.is_file() else str(base), (*inside, path))
        whole = below if whole is None else schema.merge(whole, below)
    assert whole is not None
    return schema.merge(whole, tree)


def with_vocab(recipe: Recipe, vocab: int) -> ModelConfig:
    """The model with the tokenizer's vocabulary."""
    return replace(recipe.model, vocab=vocab)
