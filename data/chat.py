"""Chats to token sequences with roles: templates, and the check that tokens joined are tokens apart.

A sampler continues the ids of its prompt, so what is learnt must be prompt ids followed by answer ids. Tokenising the whole text at
once may merge characters across that border; `split_tokens` says whether it would.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .tokenizers import HFTokenizer, Tokenizer
from .trajectory import Role, TokenSequence

# a template is known by the markers it writes, never by the name of a folder
_MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>"),
    "glm4": ("[gMASK]", "<|assistant|>"),
    "phi": ("<|user|>", "<|end|>"),
}


def template_name(tokenizer: HFTokenizer) -> str | None:
    """The family of a tokenizer's chat template, from what it writes for a small chat; None without one, "other" when unknown."""
    if not tokenizer.hf.chat_template:
        return None
    shown = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return next((name for name, marks in _MARKERS.items() if all(m in shown for m in marks)), "other")


@dataclass(frozen=True)
class Split:
    """Ids of a prompt and its answer, tokenised apart; `joint` says that tokenising them together gives the same ids."""

    prompt: list[int]
    answer: list[int]
    joint: bool


def split_tokens(tokenizer: Tokenizer, prompt: str, answer: str) -> Split:
    """Tokenise a prompt and its answer apart, and compare with both at once."""
    first, second = tokenizer.encode(prompt), tokenizer.encode(answer)
    return Split(first, second, first + second == tokenizer.encode(prompt + answer))


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, end: bool = True) -> tuple[TokenSequence, bool]:
    """A chat as one sequence: what the assistant says is ACTION, the rest PROMPT before it and OBSERVATION between.

    Also returns whether the text at once tokenises to the same ids. A message with `"learn": false` is not ACTION. A tokenizer
    without a chat template takes the contents as they are, one after another, with its end token after each answer.
    """
    pieces = _pieces(tokenizer, messages, end)
    ids: list[int] = []
    roles: list[Role] = []
    for text, extra, learn in pieces:
        new = [*tokenizer.encode(text), *extra]
        ids += new
        role = Role.ACTION if learn else Role.OBSERVATION if Role.ACTION in roles else Role.PROMPT
        roles += [role] * len(new)
    joint = ids == _joint(tokenizer, pieces)
    return TokenSequence(tuple(ids), tuple(roles)), joint


def _joint(tokenizer: Tokenizer, pieces: list[tuple[str, list[int], bool]]) -> list[int]:
    """The ids when runs of text are tokenised together, end tokens standing between them."""
    ids: list[int] = []
    run = ""
    for text, extra, _ in pieces:
        run += text
        if extra:
            ids += [*tokenizer.encode(run), *extra]
            run = ""
    return ids + tokenizer.encode(run)


def _pieces(tokenizer: Tokenizer, messages: list[dict[str, Any]], end: bool) -> list[tuple[str, list[int], bool]]:
    """(text, ids after it, learnt) of each stretch of the chat."""
    if not messages or messages[-1]["role"] != "assistant":
        raise ConfigError("a chat to learn from must end with the assistant's answer")
    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.hf.chat_template:
        stop = [tokenizer.eos_id] if end else []
        return [(m["content"], stop if m["role"] == "assistant" else [], _learnt(m)) for m in messages]
    pieces: list[tuple[str, list[int], bool]] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:i], True)
        after = _render(tokenizer, messages[: i + 1], False)
        if not before.startswith(done) or not after.startswith(before):
            reason = "its chat template rewrites earlier turns, so a chat of several turns is not one sequence"
            raise ConfigError(f"{tokenizer.folder}: {reason}; split the chat by turn")
        # the template may end the answer with more than the answer's own end (a line break): that is not sampled
        answer = after[len(before) :]
        close = max(len(answer.rstrip()), answer.rfind(message["content"]) + len(message["content"]))
        pieces += [(before[len(done) :], [], False), (answer[:close], [], _learnt(message))]
        if answer[close:]:
            pieces.append((answer[close:], [], False))
        done = after
    return pieces


def _render(tokenizer: HFTokenizer, messages: list[dict[str, Any]], open_answer: bool) -> str:
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    from jinja2 import TemplateError

    try:
        return tokenizer.hf.apply_chat_template(plain, tokenize=False, add_generation_prompt=open_answer)
    except TemplateError as error:  # Gemma's, for one, has no system turn and wants users and assistants to take turns
        roles = ", ".join(m["role"] for m in messages)
        raise ConfigError(f"{tokenizer.folder}: its chat template refuses a chat of {roles}: {error}") from error


def _learnt(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("learn", True)


def load_chat_tokenizer(folder: str | Path) -> HFTokenizer:
    """A Hugging Face tokenizer that has a chat template; another is refused by name."""
    tokenizer = HFTokenizer(folder)
    if not tokenizer.hf.chat_template:
        raise ConfigError(f"{folder}: the tokenizer has no chat template; add chat_template.jinja to the folder")
    return tokenizer
