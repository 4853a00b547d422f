"""Questions that are made become shards, and a tokenizer is learnt from them where the recipe has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from ..core.files import make_folder
from ..core.progress import Progress
from ..data.schema import PAIR
from ..data.shards import ShardWriter
from ..data.tokenizers import TOKENIZER, BPETokenizer
from .language import read_pair
from .language_tasks import PARTS, Made


def write_parts(
    made: Made,
    parts: Sequence[Sequence[Any]],
    pair: Callable[[Any, str], dict[str, Any]],
    words: str,
    every: int = 1,
) -> dict[str, int]:
    """Write the questions of the three parts as shards; where they bring the tokenizer, learn it from every
    so many-th one to train on, with what `words` matches as one piece each.

    By part, the questions that are marked as gold are counted. A killed stage begins again."""
    texts, done = list[str](), 0
    gold: dict[str, int] = dict.fromkeys(PARTS, 0)
    shutil.rmtree(made.folder, ignore_errors=True)
    make_folder(made.folder)
    progress = Progress("questions", sum(map(len, parts)))
    for name, members in zip(PARTS, parts, strict=True):
        if not members:
            continue
        with ShardWriter(made.folder / name, kind=PAIR, max_samples=made.settings["samples_per_shard"]) as writer:
            for row in members:
                sample = pair(row, name)
                writer.write(sample)
                done += 1
                progress.update(done)
                gold[name] += bool(sample["extra.json"].get("gold"))
                if name == PARTS[0] and done % every == 0:
                    question = read_pair(sample)
                    texts.append(question.prompt + question.answer)
    if made.vocab is not None:
        BPETokenizer.train(texts, made.vocab, words).save(made.folder / TOKENIZER)
    return gold
