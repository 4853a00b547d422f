"""The trained model as a Hugging Face folder with its model card, proven equal to the engine's on fixed prompts."""

from __future__ import annotations

import shutil
from typing import Any

from ...core.files import make_folder, read_json, sync_files, sync_folder, write_atomic, write_json
from ...core.run import set_aside
from ...models.hf import export_hf
from ...models.hub import README, model_card
from ..job import Job
from ..settings.base import Export
from .card import about_run, base_of
from .common import build_engine
from .verbs import text_tokenizer

FOLDER = "export"


def run(stage: Export, job: Job) -> dict[str, Any]:
    """Write, prove and publish the folder. What has its name already, whoever made it, is moved aside and never
    deleted.
    """
    engine = build_engine(job, None, stage.model)
    final, partial, tokenizer = (job.run.path / name for name in (FOLDER, f".{FOLDER}.partial", f".{FOLDER}.tokenizer"))
    if job.mesh.is_main:
        job.run.guard()
        shutil.rmtree(partial, ignore_errors=True)
        chats = False
        make_folder(tokenizer)
        if (layout := getattr(job.recipe.env, "layout", None)) is not None:  # codes have no text
            specials = {"bos_token_id": layout.bos, "eos_token_id": layout.eos, "pad_token_id": layout.eos}
        else:
            words = text_tokenizer(job)
            words.save(tokenizer)
            chats = bool(getattr(getattr(words, "hf", None), "chat_template", None))
            stop = words.eos_id if len(words.stop_ids) == 1 else list(words.stop_ids)
            specials = {"bos_token_id": words.bos_id, "eos_token_id": stop, "pad_token_id": words.pad_id}
        kept = read_json(tokenizer / "generation_config.json") or {}
        write_json(tokenizer / "generation_config.json", {**kept, **specials})
    job.mesh.barrier()
    proof = export_hf(engine, partial, carry_from=tokenizer)
    if job.mesh.is_main:
        shutil.rmtree(tokenizer)
        card = model_card(
            partial, job.recipe.name, base_of(job.recipe, stage.model), about_run(job, stage.model, chats)
        )
        write_atomic(partial / README, card)
        sync_files(partial)
        aside = set_aside(job.run.path, [final])
        partial.rename(final)
        sync_folder(final.parent)
        if aside:
            job.warn(f"{final}: was there before this export, and lies in {aside} now")
    return {"folder": FOLDER, "max_logit_difference": proof["max_logit_difference"], "tensors": len(proof["tensors"])}
