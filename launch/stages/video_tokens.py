"""Clips of episodes as token shards: one row a clip, offsets included, with the place of the clip in its episode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...core.files import make_folder, write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.schema import VIDEO_TOKENS
from ...data.shards import ShardWriter
from ...models.video.tokenizer import VideoTokenizer
from ...rl.environment import Split
from ...rl.video.clips import ClipPlace, Episodes, place_in
from ...rl.video.imagine import to_pictures
from ...rl.video.made import ACTIONS, FOLDERS, action_bins, device, episodes_of, frozen_tokenizer
from ..job import Job
from ..settings.video import VideoTokens
from .verbs import made_by
from .video_data import video_settings


def run(stage: VideoTokens, job: Job) -> dict[str, Any]:
    """Tokenise both splits; a killed stage goes on after its last whole shard. Ranks share the work by shard prefix."""
    told: dict[str, Any] = {}
    folder = make_folder(job.stage_folder(stage.name))
    made, chosen = made_by(stage.name, job), video_settings(job)
    model = frozen_tokenizer(chosen, made.uses["tokenizer"])
    if job.mesh.is_main:
        write_json(folder / ACTIONS, action_bins(chosen, made).ranges)
    job.mesh.barrier()
    splits: list[tuple[Split, int]] = [("train", stage.clips_per_episode), ("test", stage.heldout_clips_per_episode)]
    for split, each in splits:
        written = job.mesh.from_leader(lambda s=split, e=each: write_split(stage, job, model, s, e))
        told["clips" if split == "train" else "heldout_clips"] = sum(job.mesh.gather(written))
    return told


def write_split(stage: VideoTokens, job: Job, model: VideoTokenizer, split: Split, each: int) -> int:
    """This data rank's part of a split."""
    made, chosen = made_by(stage.name, job), video_settings(job)
    source = episodes_of(made.uses["data"], split)
    layout, bins = chosen.layout, action_bins(chosen, made)
    reach = chosen.context_reach if layout.context_tokens else None
    seed = fold(job.recipe.seed, 21 if split == "train" else 22)
    numbers = job.mesh.share(range(len(source)))
    places = [place_in(source, e, (fold(seed, e, k),), layout.frames, reach) for e in numbers for k in range(each)]
    folder = job.stage_folder(stage.name) / FOLDERS[split]
    progress = Progress(f"{stage.name}, {FOLDERS[split]}", len(places), speak=job.mesh.is_main)
    prefix = f"tokens{job.mesh.data_rank:03d}"
    with ShardWriter(folder, kind=VIDEO_TOKENS, prefix=prefix, max_samples=20_000, resume=True) as writer:
        left = iter(places[writer.samples :])
        while group := list(islice(left, stage.batch)):
            for place, row in zip(group, rows(group, source, model, stage, layout, bins), strict=True):
                meta = {
                    "schema": VIDEO_TOKENS,
                    "layout": layout.describe(),
                    "codebook": layout.codebook,
                    "tokenizer": stage.tokenizer,
                }
                meta |= {"episode": place.episode, "start": place.start, "context": place.context}
                writer.write(
                    {"tokens.npy": row.astype(np.uint16), "meta.json": meta}, key=f"{prefix}-{writer.samples:08d}"
                )
            progress.update(writer.samples)
    return writer.samples


def rows(
    group: list[ClipPlace], source: Episodes, model: VideoTokenizer, stage: VideoTokens, layout: Any, bins: Any
) -> Iterator[np.ndarray]:
    """Token rows of a few clips, encoded together."""
    wanted = [range(p.start, p.start + layout.frames) for p in group]
    frames = to_pictures(np.stack([source.frames(p.episode, w) for p, w in zip(group, wanted, strict=True)]), device())
    context = None
    if layout.context_tokens:
        context = to_pictures(np.stack([source.frames(p.episode, [p.context])[0] for p in group]), device())
    with torch.autocast(device().type, torch.bfloat16, enabled=stage.bf16):
        codes = model.tokenize(frames, context)
    actions = np.stack([bins.encode(source.actions(p.episode, w)) for p, w in zip(group, wanted, strict=True)])
    held = codes.context_BK.cpu().numpy() if codes.context_BK is not None else None
    yield from layout.assemble(codes.frames_BTN.cpu().numpy(), actions, held)
