"""Warnings about recipes that are valid but may not do what their author expects; shown by `terrella check` and at the
start of a run. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ..core.errors import ConfigError
from ..rl.agents.config import WorldsEnvironment
from ..rl.own.config import EnvironmentSettings
from ..rl.rollout.config import Rollouts
from ..rl.video.config import VideoEnvironment
from .recipe import Recipe
from .settings.verbs import Arm, Collect, Reinforce, Score
from .settings.video import VideoReal2Sim, VideoTokenizerTraining

# settings of environments that decide the score of an episode, whoever plays it; the others concern how a model is
# asked, or training alone
SCORING = (
    *("max_turns", "actions_per_turn", "format_penalty", "observation_reward", "prediction_reward", "config"),
    *("reward", "answer", "mode", "steps", "walk", "path", "args", "horizon", "metrics", "runs"),
)


def find_warnings(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """All warnings; each names its setting."""
    for stage in recipe.stages:
        if isinstance(stage, Score):
            yield from _judged_otherwise(stage, recipe)
        yield from _without_effect(stage)
    yield from _far_from_context(recipe)
    yield from _trained_on_held_out(recipe)


def met_by(arm: Arm, stage: Score, recipe: Recipe) -> EnvironmentSettings | None:
    """The environment in which an arm's model plays the tasks of an evaluation: the arm's own, else that of the stage
    that trained it or collected its lessons, else the evaluation's.
    """
    stages: dict[str, Any] = {other.name: other for other in recipe.stages}
    trained = stages[getattr(stages[arm.model], "data", None) or arm.model]
    return arm.env or (getattr(trained, "env", None) if stage.arms else None) or stage.env or recipe.env


def require_clear(stage: Score, recipe: Recipe) -> None:
    """Refuse arms whose environment is ambiguous: the evaluation has its own, and it differs from that of the stage
    that trained the model, or is of another kind.
    """
    for arm in stage.arms:
        own, asked = met_by(arm, stage, recipe), stage.env or recipe.env
        if arm.env is not None or own == asked:
            continue
        if type(own) is not type(asked):
            differ = f"kind ({getattr(own, 'kind', None)}, not {getattr(asked, 'kind', None)})"
        elif stage.env is not None:
            differ = ", ".join(_differing(own, asked))
        else:
            continue
        raise ConfigError(
            f"stages: {stage.name}.arms: '{arm.name}' has no env, and its model was trained in one that differs from "
            f"this stage's in {differ}; give the arm the env to play in"
        )


def _differing(one: Any, other: Any) -> list[str]:
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


def _judged_otherwise(stage: Score, recipe: Recipe) -> Iterator[tuple[str, str]]:
    asked = stage.env or recipe.env
    for arm in stage.arms:
        own = met_by(arm, stage, recipe)
        if arm.env is not None or own == asked or type(own) is not type(asked):
            continue
        names = [name for name in _differing(own, asked) if name in SCORING]
        if names:
            different = ", ".join(f"{name} = {getattr(own, name)} (not {getattr(asked, name)})" for name in names)
            yield (
                f"stages.{stage.name}.arms",
                f"'{arm.name}' is judged as it was trained, with {different}: its scores are not those of the other "
                "arms' rules; give the arm an env to choose",
            )


def _without_effect(stage: Any) -> Iterator[tuple[str, str]]:
    rollouts = getattr(stage, "rollouts", None)
    if isinstance(rollouts, Rollouts) and not rollouts.ahead:
        if rollouts.deadline_s not in (None, Rollouts.earlier_defaults["deadline_s"]):
            yield (
                f"stages.{stage.name}.rollouts.deadline_s",
                f"{rollouts.deadline_s:g} acts only where a step waits for rollouts that began before it; set ahead to "
                "1 or more, or leave deadline_s out (sampler.request_s and env.deadline_s act in both)",
            )


def _trained_on_held_out(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Warn about stages that play world seeds which an evaluation, or the validation of an RL stage, holds out."""
    asked: list[tuple[str, Any, int]] = []
    played: list[tuple[str, Any, int]] = []
    for stage in recipe.stages:
        env = getattr(stage, "env", None) or recipe.env
        if not isinstance(env, WorldsEnvironment):
            continue
        if isinstance(stage, Score):
            asked.append((stage.name, env, stage.n))
        elif isinstance(stage, Collect) and stage.prompts is not None:
            played.append((stage.name, env, stage.prompts))
        elif isinstance(stage, Reinforce):
            played.append((stage.name, env, stage.steps * stage.prompts_per_step))
            asked += [(stage.name, env, stage.validation.prompts)] if stage.validation is not None else []
    for name, own, count in played:
        for other, env, n in asked:
            first, end = max(own.first_seed, env.test_seed), min(own.first_seed + count, env.test_seed + n)
            if first < end and {*own.tags} & {*(env.test_tags or env.tags)}:
                yield (
                    f"stages.{name}.env.first_seed",
                    f"{own.first_seed}: this stage plays the seeds {first} to {end - 1}, which are held out in stage "
                    f"'{other}' (test_seed = {env.test_seed}); choose seeds that do not meet",
                )


def _far_from_context(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Warn about stages that use a compressive tokenizer at distances from the context frame it was not trained on."""
    env = recipe.env
    if not isinstance(env, VideoEnvironment) or env.tokenizer.kind != "compressive":
        return
    for tokenizer in recipe.stages:
        if not isinstance(tokenizer, VideoTokenizerTraining) or tokenizer.released is not None:
            continue
        shown = {f"stages.{env.data}": ("env.context_reach, history and horizon", env.context_distances)}
        shown |= {
            f"stages.{s.name}": ("its frames", range(s.frames)) for s in recipe.stages if isinstance(s, VideoReal2Sim)
        }
        trained = tokenizer.context_distances
        for where, (by, distances) in shown.items():
            if new := sorted({*distances} - {*trained}):
                yield (
                    where,
                    f"by {by} pictures lie {distances[0]} to {distances[-1]} behind their context frame; stage "
                    f"'{tokenizer.name}' trains the tokenizer on {trained[0]} to {trained[-1]} (window = "
                    f"{tokenizer.window}) and never on {_runs(new)}",
                )


def _runs(numbers: list[int]) -> str:
    """Increasing numbers in words, such as 0 and 16 to 23."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " and ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
