"""A tokenizer made for worlds, for models from scratch: tags, words and cells are one piece each."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from ...data.tokenizers import PieceTokenizer
from ..worlds.base import World
from ..worlds.tasks import Task
from .format import FORMATS, SYSTEM, prefix, turn_text
from .selfplay import HIDDEN, THOUGHT

# the turns of an answer as they are written, so that a small model spells no tag letter by letter
TAGS = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    " <observation>\n",
    "\n</observation> ",
    " <prediction>\n",
    "\n</prediction>",
    " </think> <answer> ",
    " </answer>",
    " || ",
    HIDDEN,
    THOUGHT,
)
_CELL = re.compile(r"\([0-9],[0-9]\)")  # one piece each: where a cell lies is then for the model to learn
# a line with numbers: what stands between them, or between cells, is a template
_TEMPLATE = re.compile(r"[^0-9\n]*[0-9][^\n]*")
_BETWEEN = re.compile(f"{_CELL.pattern}|[0-9]")
# states hold no lower-case letters next to each other, so words and cells do not mix
_WORD = re.compile(r"[A-Z]?[a-z]+")
# instances of every tag that the alphabet is taken from; a template's piece stands in so many of them
LOOKS, COMMON = 64, 3


def walk(task: Task, world: World, seed: int) -> Iterator[None]:
    """Let random actions lead the world through states, the last one included."""
    chooser = random.Random(seed)
    yield
    for _ in range(task.max_actions):
        action = world.parse_action(world.random_action(chooser))
        done = action is None or world.step(action).done
        yield
        if done:
            return


@lru_cache(maxsize=2)  # every stage of a check asks for it
def pieces_of(tasks: tuple[Task, ...]) -> PieceTokenizer:
    """Tags and words whole, everything else by character: all that prompts, states and random answers of these
    worlds hold.
    """
    words: set[str] = set()
    between: Counter[str] = Counter()
    characters: set[str] = set("0123456789.,;:()[]+-*/= \n")
    for task in tasks:
        world = task.make()
        for seed in range(LOOKS):
            world.reset(seed)
            texts = [world.render(mode) for _ in walk(task, world, seed) for mode in world.render_modes]
            words.update(cell for text in texts for cell in _CELL.findall(text))
            lines = [line for text in texts for line in _TEMPLATE.findall(text)]
            between.update({piece for line in lines for piece in _BETWEEN.split(line) if len(piece) > 1})
            texts += [
                SYSTEM,
                prefix(task, world, "state"),
                *FORMATS.values(),
                turn_text(1, "", 1, task, "state"),
                "Reward:\nUser:\nAgent:\n",
            ]
            world.reset(seed)
            texts += [world.random_action(random.Random(i)) for i in range(8)] + list(
                (world.action_words or {}).values()
            )
            for text in texts:
                words.update(word for word in _WORD.findall(text) if len(word) > 1)
                characters.update(text)
    templates = {piece for piece, count in between.items() if count >= COMMON}
    return PieceTokenizer([*TAGS, *sorted((words | templates) - set(TAGS)), *sorted(characters)])
