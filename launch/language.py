"""`terrella eval text-game` and `terrella eval web-page`: a Hugging Face folder or a model behind an address, on
held-out questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.errors import ConfigError
from ..core.progress import Progress

DOMAINS = ("text-game", "web-page")
FRESH_SEED = 1_000_000  # games no recipe trains on
Answerer = Callable[[list[Any]], list[Any]]  # questions in, answers out


def spread(items: Any, n: int) -> list[Any]:
    """At most n of the items, from the first to near the last at equal distances."""
    count = min(n, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def held_out(domain: str, data: Path | None, n: int, prompt: str) -> list[Any]:
    """Questions of a folder of pair shards, or held-out ones of our own games and pages, spread evenly to n."""
    from ..data.convert.text_game import pair_of
    from ..data.shards import ShardSet
    from ..rl.language import read_pair
    from ..rl.text_games.crawl import GAMES, crawl_all, prompt_writer
    from ..rl.text_games.splits import split_rows
    from ..rl.web_pages.data import load_transitions, page_pair, split_pages
    from ..rl.web_pages.prompt import bare_page_prompt, page_prompt

    if data is not None:
        questions: Any = [read_pair(sample) for sample in spread(ShardSet(data), n)]
        if any(q.domain != domain for q in questions):
            raise ConfigError(f"--data {data}: its samples are of {questions[0].domain}, not of {domain}")
        return questions
    if domain == "text-game":
        rows = split_rows(crawl_all(list(GAMES), range(1))).test
        return [read_pair(pair_of(row, prompt_writer(prompt), "test")) for row in spread(rows, n)]
    style = bare_page_prompt if prompt == "bare" else page_prompt
    return [read_pair(page_pair(step, style, "test")) for step in spread(split_pages(load_transitions()).test, n)]


def folder_answerer(model: Path, temperature: float, max_new_tokens: int, multiple: int, seed: int) -> Answerer:
    """Questions to answers by a Hugging Face folder; a chat template is used where the tokenizer has one."""
    from ..data.tokenizers import load_tokenizer
    from ..rl.language import answers
    from ..rl.rollout.folder import folder_sampler
    from ..rl.rollout.sampler import SamplingParams

    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: no config.json; name a Hugging Face folder, or give --url")
    tokenizer, (sampler, _) = load_tokenizer(model), folder_sampler(model)
    params = SamplingParams(max_new_tokens, temperature, stop_ids=tokenizer.stop_ids)

    def answer(questions: list[Any]) -> list[Any]:
        progress = Progress("answers", len(questions))
        return answers(
            sampler, questions, tokenizer, params, seed, multiple, progress=lambda done: progress.update(done), chunk=64
        )

    return answer


def served_answerer(url: str, model: str, key: str, temperature: float, max_new_tokens: int) -> Answerer:
    """Questions to answers by a model behind an address."""
    from ..rl.text_games.teacher import Teacher

    teacher = Teacher(url, model, key=key, system="", temperature=temperature, max_tokens=max_new_tokens)
    return lambda questions: teacher.ask_all([question.prompt for question in questions])


def predictor(answer: Answerer, prompt: str) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Rows of text games to answers, as walks in imagined games ask for them."""
    from ..rl.language import Question
    from ..rl.text_games.crawl import prompt_writer

    write = prompt_writer(prompt)
    return lambda rows: answer([Question("text-game", write(row), "", row, False) for row in rows])


def drift_of(answer: Answerer, name: str, games: Sequence[str], prompt: str, steps: int, n: int) -> dict[str, Any]:
    """The table of imagined states that still equal the true ones after 1, 2, ... steps, in n fresh games."""
    from ..rl.text_games.crawl import GAMES
    from ..rl.text_games.world import drift, drift_table

    walked = drift(list(games) or list(GAMES), n, steps, predictor(answer, prompt), first_seed=FRESH_SEED)
    return drift_table({name: walked["model"], "copy": walked["copy"]}, "Imagined states still exact")


def show(table: dict[str, Any]) -> None:
    """Print a table of results in percent."""
    click.echo(f"{table['title']:34}" + "".join(f"{column:>24}" for column in table["columns"]))
    for row in table["rows"]:
        cells = [
            "-" if c["n"] == 0 else f"{100 * c['value']:.1f} ({100 * c['low']:.1f}-{100 * c['high']:.1f})"
            for c in row["cells"]
        ]
        click.echo(f"{row['name'][:33]:34}" + "".join(f"{cell:>24}" for cell in cells))
    click.echo(table["note"])


@dataclass(frozen=True)
class Questions:
    """What a language world model is asked and how it answers, by the names of the options."""

    data: Path | None
    n: int
    prompt: str
    mode: Any  # strict or faithful
    max_new_tokens: int
    pad_prompts_to: int
    seed: int
    drift: int  # above 0: so many steps of our own games
    games: tuple[str, ...]


def evaluate_language(
    domain: str, model: str, asked: Questions, temperature: float, url: str | None, key: str
) -> dict[str, Any]:
    """Answer and judge: the table beside the answer that nothing changes and the true one; or with `drift` how long
    imagined games stay the true ones, beside copying their start.
    """
    from ..rl.evaluation import heat
    from ..rl.text_games import evaluate as game_tables
    from ..rl.web_pages import evaluate as pages

    if asked.drift and (domain != "text-game" or asked.data is not None):
        raise ConfigError(
            "--drift: walks our own text games, whose true next state is known; use it with text-game and without "
            "--data"
        )
    questions = [] if asked.drift else held_out(domain, asked.data, asked.n, asked.prompt)
    if url:
        answer = served_answerer(url, model, key, temperature, asked.max_new_tokens)
    else:
        answer = folder_answerer(Path(model), temperature, asked.max_new_tokens, asked.pad_prompts_to, asked.seed)
    name = f"{Path(model).name}, {heat(temperature)}"
    if asked.drift:
        return drift_of(answer, name, asked.games, asked.prompt, asked.drift, asked.n)
    if domain == "web-page":
        truths = [q.answer for q in questions]
        judged = pages.judge_pages(truths, answer(questions), asked.mode)
        return pages.table(truths, [(name, "model", judged)], asked.mode, "Held-out page transitions")
    rows = [q.row for q in questions]
    model_rows = game_tables.Model(name, game_tables.judge_rows(rows, answer(questions), asked.mode))
    return game_tables.table(rows, [model_rows], asked.mode, "Held-out transitions")
