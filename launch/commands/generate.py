"""`terrella generate RUN_OR_FOLDER [PROMPT...]`: let a trained model write, or chat with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ...core.errors import ConfigError


@click.command()
@click.argument("model", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--chat",
    is_flag=True,
    help="Chat: an empty line or Ctrl-D ends it. The default where there is a template and no prompt.",
)
@click.option("--system", help="With --chat: the system's message.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, help="0 is greedy.")
@click.option("--samples", type=click.IntRange(1), default=1, help="Answers to every prompt.")
@click.option("--seed", type=int, default=0)
def generate(
    model: Path,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    samples: int,
    seed: int,
) -> None:
    """Continue every PROMPT with the model of a run or of a Hugging Face folder; `-` reads the prompt from standard
    input.

    Without a prompt: a chat where the model has a chat template, otherwise a prompt that the run itself recorded.
    """
    from ..text_model import TextModel, model_folder

    model_folder(model)  # a wrong path is refused before torch is loaded
    loaded = TextModel(model)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if chat or (not prompts and loaded.chats):
        if prompts:
            raise ConfigError("--chat: the messages are typed, one a line; leave the prompts out")
        if samples > 1:
            raise ConfigError("--samples: a chat has one answer to a message; give a prompt")
        _chat(loaded, system, settings, seed)
        return
    if system:
        raise ConfigError("--system: is for --chat, without a prompt; a plain prompt is continued as it is")
    asked = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts] or [_recorded(model)]
    answers = loaded.complete(asked, samples=samples, seed=seed, **settings)
    for number, prompt in enumerate(asked):
        if not prompts or len(asked) > 1:
            click.echo(click.style(prompt, dim=True))
        for answer in answers[number * samples : (number + 1) * samples]:
            click.echo(answer.text)


def _chat(loaded: Any, system: str | None, settings: dict[str, Any], seed: int) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    # a model that cannot chat is refused before anything is typed
    loaded.chat_prompt([{"role": "user", "content": "x"}])
    while True:
        click.echo("> ", nl=False)
        said = sys.stdin.readline().strip()
        if not said:
            return
        messages.append({"role": "user", "content": said})
        answer = loaded.complete([loaded.chat_prompt(messages)], seed=seed + len(messages), **settings)[0]
        click.echo(answer.text)
        messages.append({"role": "assistant", "content": answer.text})


def _recorded(run: Path) -> str:
    """A prompt that the run's model was given."""
    from ..report.rollouts import recorded_prompt

    prompt = recorded_prompt(run)
    if prompt is None:
        raise ConfigError(f"{run}: give a prompt; this model has no chat template, and no prompt was recorded here")
    click.echo(f"no prompt given; this one is from {prompt[0]}", err=True)
    return prompt[1]
