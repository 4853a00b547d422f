"""Data of web pages: recorded transitions as questions with their change lists, split, as shards; and a tokenizer."""

from __future__ import annotations

import shutil
from typing import Any

from ...core.files import make_folder
from ...core.progress import Progress
from ...data.schema import PAIR
from ...data.shards import ShardWriter
from ...data.tokenizers import BPETokenizer
from ...rl.web_pages.data import load_transitions, page_pair, split_pages
from ...rl.web_pages.prompt import bare_page_prompt, page_prompt
from ..job import Job
from ..settings.language import WebPageData
from .common import TOKENIZER
from .language import TEST, TRAIN, UNSEEN, start_of

IDS = r"\[\d+\]"  # of the page's items: one piece each, to be copied


def check(stage: WebPageData, job: Job) -> None:
    """Recorded transitions that are named can be read."""
    if job.mesh.is_main and stage.transitions is not None:
        load_transitions(stage.transitions)


def run(stage: WebPageData, job: Job) -> dict[str, Any]:
    """Write the three parts and, unless the recipe has a start, the tokenizer; a killed stage begins again."""
    folder = job.stage_folder(stage.name)
    outcome: dict[str, Any] = {}
    if job.mesh.is_main:
        job.run.guard()
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        split = split_pages(load_transitions(stage.transitions), every=stage.heldout_every, unseen=stage.unseen_pages)
        parts = {TRAIN: split.train, TEST: split.test, UNSEEN: split.unseen_pages}
        progress = Progress("questions", sum(map(len, parts.values())))
        done, texts = 0, []
        for name, members in parts.items():
            outcome[f"{name}_rows"], outcome[f"{name}_changed"] = len(members), 0
            if not members:
                continue
            with ShardWriter(folder / name, kind=PAIR) as writer:
                for step in members:
                    sample = page_pair(step, page_prompt if stage.prompt == "full" else bare_page_prompt, name)
                    writer.write(sample)
                    outcome[f"{name}_changed"] += sample["extra.json"]["gold"]
                    done += 1
                    progress.update(done)
                    if name == TRAIN:
                        texts.append(sample["prompt.json"][0]["content"] + sample["target.json"])
        if start_of(job) is None:
            BPETokenizer.train(texts, job.model.vocab, IDS).save(folder / TOKENIZER)
        outcome["pad_prompts_to"] = stage.pad_prompts_to
    job.mesh.barrier()
    return outcome
