"""Chat templates: messages as the text that a model was trained to read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    hf = getattr(tokenizer, "hf", None)
    return _marked(tokenizer, hf.chat_template) if hf is not None and hf.chat_template else PLAIN


@lru_cache(maxsize=8)
def _marked(tokenizer: HFTokenizer, template: str) -> Chat:
    hf = tokenizer.hf
    system, user, answer, again = marks = ("\u2460", "\u2461", "\u2462", "\u2463")
    turns = [
        {"role": role, "content": mark}
        for role, mark in zip(("system", "user", "assistant", "user"), marks, strict=True)
    ]
    asked = hf.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    whole = hf.apply_chat_template(turns, tokenize=False)
    if [whole.count(mark) for mark in marks] != [1, 1, 1, 1] or not whole.startswith(asked[: asked.find(user) + 1]):
        raise ValueError(
            "chat_template: must show system, user and assistant messages once each; give the tokenizer another "
            "template"
        )
    return Chat(
        whole[: whole.index(system)],
        whole[whole.index(system) + 1 : whole.index(user)],
        asked[asked.index(user) + 1 :],
        whole[whole.index(answer) + 1 : whole.index(again)],
    )


def first_prompt(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """What a conversation opens with, ready for the model's answer. Without a chat template a plain text stays as it
    is.
    """
    if isinstance(tokenizer, HFTokenizer) and tokenizer.hf.chat_template:
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return str(tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (
            TemplateError
        ) as error:  # Gemma's, for one, has no system turn and wants users and assistants to take turns
            roles = ", ".join(m["role"] for m in messages)
            raise ConfigError(f"{tokenizer.folder}: its chat template refuses a chat of {roles}: {error}") from error
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{m['role'].capitalize()}:\n{m['content']}\n" for m in prompt) + PLAIN.agent.lstrip()
