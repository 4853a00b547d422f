"""Checks, before anything starts, that the optional packages a recipe needs are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..core.errors import ConfigError, missing_extra
from ..rl.rollout.config import Vllm
from ..rl.video.config import VideoEnvironment
from ..rl.webrl.config import WebSiteEnvironment
from .recipe import Recipe
from .settings.base import sampler_of


def require_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose packages are not installed, with the pip command that installs them."""
    for package, where in needed(recipe).items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{where}: {missing_extra(ImportError(name=package))}")


def needed(recipe: Recipe) -> dict[str, str]:
    """The packages that are not in the base install, and where each is first asked for."""
    found: dict[str, str] = {}
    for where, package in _asked(recipe):
        found.setdefault(package, where)
    return found


def _asked(recipe: Recipe) -> Iterator[tuple[str, str]]:
    environments = [("env", recipe.env)]
    for stage in recipe.stages:
        for part in (stage, *getattr(stage, "arms", ())):
            environments.append((f"stages.{stage.name}.env", getattr(part, "env", None)))
    for where, env in environments:
        if isinstance(env, WebSiteEnvironment):
            yield from ((where, package) for package in _browser(env))
        if isinstance(env, VideoEnvironment) and env.shards is None:
            yield f"{where}.recording", "mujoco"
    for stage in recipe.stages:
        sampler = sampler_of(stage, ())
        if isinstance(sampler, Vllm) and not sampler.urls:
            yield f"stages.{stage.name}", "vllm"


def _browser(settings: WebSiteEnvironment) -> Iterator[str]:
    from ..rl.worlds.tasks import load_tasks

    known = load_tasks(*settings.tag_files)
    for config in (known[tag].config for tag in (settings.tag, settings.test_tag) if tag in known):
        if config.get("source") == "miniwob":
            yield "miniwob"
        if config.get("backend") == "chromium":
            yield "playwright"
