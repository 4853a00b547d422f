"""What the stages that make questions share: shards of their parts, and a tokenizer that is learnt from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from ...core.files import make_folder
from ...core.progress import Progress
from ...data.schema import PAIR
from ...data.shards import ShardWriter
from ...data.tokenizers import BPETokenizer, Tokenizer
from ...rl.evaluation import TEST
from ...rl.language import read_pair
from ...rl.language_tasks import UNSEEN
from ..job import Job
from ..settings.language import TextGameData, WebPageData
from .common import TOKENIZER
from .verbs import learns_tokenizer, learnt_tokenizer
from .verbs import tokenizer_of as verb_tokenizer

TRAIN = "train"
MOST = 100_000  # samples of a shard
PARTS = (TRAIN, TEST, UNSEEN)


def write_parts(
    job: Job,
    stage: TextGameData | WebPageData,
    parts: Sequence[Sequence[Any]],
    pair: Callable[[Any, str], dict[str, Any]],
    words: str,
    every: int = 1,
) -> dict[str, int]:
    """Write the questions of the three parts as shards; where they bring the tokenizer, learn it from every
    so many-th one to train on, with what `words` matches as one piece each. On the main rank alone.

    By part, the questions that are marked as gold are counted."""
    folder, texts, done = job.stage_folder(stage.name), [], 0
    gold: dict[str, int] = dict.fromkeys(PARTS, 0)
    job.run.guard()
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    progress = Progress("questions", sum(map(len, parts)))
    for name, members in zip(PARTS, parts, strict=True):
        if not members:
            continue
        with ShardWriter(folder / name, kind=PAIR, max_samples=getattr(stage, "samples_per_shard", MOST)) as writer:
            for row in members:
                sample = pair(row, name)
                writer.write(sample)
                done += 1
                progress.update(done)
                gold[name] += bool(sample["extra.json"].get("gold"))
                if name == TRAIN and done % every == 0:
                    question = read_pair(sample)
                    texts.append(question.prompt + question.answer)
    if learns_tokenizer(job.recipe, stage.name):
        BPETokenizer.train(texts, job.model.vocab, words).save(folder / TOKENIZER)
    return gold


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of a recipe of text: that of its start, or the one that its data stage learnt."""
    stage = next(
        (s for s in job.recipe.stages if isinstance(s, TextGameData | WebPageData) and not s.own_tokenizer), None
    )
    return (stage and learnt_tokenizer(job, stage.name)) or verb_tokenizer(job)
