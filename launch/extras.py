"""Packages of extras that a recipe needs, asked for before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..core.errors import ConfigError, missing_extra
from ..rl.rollout.config import Vllm
from .recipe import Recipe
from .settings.video import VideoData
from .settings.web import WebStart


def require_packages(recipe: Recipe) -> None:
    """Refuse, with the pip line, a recipe whose packages are not installed."""
    for stage, package in needed(recipe):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"stage '{stage}': {missing_extra(ImportError(name=package))}")


def needed(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(stage, package) for what is not in the base install."""
    for stage in recipe.stages:
        sampler = getattr(getattr(stage, "rollouts", None), "sampler", None)
        if isinstance(sampler, Vllm) and not sampler.urls:
            yield stage.name, "vllm"
        if isinstance(stage, VideoData) and stage.shards is None:
            yield stage.name, "mujoco"
        if isinstance(stage, WebStart):
            yield from ((stage.name, package) for package in _browser(stage))


def _browser(stage: WebStart) -> Iterator[str]:
    from ..rl.worlds.tasks import load_tasks

    known = load_tasks(*stage.tag_files)
    for config in (known[tag].config for tag in (stage.tag, stage.test_tag) if tag in known):
        if config.get("source") == "miniwob":
            yield "miniwob"
        if config.get("backend") == "chromium":
            yield "playwright"
