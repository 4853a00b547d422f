"""One episode as `terrella check RECIPE` shows it: the exact prompt, an answer, and what it is worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import LengthError, TerrellaError
from ...data.trajectory import Invalid, Trajectory
from ...models.geometry import count
from ..recipe import Recipe
from ..settings.verbs import Reinforce, Score, Start

LARGEST = {"cpu": 7e8, "cuda": 2e10}  # parameters of a model that is loaded to answer
ANSWER_TOKENS = 32  # sampled at most: enough to see what a model does
SHOWN = 3000  # characters of a prompt
WHOLE = 1 << 20  # tokens: more than any page has


@dataclass(frozen=True)
class Shown:
    """What one episode showed. `how` says who answered."""

    prompt: str
    prompt_tokens: int | None  # None where the tokenizer is only learnt by a stage
    answer: str
    reward: float | Invalid
    turns: int
    how: str


class _Seen:
    """A sampler that remembers the first request and its answer."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.first, self.calls = inner, None, 0

    def generate(self, requests: list[Any]) -> list[Any]:
        answers = self.inner.generate(requests)
        self.calls += 1
        self.first = self.first or (requests[0], answers[0])
        return answers


class _Random:
    """What fresh weights write: any token as likely as another."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.draw = vocabulary, random.Random(0)

    def generate(self, requests: list[Any]) -> list[Any]:
        from ...rl.rollout.sampler import Sample

        made = []
        for request in requests:
            ids = tuple(self.draw.randrange(self.vocabulary) for _ in range(request.params.max_new_tokens))
            made.append(Sample(ids, (0.0,) * len(ids), "length", 0))
        return made


def preview(recipe: Recipe, job: Any, drawn: bool = False) -> Shown | str:
    """The first episode of the recipe's first RL stage, or why none can be shown. With `drawn` no model is loaded to
    answer.
    """
    stage = next((s for kind in (Reinforce, Score) for s in recipe.stages if isinstance(s, kind)), None)
    if stage is None or getattr(recipe.env, "layout", None) is not None:  # codes have no text
        return "no stage of this recipe samples text for a reward; --rehearse plays all that it has"
    with _environment(stage, recipe, job) as (tokenizer, limit, play):
        sampler, how = (_Random(tokenizer.vocab_size), "at random") if drawn else _sampler(recipe, tokenizer)
        seen = _Seen(sampler)
        played = play(seen, min(limit or ANSWER_TOKENS, ANSWER_TOKENS))
    if seen.first is None and isinstance(played.reward, Invalid):
        raise TerrellaError(f"the first episode has no reward: {played.reward.reason}")
    if seen.first is None:
        return "the first episode ended before the model was asked anything"
    request, answer = seen.first
    if limit is not None and len(request.ids) + limit > job.model.max_positions:
        raise LengthError(
            f"stages: {stage.name}: a prompt of {len(request.ids)} tokens and max_new_tokens = {limit} exceed "
            f"model.max_positions = {job.model.max_positions}"
        )
    from ...rl.language import readable

    text = tokenizer.decode(list(request.ids), keep_special=True)
    said = answer.reason if isinstance(answer, Invalid) else readable(tokenizer, answer.ids)
    return Shown(text, None if limit is None else len(request.ids), said, played.reward, seen.calls, how)


def start_folder(recipe: Recipe) -> str | None:
    """The Hugging Face folder that the recipe begins with, None where weights are fresh."""
    return next((stage.folder for stage in recipe.stages if isinstance(stage, Start) and stage.folder), None)


def _sampler(recipe: Recipe, tokenizer: Any) -> tuple[Any, str]:
    """The start's own model where it can be loaded in a few seconds, and in words who answers."""
    import torch

    named = start_folder(recipe)
    if named is None:
        return _Random(tokenizer.vocab_size), "at random, as fresh weights do"
    size, device = count(recipe.model).total, "cuda" if torch.cuda.is_available() else "cpu"
    if size > LARGEST[device]:
        return _Random(tokenizer.vocab_size), f"at random: {size / 1e9:.1f} B parameters take too long to load here"
    from ...models.hub import resolve
    from ...rl.rollout.folder import folder_sampler

    return folder_sampler(resolve(named))[0], f"by {named}"


# the tokenizer; the most new tokens, None where the tokenizer only shows the text; play(sampler, new tokens)
Opened = tuple[Any, int | None, Callable[[Any, int], Trajectory]]


@contextmanager
def _environment(stage: Reinforce | Score, recipe: Recipe, job: Any) -> Iterator[Opened]:
    from ..stages.verbs import bytes_stand_in, environment

    env: Any = stage.env or recipe.env
    if getattr(env, "imagined_by", None) is not None:  # the model that imagines is not there yet: the true world is
        env = replace(env, imagined_by=None)
    shows_only = bytes_stand_in(env, job)
    if shows_only:  # limits in tokens say nothing of bytes
        env = replace(env, max_prompt_tokens=WHOLE, pad_prompts_to=1)
        job = replace(job, model=replace(job.model, max_positions=2 * WHOLE))
    with environment(replace(stage, env=env), job) as tasks:
        split, temperature = (
            ("train", stage.temperature) if isinstance(stage, Reinforce) else ("test", stage.temperatures[0])
        )

        def play(sampler: Any, tokens: int) -> Trajectory:
            episode = tasks.episode(tasks.of(split)[0], 0, 0)
            return tasks.play(sampler, [episode], tasks.params(tokens, temperature), recipe.seed)[0]

        known = tasks.max_length is not None and not shows_only  # or the tokenizer is only learnt by a stage
        yield tasks.tokenizer, tasks.params(stage.max_new_tokens, temperature).max_new_tokens if known else None, play
