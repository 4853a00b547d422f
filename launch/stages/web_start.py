"""Where web agents begin: weights and tokenizer of a Hugging Face folder, or a fresh model with a tokenizer from the oracles' pages."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

from ...core.engine import Engine
from ...core.errors import ConfigError
from ...data.convert.webrl import ASSISTANT, PAGE, USER
from ...data.tokenizers import PieceTokenizer, load_tokenizer
from ...models.gpt import build_gpt
from ...models.hf import import_hf
from ...rl.webrl.episode import HARMLESS
from ...rl.webrl.orm import NO, NOTE, YES
from ...rl.webrl.prompts import EOT, JUDGE, SYSTEM
from ..job import Job
from ..settings.web import WebStart
from .common import check_start, step_folder
from .web import TOKENIZER, make_world, pool_of, uses_browser

# tags and attributes whole; a word takes the space after it, so that a name is the same pieces wherever it stands and can be copied
_PIECE = re.compile(r'</[a-z0-9]+> ?|<[a-z0-9]+(?:> ?| [a-z-]+="| )|" [a-z-]+="|"> ?|[A-Za-z]+ ?')
UNREADABLE = "\ufffd"  # stands for ids above the tokenizer's, which a model with a larger vocabulary may write and a page then shows
LOOKS = 400  # tasks whose pages the words are taken from


def check(stage: WebStart, job: Job) -> None:
    """The folder and the tags are there, and prompts fit the model."""
    uses_browser(stage)  # refuses an unknown tag
    longest = max(stage.max_prompt_tokens + stage.max_new_tokens, stage.max_verdict_tokens + 1)
    if longest > job.model.max_positions:
        raise ConfigError(
            f"max_prompt_tokens: prompts and answers take {longest} positions, model.max_positions is {job.model.max_positions}"
        )
    check_start(job, stage.name, stage.folder)


def run(stage: WebStart, job: Job) -> dict[str, Any]:
    """Write tokenizer and first checkpoint."""
    folder = job.stage_folder(stage.name) / TOKENIZER
    if job.mesh.is_main:
        job.run.guard()
        chosen = load_tokenizer(stage.folder) if stage.folder else pieces_of(stage, job.model.vocab)
        if chosen.vocab_size > job.model.vocab:
            raise ConfigError(f"model.vocab = {job.model.vocab} is below the tokenizer's {chosen.vocab_size}")
        chosen.save(folder)
    job.mesh.barrier()
    engine = Engine(build_gpt(job.model), job.recipe.parallel, None, job.recipe.precision, job.recipe.seed)
    if stage.folder:
        import_hf(engine, stage.folder)
    where = step_folder(job.checkpoints(stage.name), 0)
    engine.save(where, {})
    return {"checkpoint": str(where.relative_to(job.run.path)), "vocabulary": load_tokenizer(folder).vocab_size}


def pieces_of(stage: WebStart, vocab: int) -> PieceTokenizer:
    """Headers, the openings of actions and the commonest words of training tasks whole, everything else by character."""
    headers = [EOT, USER, f"\n\n{USER}\n", ASSISTANT, f"\n\n{ASSISTANT}\n", f"{SYSTEM}{JUDGE}", "\n\n"]
    prompts = ["Task Instruction: ", "Round ", PAGE, "The User Intent:\n", "Action History:\n", "The Current Screenshot:\n", YES, NO]
    prompts += [NOTE, "; "]
    actions = [f'do(action="{name}", argument="' for name in ("Type", "Search", "Select Dropdown Option")]
    actions += [*HARMLESS, 'do(action="Click", element="', 'exit(message="', '", element="', '")']
    fixed = [*headers, *prompts, *actions]
    words: Counter[str] = Counter()
    tasks, world = pool_of(stage), make_world(stage)
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
    common = [w for w, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])) if len(w) > 1 and w not in known]
    spare = [UNREADABLE] if len(common) < room else []
    return PieceTokenizer([*fixed, *sorted(common[: max(room, 0)]), *characters, *spare])
