"""The recipe: a YAML file resolved into these dataclasses. Importable without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..core import schema
from ..core.config import ParallelConfig, PrecisionConfig
from ..core.errors import ConfigError
from ..core.sinks import SinkName
from ..models.config import NamedModel
from ..models.families import write_hf_config
from ..rl.own.config import EnvironmentSettings
from .model_folder import fill_in
from .recipe_files import find, tree_of
from .settings.base import Export, positive, references, sources
from .settings.verbs import Collect, OwnStage, Reinforce, Score, Start, Tune, VerbStage
from .settings.video import VideoStage, VideoTokenizerTraining
from .settings.web import WebActor, WebCritic, WebOrm, WebStage, expand

RENAMED = {
    "language-start": "start",
    "agent-start": "start",
    "agent-play": "collect",
    "agent-sft": "sft",
    "agent-rl": "rl",
    "agent-eval": "eval",
    "language-sft": "sft",
    "language-rlvr": "rl",
    "language-eval": "eval",
    "self-play": "collect",
    "supervised": "sft",
    "rlvr": "rl",
    "evaluate": "eval",
    "video-pretrain": "sft",
    "video-rlvr": "rl",
    "video-eval": "eval",
    "web-start": "start",
    "web-demos": "collect",
    "web-rollout": "collect",
    "web-sft": "sft",
    "web-eval": "eval",
    "web-rl": "rl",
    "text-game-data": "collect",
    "web-page-data": "collect",
    "web-site-pages": "collect",
    "language-data": "collect",
    "video-data": "collect",
    "video-tokens": "collect",
}  # stage kinds of earlier releases, and what replaced them
MOVED = {
    "text-game-data": "text-game whose data",
    "web-page-data": "web-page whose data",
    "web-site-pages": "web-page whose data",
    "language-data": "text-game or web-page whose data",
    "video-data": "video whose episodes",
    "video-tokens": "video whose data",
}  # for these, the environment kinds that now have their settings, and the setting that names the stage
Stage = VerbStage | WebStage | VideoStage | Export
LEAVING_MODELS = Start | Tune | Reinforce | OwnStage | WebOrm | WebCritic | WebActor


@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    name: str  # of the recipe; used in reports and for the default run folder
    model: NamedModel  # sizes of the model, or the folder that they are read from
    stages: list[Stage]  # the stages, in order
    env: EnvironmentSettings | None = None  # what the stages collect, sft, rl and eval train and evaluate on
    seed: int = 0  # seed of all randomness
    ranks: int = 1  # processes in all; on several nodes each starts an equal part
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how the model is spread over ranks
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)  # number types and whose layers compute
    # copies of metrics; the first two show rollouts and results too
    sinks: list[SinkName] = field(default_factory=list)

    # removed settings, with the values at which they had no effect
    earlier_defaults: ClassVar[dict[str, Any]] = {"world": "language", "video": None}

    def __post_init__(self) -> None:
        positive(self, "ranks")
        object.__setattr__(self, "stages", expand(self.stages, self.env))  # expands blocks of phases, once
        layout = getattr(self.env, "layout", None)
        if layout is not None and layout.total > self.model.max_positions:
            raise ValueError(
                f"env: a clip has {layout.total} tokens, model.max_positions is {self.model.max_positions}"
            )
        if any(isinstance(stage, Export) for stage in self.stages):
            try:
                write_hf_config(self.model.sizes, "float32")
            except ConfigError as error:  # now rather than after the training
                raise ValueError(str(error)) from error
        _require_file_name("name", self.name)
        names: list[str] = []
        makers: dict[str, Any] = {}  # environments by the stages that make their data
        for stage in self.stages:
            _require_file_name("stages", stage.name)
            if stage.name in names:
                raise ValueError(f"stages: the name '{stage.name}' is used twice")
            if isinstance(stage, VideoTokenizerTraining) and stage.name != getattr(
                self.env, "tokenizer_stage", stage.name
            ):
                raise ValueError(f"stages: '{stage.name}' makes a tokenizer that env.tokenizer_stage does not name")
            for used in references(stage, self.env):
                if used not in names:
                    raise ValueError(
                        f"stages: '{stage.name}' refers to '{used}', which is no earlier stage "
                        f"({', '.join(names) or 'none'})"
                    )
            names.append(stage.name)
            env = getattr(stage, "env", None) or self.env
            _require_models(stage, env, [other for other in self.stages if not isinstance(other, LEAVING_MODELS)])
            if isinstance(stage, Collect | VideoTokenizerTraining) and stage.name in sources(env).values():
                makers[stage.name] = env
            elif isinstance(stage, Collect) and stage.prompts is None:
                raise ValueError(f"stages: '{stage.name}' needs prompts, the number of training tasks")
            if isinstance(stage, Collect | Tune | Reinforce | Score):
                for read in (env, *(arm.env for arm in getattr(stage, "arms", ()) if arm.env)):
                    _require_makers(stage, read, makers)
            if isinstance(stage, Tune) and stage.init is None and _has_start(self, stage):
                raise ValueError(
                    f"stages: '{stage.name}' needs init, the stage whose weights it starts from, such as the recipe's "
                    "start"
                )
            if isinstance(stage, VideoStage) and layout is None:
                raise ValueError(f"stages: '{stage.name}' of kind {stage.kind} needs an env of kind video")
            if isinstance(stage, Reinforce | Score) and stage.max_new_tokens is None:
                if not getattr(stage.env or self.env, "fixed_length", False):
                    raise ValueError(f"stages: '{stage.name}' needs max_new_tokens, the most tokens of one answer")
        if not names:
            raise ValueError("stages: a recipe needs at least one stage")
        for key, name in sources(self.env).items():
            if name not in names:
                raise ValueError(f"env.{key}: '{name}' is no stage ({', '.join(names)})")


def _has_start(recipe: Recipe, stage: Tune) -> bool:
    """Whether the recipe has a start stage with the tokenizer of this stage's lessons, to begin from."""
    own = getattr(stage.env or recipe.env, "own_tokenizer", False)
    return not own and any(isinstance(other, Start) for other in recipe.stages)


