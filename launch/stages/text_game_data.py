"""Data of our own text games: crawl, split, write questions with their answers as shards, learn a tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Any

from ...core.files import make_folder
from ...core.progress import Progress
from ...data.convert.text_game import is_changed, pair_of
from ...data.schema import PAIR
from ...data.shards import ShardWriter
from ...data.tokenizers import BPETokenizer
from ...rl.language import read_pair
from ...rl.text_games.crawl import bare_prompt, crawl_all, prompts
from ...rl.text_games.splits import not_learnt, split_rows
from ..job import Job, log
from ..settings.language import TextGameData
from .common import TOKENIZER
from .language import TEST, TRAIN, UNSEEN, start_of

TOKENIZER_TEXTS = 1500  # what the tokenizer learns from


def run(stage: TextGameData, job: Job) -> dict[str, Any]:
    """Write the three parts and, unless the recipe has a start, the tokenizer; a killed stage begins again, crawling takes seconds."""
    folder = job.stage_folder(stage.name)
    outcome: dict[str, Any] = {}
    if job.mesh.is_main:
        job.run.guard()
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        rows = crawl_all([*stage.games, *stage.unseen_games], range(stage.seeds))
        split = split_rows(rows, each=stage.heldout_per_verb, unseen_games=stage.unseen_games, seed=job.recipe.seed)
        if missing := not_learnt(split):
            log.warning("heldout_per_verb: nothing is left to learn %d kinds of rows from (%s); take more seeds", len(missing), missing[0])
        parts = {TRAIN: split.train, TEST: split.test, UNSEEN: split.unseen_games}
        progress = Progress("questions", sum(map(len, parts.values())))
        done, texts = 0, []
        for name, members in parts.items():
            if not members:
                continue
            with ShardWriter(folder / name, kind=PAIR, max_samples=stage.samples_per_shard) as writer:
                for row in members:
                    sample = pair_of(row, prompts() if stage.prompt == "full" else bare_prompt, name)
                    writer.write(sample)
                    done += 1
                    progress.update(done)
                    if name == TRAIN and done % max(1, len(members) // TOKENIZER_TEXTS) == 0:
                        question = read_pair(sample)
                        texts.append(question.prompt + question.answer)
        if start_of(job) is None:
            BPETokenizer.train(texts, job.model.vocab, names_in(split.train)).save(folder / TOKENIZER)
        outcome = {
            **{f"{name}_rows": len(members) for name, members in parts.items()},
            **{f"{name}_changed": sum(map(is_changed, members)) for name, members in parts.items()},
            "kinds_not_learnt": len(missing),
            "pad_prompts_to": stage.pad_prompts_to,
        }
    job.mesh.barrier()
    return outcome


def names_in(rows: Sequence[dict[str, Any]]) -> str:
    """An expression for the names of the rows' things, the longest first."""
    labels = {o["name"].rpartition(" (ID: ")[0] for row in rows for o in row["current_state"]["objects"]}
    return rf"(?:{'|'.join(sorted(map(re.escape, labels), key=lambda label: (-len(label), label)))}) \(ID: \d+\)"
