"""The tokenizer of web agents from scratch: what an agent must copy is the same pieces wherever it stands."""

from __future__ import annotations

import random
import re
from collections import Counter

from ...data.convert.webrl import ASSISTANT, PAGE, USER
from ...data.tokenizers import PieceTokenizer
from .config import WebSiteEnvironment
from .episode import HARMLESS
from .orm import NO, NOTE, YES
from .prompts import EOT, JUDGE, SYSTEM
from .sites import make_world, pool_of

# tags and attributes whole; a word takes the space after it, so that a name is the same pieces wherever it stands and
# can be copied
_PIECE = re.compile(r'</[a-z0-9]+> ?|<[a-z0-9]+(?:> ?| [a-z-]+="| )|" [a-z-]+="|"> ?|[A-Za-z]+ ?')
# stands for ids above the tokenizer's, which a model with a larger vocabulary may write and a page then shows
UNREADABLE = "\ufffd"
LOOKS = 400  # tasks whose pages the words are taken from


def pieces_of(settings: WebSiteEnvironment, vocab: int) -> PieceTokenizer:
    """Headers, the openings of actions and the commonest words of training tasks whole, everything else by
    character.
    """
    headers = [EOT, USER, f"\n\n{USER}\n", ASSISTANT, f"\n\n{ASSISTANT}\n", f"{SYSTEM}{JUDGE}", "\n\n"]
    prompts = [
        "Task Instruction: ",
        "Round ",
        PAGE,
        "The User Intent:\n",
        "Action History:\n",
        "The Current Screenshot:\n",
        YES,
        NO,
    ]
    prompts += [NOTE, "; "]
    actions = [f'do(action="{name}", argument="' for name in ("Type", "Search", "Select Dropdown Option")]
    actions += [*HARMLESS, 'do(action="Click", element="', 'exit(message="', '", element="', '")']
    fixed = [*headers, *prompts, *actions]
    words: Counter[str] = Counter()
    tasks, world = pool_of(settings), make_world(settings)
    for task in random.Random(0).sample(tasks, min(LOOKS, len(tasks))):
        world.open_task(task.task, task.steps)
        while not world.done:
            action = world.demonstrate().split("\n")[-1]
            words.update(_PIECE.findall(world.html) + _PIECE.findall(task.task.intent) * 20 + _PIECE.findall(action))
            world.step(action)
    beyond = sorted({c for piece in fixed for c in piece if ord(c) > 126})  # a model may write a header into its action
    characters = ["\t", "\n", *map(chr, range(32, 127)), *beyond]  # trees are indented by tabs
    room = vocab - 3 - len(characters) - len(fixed)
    known = {*fixed, *characters}
    common = [
        w for w, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])) if len(w) > 1 and w not in known
    ]
    spare = [UNREADABLE] if len(common) < room else []
    return PieceTokenizer([*fixed, *sorted(common[: max(room, 0)]), *characters, *spare])
