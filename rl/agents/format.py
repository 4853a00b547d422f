"""What an agent reads and writes: prompts built from the instantiated world, the tags of its answer, and the turn they
make.

Parsing is by plain search, linear in the text, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..worlds.base import Action, World
from ..worlds.tasks import Task
from .config import Format

SEPARATOR = "||"
SYSTEM = "You are a helpful assistant that acts in small worlds. "
FORMATS: dict[str, str] = {
    "answer": "<answer> [your answer] </answer>",
    "think": "<think> [your thoughts] </think> <answer> [your answer] </answer>",
    "state": (
        "<think> <observation> [current state] </observation> [your thoughts] <prediction> [next state] </prediction> "
        "</think> <answer> [your answer] </answer>"
    ),
}
OPENING: dict[str, str] = {
    "answer": "<answer>",
    "think": "<think>",
    "state": "<think>",
}  # what generation is made to start with
_CONTROL = re.compile(r"</?(?:think|answer|observation|prediction)>|<\|[a-z_]{1,24}\|>")
_CLOSE_THINK = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True)
class Parsed:
    """One response taken apart. `ok` means that every tag of the format was there, in order; actions may exist
    without it.
    """

    ok: bool
    actions: tuple[str, ...]
    response: str  # canonical when an answer was found, else the raw text
    observation: str | None = None
    prediction: str | None = None


@dataclass
class Turn:
    """One turn of history: what was shown, and after the answer what it did."""

    state: str
    actions_left: int
    response: str = ""
    reward: float = 0.0


@dataclass(frozen=True)
class TurnResult:
    """What the words of one answer did. `info` is that of the last action executed."""

    reward: float
    penalty: float
    done: bool
    truncated: bool
    executed: tuple[str, ...]
    info: Mapping[str, float] = field(default_factory=dict)


def prefix(task: Task, world: World, fmt: Format) -> str:
    """The start of the first user message: instruction, legend and action words of this very world."""
    parts = [(task.state_instruction if fmt == "state" else "") or task.instruction]
    if world.grid_words:
        parts.append(
            "The meaning of each symbol in the state is:\n"
            + ", ".join(f"{s}: {meaning}" for s, meaning in world.grid_words.items())
        )
    if world.action_words:
        parts.append("Your available actions are:\n" + ", ".join(world.action_words.values()))
        parts.append(
            f'You can make up to {task.max_actions} actions, separated by the action separator " {SEPARATOR} ".'
        )
    return "\n".join(part for part in parts if part)


def turn_text(number: int, state: str, actions_left: int, task: Task, fmt: Format) -> str:
    """What is appended to the last user message to ask for turn `number`."""
    return (
        f"\nTurn {number}:\nState:\n{state}\nYou have {actions_left} actions left. Always output: {FORMATS[fmt]} with "
        f"no extra text. Strictly follow this format. Max response length: {task.max_tokens} words (tokens)."
    )


def messages(task: Task, world: World, history: list[Turn], fmt: Format, window: int = 0) -> list[dict[str, str]]:
    """The chat so far. The last turn may be unanswered; `window` > 0 keeps that many last turns, with their own
    numbers.
    """
    first = max(0, len(history) - window) if window else 0
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prefix(task, world, fmt)}]
    for number, turn in enumerate(history[first:], start=first + 1):
        chat[-1]["content"] += turn_text(number, turn.state, turn.actions_left, task, fmt)
        if turn.response:
            chat.append({"role": "assistant", "content": turn.response})
            chat.append({"role": "user", "content": f"Reward:\n{turn.reward:g}\n"})
    return chat


def _between(text: str, tag: str, start: int = 0) -> tuple[str, int] | None:
    left = text.find(f"<{tag}>", start)
    right = text.find(f"</{tag}>", left + 1) if left >= 0 else -1
    return (text[left + len(tag) + 2 : right], right + len(tag) + 3) if right >= 0 else None


def _clean(text: str) -> str:
    return _CONTROL.sub("", text).strip()


def parse(text: str, fmt: Format, max_actions: int) -> Parsed:
    """Read a whole response, the opening tag that generation was made to start with included."""
    opening = text.find("<think>")
    closing = _CLOSE_THINK.search(text, opening) if opening >= 0 else None
    think_ok = closing is not None
    answer = _between(text, "answer", closing.start() if closing else 0)
    if answer is None or (fmt == "think" and not think_ok):
        return Parsed(False, (), text)
    raw_think = text[opening + len("<think>") : closing.start()] if closing and fmt != "answer" else ""
    observation = _between(raw_think, "observation") if fmt == "state" else None
    prediction = _between(raw_think, "prediction", observation[1]) if observation else None
    words = tuple(word for part in answer[0].split(SEPARATOR) if (word := _clean(part)))[:max_actions]
    canonical = f"<answer> {f' {SEPARATOR} '.join(words)} </answer>"
    ok = fmt == "answer" or (think_ok and (fmt == "think" or prediction is not None))
    if observation and prediction:
        middle = _clean(raw_think[observation[1] : raw_think.index("<prediction>", observation[1])])
        seen, expected = _clean(observation[0]), _clean(prediction[0])
        think = f"<observation>\n{seen}\n</observation> {middle} <prediction>\n{expected}\n</prediction>"
        return Parsed(ok, words, f"<think> {think} </think> {canonical}", seen, expected)
    return Parsed(ok, words, canonical if fmt == "answer" else f"<think> {_clean(raw_think)} </think> {canonical}")


def understood(world: World, words: tuple[str, ...], format_penalty: float) -> tuple[list[tuple[str, Action]], float]:
    """The words of an answer that are actions, and the penalty: dropping one, or having none left, costs it once."""
    actions = [(word, action) for word in words if (action := world.parse_action(word)) is not None]
    return actions, format_penalty if len(actions) != len(words) or not actions else 0.0


def play(world: World, words: tuple[str, ...], actions_left: int, format_penalty: float = -0.1) -> TurnResult:
    """Execute the words of one answer; unknown ones are dropped."""
    actions, penalty = understood(world, words, format_penalty)
    total, done, info, executed = 0.0, False, {}, []
    for word, action in actions[:actions_left]:
        result = world.step(action)
        total, done, info = total + result.reward, result.done, result.info
        executed.append(word)
        if done:
            break
    truncated = not done and len(executed) >= actions_left
    return TurnResult(total, penalty, done or truncated, truncated, tuple(executed), info)


def _put(tag: str, state: str, text: str) -> str:
    pieces, at = [], 0
    while (left := text.find(f"<{tag}>", at)) >= 0 and (right := text.find(f"</{tag}>", left)) >= 0:
        pieces += [text[at:left], f"<{tag}>\n{state}\n"]
        at = right
    return "".join([*pieces, text[at:]])


def ground(response: str, observation: str, prediction: str) -> str:
    """The response with the content of every observation and prediction tag replaced by the world's own states."""
    return _put("prediction", prediction, _put("observation", observation, response))


def has_states(response: str) -> bool:
    """The tag filter of self-play data: think before answer, an observation and after it a prediction, both inside
    the think.
    """
    return parse(response.lower(), "state", 1).ok
