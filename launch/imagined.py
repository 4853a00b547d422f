"""The world that a trained model imagines, ready to be offered: text games by language models, Sokoban by grid
models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..rl.exchange.offers import GAME, Offer
from ..rl.worlds.base import World
from .text_model import model_folder


@dataclass(frozen=True)
class Imagining:
    """How a language model is asked for the next state of a text game."""

    max_new_tokens: int = 512
    prompt: str = "bare"
    pad_prompts_to: int = 1


def offer_of(path: Path, true: Offer, how: Imagining, report: Callable[[str], Any] | None = None) -> Offer:
    """The offer of `true` as the model of a run or folder imagines it, greedily, with the true world beside it."""
    from ..rl.exchange.imagined import Beside

    folder = model_folder(path)
    imagine = _text_game(folder, true, how) if true.name.startswith(GAME) else _grid(folder, true)
    return Offer(
        f"{true.name} imagined by {path.resolve().name}",
        lambda: Beside(imagine(), true.make(), report),
        true.instruction,
        true.max_actions,
    )


def _sampler(folder: Path) -> tuple[Any, Any]:
    """A sampler on a folder's weights, and its sizes."""
    import torch

    from ..models.families import parameter_names
    from ..models.hf import read_config, weight_source
    from ..rl.rollout.embedded import EmbeddedSampler

    config = read_config(folder)
    source, _ = weight_source(folder, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: source(name).to(device) for name in parameter_names(config)}
    return EmbeddedSampler(lambda: weights, config), config


def _text_game(folder: Path, true: Offer, how: Imagining) -> Callable[[], World]:
    from ..data.tokenizers import load_tokenizer
    from ..rl.language import Question, answers
    from ..rl.rollout.sampler import SamplingParams
    from ..rl.text_games.crawl import bare_prompt, prompts
    from ..rl.text_games.world import ImaginedGame

    sampler, _ = _sampler(folder)
    tokenizer, write, busy = (
        load_tokenizer(folder),
        prompts() if how.prompt == "full" else bare_prompt,
        threading.Lock(),
    )
    params = SamplingParams(how.max_new_tokens, 0.0, stop_ids=tokenizer.stop_ids)

    def predict(rows: list[dict[str, Any]]) -> list[Any]:
        asked = [Question("text-game", write(row), "", row, False) for row in rows]
        with busy:  # connections share the model
            return answers(sampler, asked, tokenizer, params, 0, how.pad_prompts_to)

    return lambda: ImaginedGame(predict, true.name.removeprefix(GAME))


def _grid(folder: Path, true: Offer) -> Callable[[], World]:
    from ..data.trajectory import Invalid
    from ..rl.exchange.imagined import ImaginedGrid
    from ..rl.grid.imagination import GridDynamics, ImaginationEpisode, ImaginationTask, prompt_ids
    from ..rl.rollout.sampler import SampleRequest, SamplingParams
    from ..rl.worlds.sokoban import Sokoban

    dynamics = GridDynamics.of(true.name)
    world, tokenizer, busy = true.make(), dynamics.tokenizer(), threading.Lock()
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
        with busy:
            sample = sampler.generate([SampleRequest(prompt_ids(tokenizer, state, action), (0, 0, 0, 0), params)])[0]
        if isinstance(sample, Invalid):
            return sample
        imagined = ImaginationEpisode(ImaginationTask(0, state, (action,), ()), 0, tokenizer)
        imagined.receive(sample)
        return imagined.texts()[0]

    return lambda: ImaginedGrid(true.make(), dynamics, predict)  # type: ignore[arg-type]
