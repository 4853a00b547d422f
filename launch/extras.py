"""Packages of extras that a recipe needs, asked for before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..core.errors import ConfigError, missing_extra
from ..rl.rollout.config import Vllm
from ..rl.video.config import VideoEnvironment
from ..rl.webrl.config import WebSiteEnvironment
from .recipe import Recipe


def require_packages(recipe: Recipe) -> None:
    """Refuse, with the pip line, a recipe whose packages are not installed."""
    for where, package in needed(recipe):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{where}: {missing_extra(ImportError(name=package))}")


def needed(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(where it is asked for, package) for what is not in the base install."""
    if isinstance(recipe.env, WebSiteEnvironment):
        yield from (("env", package) for package in _browser(recipe.env))
    if isinstance(recipe.env, VideoEnvironment) and recipe.env.shards is None:
        yield "env.recording", "mujoco"
    for stage in recipe.stages:
        where = f"stages.{stage.name}"
        sampler = getattr(getattr(stage, "rollouts", None), "sampler", None)
        if isinstance(sampler, Vllm) and not sampler.urls:
            yield where, "vllm"


def _browser(settings: WebSiteEnvironment) -> Iterator[str]:
    from ..rl.worlds.tasks import load_tasks

    known = load_tasks(*settings.tag_files)
    for config in (known[tag].config for tag in (settings.tag, settings.test_tag) if tag in known):
        if config.get("source") == "miniwob":
            yield "miniwob"
        if config.get("backend") == "chromium":
            yield "playwright"
