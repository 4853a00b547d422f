"""The world that a trained model imagines, ready to be served: text games and web pages by language models, Sokoban
by grid models, the table top by video models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import schema
from ..core.errors import ConfigError
from ..rl.exchange.named_worlds import GAME, PAGE, TABLE, NamedWorld, table_world
from ..rl.worlds.base import World
from .language import predictor
from .text_model import model_folder


@dataclass(frozen=True)
class Imagining:
    """How a language model is asked for the next state of a text game or the changes of a page."""

    max_new_tokens: int = 512
    prompt: str = "bare"
    pad_prompts_to: int = 1


def imagined_world(
    path: Path, true: NamedWorld, how: Imagining, report: Callable[[str], Any] | None = None
) -> NamedWorld:
    """The world `true` as the model of a run or folder imagines it, played alongside the true one.

    Words are decoded greedily; frames are sampled, by the seed of the episode.
    """
    from ..rl.exchange.imagined import ComparedWorld

    folder = model_folder(path)
    if true.name.startswith(GAME):
        imagine = _text_game(folder, true, how)
    elif true.name.startswith(PAGE):
        imagine = _page(folder, true, how)
    elif true.name.startswith(TABLE):
        true, imagine = _table(path, folder, true)
    else:
        imagine = _grid(folder, true)

    def make() -> World:
        world = true.make()
        return ComparedWorld(imagine(world), world, report)

    return replace(true, name=f"{true.name} imagined by {path.resolve().name}", make=make)


class _Shared:
    """A sampler that the threads of several connections use in turn."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.busy = sampler, threading.Lock()

    def generate(self, requests: Any) -> Any:
        with self.busy:
            return self.sampler.generate(requests)


def _sampler(folder: Path) -> tuple[Any, Any]:
    """A sampler on a folder's weights, and its sizes."""
    from ..rl.rollout.folder import folder_sampler

    sampler, config = folder_sampler(folder)
    return _Shared(sampler), config


def _language(folder: Path, how: Imagining) -> Callable[[list[Any]], list[Any]]:
    """Questions to answers."""
    from ..data.tokenizers import load_tokenizer
    from ..rl.language import answers
    from ..rl.rollout.sampler import SamplingParams

    sampler, _ = _sampler(folder)
    tokenizer = load_tokenizer(folder)
    params = SamplingParams(how.max_new_tokens, 0.0, stop_ids=tokenizer.stop_ids)
    return lambda asked: answers(sampler, asked, tokenizer, params, 0, how.pad_prompts_to)


def _text_game(folder: Path, true: NamedWorld, how: Imagining) -> Callable[[World], World]:
    from ..rl.text_games.world import ImaginedGame

    predict = predictor(_language(folder, how), how.prompt)
    return lambda _: ImaginedGame(predict, true.name.removeprefix(GAME))


def _page(folder: Path, true: NamedWorld, how: Imagining) -> Callable[[World], World]:
    from ..rl.language import read_pair
    from ..rl.web_pages.data import page_pair
    from ..rl.web_pages.prompt import bare_page_prompt, page_prompt
    from ..rl.web_pages.world import ImaginedPage

    answer, style = _language(folder, how), bare_page_prompt if how.prompt == "bare" else page_prompt
    return lambda world: ImaginedPage(
        world,
        f"pages/{true.name.removeprefix(PAGE)}",
        lambda step: answer([read_pair(page_pair(step, style, "test"))])[0],
    )


def _table(run: Path, folder: Path, true: NamedWorld) -> tuple[NamedWorld, Callable[[World], World]]:
    """The true world with frames of the model's size, and a function that makes the imagined one."""
    from ..data.video_actions import ActionBins
    from ..models.video.training import load_tokenizer
    from ..rl.video.artifacts import WEIGHTS, device
    from ..rl.video.config import VideoEnvironment
    from ..rl.video.imagine import ClipDecoder
    from ..rl.video.real2sim import WorldModelSimulator
    from ..rl.video.world import ImaginedTable
    from .recipe import Recipe

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: name the run directory; a video model needs the tokenizer that the run trained")
    recipe = schema.load(Recipe, run / "config.yaml")
    env = recipe.env
    if not isinstance(env, VideoEnvironment) or env.actions != "tabletop":
        raise ConfigError(f"{run}: --of {true.name} wants a run whose env has kind: video and actions: tabletop")
    trained = [stage.name for stage in recipe.stages if stage.kind == "video-tokenizer"]
    weights = run / "stages" / trained[0] / WEIGHTS if trained else run
    if not weights.is_file():
        raise ConfigError(f"{weights}: the run has trained no video tokenizer; run its stage of kind video-tokenizer")
    sampler, config = _sampler(folder)
    if config.vocab < env.layout.vocab:
        raise ConfigError(f"{folder}: its vocabulary has {config.vocab} tokens, the run's clips {env.layout.vocab}")
    decoder = ClipDecoder(load_tokenizer(env.tokenizer, weights, device()), env.layout, env.bf16)
    bins, task = ActionBins(env.table.action_ranges, env.action_bins), true.name.removeprefix(TABLE)

    def imagine(world: World) -> World:
        simulator = WorldModelSimulator(sampler, decoder, bins, top_k=env.top_k, repetition_penalty=1.0, seed=0)
        return ImaginedTable(world, task, simulator)  # type: ignore[arg-type]

    return table_world(task, env.table), imagine


def _grid(folder: Path, true: NamedWorld) -> Callable[[World], World]:
    from ..data.trajectory import Invalid
    from ..rl.exchange.imagined import ImaginedGrid
    from ..rl.grid.imagination import GridDynamics, ImaginationEpisode, ImaginationTask, prompt_ids
    from ..rl.rollout.sampler import SampleRequest, SamplingParams
    from ..rl.worlds.sokoban import Sokoban

    dynamics = GridDynamics.of(true.name)
    world, tokenizer = true.make(), dynamics.tokenizer()
    if not isinstance(world, Sokoban) or world.config.observation != "grid":
        raise ConfigError(
            f"--of {true.name}: a grid model imagines a Sokoban whose state is shown as a grid alone, such as "
            "SimpleSokoban"
        )
    sampler, config = _sampler(folder)
    if config.vocab != tokenizer.vocab_size:
        raise ConfigError(
            f"{folder}: its vocabulary has {config.vocab} tokens, a world model of {true.name} has "
            f"{tokenizer.vocab_size}"
        )

    def predict(state: str, action: int) -> str | Invalid:
        params = SamplingParams(len(state), 0.0)
        sample = sampler.generate([SampleRequest(prompt_ids(tokenizer, state, action), (0, 0, 0, 0), params)])[0]
        if isinstance(sample, Invalid):
            return sample
        imagined = ImaginationEpisode(ImaginationTask(0, state, (action,), ()), 0, tokenizer)
        imagined.receive(sample)
        return imagined.texts()[0]

    return lambda world: ImaginedGrid(world, dynamics, predict)  # type: ignore[arg-type]
