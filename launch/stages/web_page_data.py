"""Data of web pages: recorded transitions as questions with their change lists, split, as shards; and a tokenizer."""

from __future__ import annotations

from typing import Any

from ...rl.web_pages.data import load_transitions, page_pair, split_pages
from ...rl.web_pages.prompt import bare_page_prompt, page_prompt
from ..job import Job
from ..settings.language import WebPageData
from .language import PARTS, write_parts

IDS = r"\[\d+\]"  # of the page's items: one piece each, to be copied


def check(stage: WebPageData, job: Job) -> None:
    """Recorded transitions that are named can be read."""
    if job.mesh.is_main and stage.transitions is not None:
        load_transitions(stage.transitions)


def run(stage: WebPageData, job: Job) -> dict[str, Any]:
    """Write the three parts and, unless the recipe has a start, the tokenizer; a killed stage begins again."""
    outcome: dict[str, Any] = {}
    if job.mesh.is_main:
        split = split_pages(load_transitions(stage.transitions), every=stage.heldout_every, unseen=stage.unseen_pages)
        parts, style = (
            (split.train, split.test, split.unseen_pages),
            page_prompt if stage.prompt == "full" else bare_page_prompt,
        )
        changed = write_parts(job, stage, parts, lambda step, name: page_pair(step, style, name), IDS)
        for name, members in zip(PARTS, parts, strict=True):
            outcome |= {f"{name}_rows": len(members), f"{name}_changed": changed[name]}
        outcome["pad_prompts_to"] = stage.pad_prompts_to
    job.mesh.barrier()
    return outcome
