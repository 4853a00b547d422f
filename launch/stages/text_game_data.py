"""Data of our own text games: crawl, split, write questions with their answers as shards, learn a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...data.convert.text_game import is_changed, pair_of
from ...rl.text_games.crawl import bare_prompt, crawl_all, prompts
from ...rl.text_games.splits import not_learnt, split_rows
from ..job import Job, log
from ..settings.language import TextGameData
from .language import PARTS, write_parts

TOKENIZER_TEXTS = 1500  # what the tokenizer learns from


def run(stage: TextGameData, job: Job) -> dict[str, Any]:
    """Write the three parts and, unless the recipe has a start, the tokenizer; a killed stage begins again, crawling
    takes seconds.
    """
    outcome: dict[str, Any] = {}
    if job.mesh.is_main:
        rows = crawl_all([*stage.games, *stage.unseen_games], range(stage.seeds))
        split = split_rows(rows, each=stage.heldout_per_verb, unseen_games=stage.unseen_games, seed=job.recipe.seed)
        if missing := not_learnt(split):
            log.warning(
                "heldout_per_verb: nothing is left to learn %d kinds of rows from (%s); take more seeds",
                len(missing),
                missing[0],
            )
        parts, style = (
            (split.train, split.test, split.unseen_games),
            prompts() if stage.prompt == "full" else bare_prompt,
        )
        every = max(1, len(split.train) // TOKENIZER_TEXTS)
        write_parts(job, stage, parts, lambda row, name: pair_of(row, style, name), names_in(split.train), every)
        outcome = {
            **{f"{name}_rows": len(members) for name, members in zip(PARTS, parts, strict=True)},
            **{f"{name}_changed": sum(map(is_changed, members)) for name, members in zip(PARTS, parts, strict=True)},
            "kinds_not_learnt": len(missing),
            "pad_prompts_to": stage.pad_prompts_to,
        }
    job.mesh.barrier()
    return outcome


def names_in(rows: Sequence[dict[str, Any]]) -> str:
    """An expression for the names of the rows' things, the longest first."""
    labels = {o["name"].rpartition(" (ID: ")[0] for row in rows for o in row["current_state"]["objects"]}
    return rf"(?:{'|'.join(sorted(map(re.escape, labels), key=lambda label: (-len(label), label)))}) \(ID: \d+\)"
