"""Chat templates: messages as the text that a model was trained to read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core.errors import ConfigError
from ..data.tokenizers import HFTokenizer, Tokenizer
from .environment import Prompt


@dataclass(frozen=True)
class Chat:
    """What a chat template puts before messages: the system's, the first user's, the agent's, each further user's."""

    start: str
    first_user: str
    agent: str
    next_user: str


PLAIN = Chat("", "\nUser:\n", "\nAgent:\n", "\nUser:\n")


def chat_of(tokenizer: Tokenizer) -> Chat:
    """The template of a Hugging Face tokenizer, found by rendering marked messages; a plain one for tokenizers
    without.
    """
    template = _template(tokenizer)
    return PLAIN if template is None else _marked(tokenizer, template)


def turns_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the template puts before the agent's answer and before each further user's message. Unlike `chat_of` it
    needs no system turn, which some templates refuse.
    """
    template = _template(tokenizer)
    return (PLAIN.agent, PLAIN.next_user) if template is None else _turns(tokenizer, template)


def _template(tokenizer: Tokenizer) -> str | None:
    hf = getattr(tokenizer, "hf", None)
    return hf.chat_template or None if hf is not None else None


MARKS = ("\u2460", "\u2461", "\u2462", "\u2463")


@lru_cache(maxsize=8)
def _marked(tokenizer: HFTokenizer, template: str) -> Chat:
    system, user, answer, again = MARKS
    asked, whole = _rendered(tokenizer, ("system", "user", "assistant", "user"), MARKS, 2)
    return Chat(
        whole[: whole.index(system)],
        whole[whole.index(system) + 1 : whole.index(user)],
        asked[asked.index(user) + 1 :],
        whole[whole.index(answer) + 1 : whole.index(again)],
    )


@lru_cache(maxsize=8)
def _turns(tokenizer: HFTokenizer, template: str) -> tuple[str, str]:
    user, answer, again = marks = MARKS[1:]
    asked, whole = _rendered(tokenizer, ("user", "assistant", "user"), marks, 1)
    return asked[asked.index(user) + 1 :], whole[whole.index(answer) + 1 : whole.index(again)]


def _rendered(tokenizer: HFTokenizer, roles: tuple[str, ...], marks: tuple[str, ...], opening: int) -> tuple[str, str]:
    """The first `opening` messages of marks, ready for an answer, and all of them."""
    turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    asked = _render(tokenizer, turns[:opening], add_generation_prompt=True)
    whole = _render(tokenizer, turns)
    opened = asked[: asked.find(marks[opening - 1]) + 1]
    if any(whole.count(mark) != 1 for mark in marks) or not opened or not whole.startswith(opened):
        raise ConfigError(
            f"{tokenizer.folder}: its chat_template must show {', '.join(dict.fromkeys(roles))} messages once each; "
            "give the tokenizer another template"
        )
    return asked, whole


def _render(tokenizer: HFTokenizer, messages: list[dict[str, str]], **options: Any) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.hf.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:  # Gemma's, for one, has no system turn and wants users and assistants to take turns
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ConfigError(f"{tokenizer.folder}: its chat template refuses a chat of {roles}: {error}") from error


def first_prompt(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """What a conversation opens with, ready for the model's answer. Without a chat template a plain text stays as it
    is.
    """
    if isinstance(tokenizer, HFTokenizer) and tokenizer.hf.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _render(tokenizer, messages, add_generation_prompt=True)
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{m['role'].capitalize()}:\n{m['content']}\n" for m in prompt) + PLAIN.agent.lstrip()


def first_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The ids that a conversation opens with."""
    return with_bos(tokenizer, tokenizer.encode(first_prompt(tokenizer, prompt)))


def with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids with BOS in front, where the tokenizer's own encoding adds it and no chat template writes it."""
    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.adds_bos or tokenizer.hf.chat_template:
        return ids
    assert tokenizer.bos_id is not None
    return ids if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]