def _require_models(stage: Any, env: Any, untrained: list[Any]) -> None:
    """Refuse a stage that starts from, asks or evaluates the model of a stage that leaves none."""
    asked = {f"env.{key}": [getattr(env, key)] for key in getattr(env, "models", ())} if hasattr(stage, "env") else {}
    asked |= {key: [getattr(stage, key, None)] for key in ("init", "model", "actor", "orm", "resume")}
    asked["models"] = getattr(stage, "evaluated", getattr(stage, "models", []))
    for key, names in asked.items():
        for other in untrained:
            if other.name in names:
                raise ValueError(
                    f"stages: '{stage.name}': {key}: '{other.name}' of kind {other.kind} leaves no model; name a stage "
                    "that starts or trains one"
                )


def _require_makers(stage: Any, env: Any, makers: dict[str, Any]) -> None:
    """Refuse an environment whose data no stage makes, or a stage makes with other settings."""
    for source, name in sources(env).items():
        maker = makers.get(name)
        for key in getattr(env, "making", ()):
            if maker is None:
                wanted = "video-tokenizer stage" if source == "tokenizer_stage" else "collect stage with that env"
                raise ValueError(
                    f"stages: '{stage.name}': env.{source}: '{name}' makes nothing that an env of kind {env.kind} "
                    f"reads; name a {wanted}"
                )
            if getattr(maker, key, None) != getattr(env, key):
                raise ValueError(
                    f"stages: '{stage.name}': env.{key}: differs from that of '{name}', which makes what is read; "
                    "leave it out"
                )
        if name == stage.name:
            return


def _require_file_name(key: str, name: str) -> None:
    """Refuse a name that cannot be a file name: folders and files are named after runs and stages."""
    if not re.fullmatch(r"\w[\w.+-]{0,99}", name):
        raise ValueError(
            f"{key}: the name {name[:100]!r} must be a file name: letters, digits and . _ + - only, at most 100, no "
            "dot first"
        )


def settings_tree(name: str) -> schema.Located:
    """The settings of a recipe as its files have them."""
    tree = tree_of(find(name))
    if isinstance(tree.value, dict):
        tree.value.pop("envs", None)  # section of a method's file that was given by path
    return tree


def load(name: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `a.b=value` overrides."""
    tree = settings_tree(name)
    for setting in overrides:
        schema.apply_override(tree, setting)
    refuse_old_kinds(tree)
    _lay_over_environment(tree)
    fill_in(tree)
    return schema.build(Recipe, tree)


def _sections(node: schema.Located, key: str) -> list[schema.Located]:
    """The sections of a list under a key; other shapes are refused later, where the error can name them."""
    items = node.value.get(key) if isinstance(node.value, dict) else None
    return (
        [item for item in items.value if isinstance(item.value, dict)]
        if items is not None and isinstance(items.value, list)
        else []
    )


def _lay_over_environment(tree: schema.Located) -> None:
    """Complete a stage's env that has no kind: it changes settings of the recipe's env, or of the env of the stage that
    makes its data. The same applies to an arm of an evaluation.
    """
    whole = tree.value.get("env") if isinstance(tree.value, dict) else None
    makers: dict[str, schema.Located] = {}
    for stage in _sections(tree, "stages"):
        for section in (stage, *_sections(stage, "arms")):
            own = section.value.get("env")
            if own is None or not isinstance(own.value, dict):
                continue
            data = str(own.value["data"].value) if "data" in own.value else ""
            base = makers.get(data, whole)
            if "kind" not in own.value and base is not None and isinstance(base.value, dict):
                section.value["env"] = own = schema.merge(base, own)
            if section is stage and "name" in stage.value and data == stage.value["name"].value:
                makers[data] = own


def refuse_old_kinds(tree: schema.Located) -> None:
    """Refuse stage kinds of earlier releases, naming their replacement."""
    for stage in _sections(tree, "stages"):
        kind = stage.value.get("kind")
        if kind is not None and isinstance(kind.value, str) and kind.value in RENAMED:
            moved = MOVED.get(kind.value)
            settings = f", and its settings in an env of kind {moved} is this stage" if moved else ""
            new = RENAMED[kind.value]
            raise ConfigError(
                f"{kind.where}: the kind of stage '{kind.value}' is called '{new}' now; write that{settings}"
            )
    video = tree.value.get("video") if isinstance(tree.value, dict) else None
    if video is not None and video.value is not None:
        text = (
            "the section 'video' is part of env now; write env: {kind: video, data: TOKENS_STAGE, ...}, and "
            "leave world out"
        )
        raise ConfigError(f"{video.where}: {text}")


def has_environment(name: str) -> bool:
    """Whether a recipe has a section `env`, which a user's own data, reward or environment can replace."""
    tree = settings_tree(name)
    env = tree.value.get("env") if isinstance(tree.value, dict) else None
    kind = env.value.get("kind") if env is not None and isinstance(env.value, dict) else None
    return kind is not None and (kind.value == "data" or ":" in str(kind.value))
