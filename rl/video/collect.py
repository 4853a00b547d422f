"""What a collect stage makes for video: episodes, recorded in the table-top scene or named by folder, and their clips
as token shards, one row a clip with the place of the clip in its episode.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.mesh import Mesh
from ...core.progress import Progress
from ...core.rng import fold
from ...data.schema import VIDEO_TOKENS
from ...data.shards import ShardWriter
from ...data.video_actions import ActionBins
from ...models.video.tokenizer import VideoTokenizer
from ..environment import Split
from ..language_tasks import Made
from .artifacts import FOLDERS, action_bins, device, episodes_of, frozen_tokenizer
from .clips import ClipPlace, Episodes, place_in
from .config import VideoEnvironment
from .imagine import to_pictures

LOOKED_AT = 480  # episodes of a split


def count_episodes(settings: VideoEnvironment, made: Made) -> dict[str, int]:
    """The episodes of both splits; shards with none in one of them are refused."""
    train, heldout = (len(episodes_of(settings, made, split)) for split in FOLDERS)
    if not train or not heldout:
        raise ConfigError(f"env.shards has {train} + {heldout} episodes; lower env.heldout_every")
    if settings.actions == "tabletop":
        from .record import require_table

        require_table(episodes_of(settings, made, "train"), settings.table, f"env.shards: {settings.shards}")
    _require_mixed(settings, made)
    return {"episodes": train, "heldout_episodes": heldout}


def _require_mixed(settings: VideoEnvironment, made: Made) -> None:
    """Refuse a split that holds out some kinds of episodes whole: tasks and policies are dealt in turn, and a number
    that divides their round takes the same ones every time.
    """
    kinds: dict[Split, Counter[tuple[str, str]]] = {}
    for split in FOLDERS:
        episodes = episodes_of(settings, made, split)
        metas = [json.loads(episodes.raw(i).get("meta.json", b"{}")) for i in range(min(len(episodes), LOOKED_AT))]
        kinds[split] = Counter((meta["task"], meta["policy"]) for meta in metas if "task" in meta and "policy" in meta)
    train, test = kinds["train"], kinds["test"]
    several = len({*train, *test})
    if min(train.total(), test.total()) < 4 * several:
        return  # too few to say
    for one, other, said in ((train, test, "trained on"), (test, train, "held out")):
        if missing := sorted(other.keys() - one.keys()):
            raise ConfigError(
                f"env.heldout_every = {settings.heldout_every}: no episode of '{missing[0][0]}' by '{missing[0][1]}' "
                f"is {said}; choose a number that has no factor in common with the {several} kinds of episodes"
            )


def record_episodes(settings: VideoEnvironment, made: Made) -> dict[str, int]:
    """Record both splits; seeds of the held-out one are never trained on."""
    from .record import plans, record

    asked = settings.recording
    assert asked is not None, "settings without a source of episodes are refused"
    how = (asked.tasks, asked.policies, asked.frames, settings.table)
    counts: dict[Split, int] = {"train": asked.episodes, "test": asked.heldout_episodes}
    seed = asked.first_seed
    for split, count in counts.items():
        progress = Progress(f"recording, {FOLDERS[split]}", count)
        folder = made.uses["episodes"].folder / FOLDERS[split]
        record(folder, list(plans(count, seed, *how)), asked.workers, progress.update)
        seed += count
    return {"episodes": asked.episodes, "heldout_episodes": asked.heldout_episodes}


def write_clips(settings: VideoEnvironment, made: Made, mesh: Mesh) -> dict[str, int]:
    """This data rank's clips of both splits; a killed stage goes on after its last whole shard."""
    model = frozen_tokenizer(settings, made)
    return {
        "clips": _write_split(settings, made, mesh, model, "train", settings.clips_per_episode),
        "heldout_clips": _write_split(settings, made, mesh, model, "test", settings.heldout_clips_per_episode),
    }


def _write_split(
    settings: VideoEnvironment, made: Made, mesh: Mesh, model: VideoTokenizer, split: Split, each: int
) -> int:
    source = episodes_of(settings, made, split)
    layout, bins = settings.layout, action_bins(settings, made)
    reach = settings.context_reach if layout.context_tokens else None
    seed = fold(made.seed, 21 if split == "train" else 22)
    numbers = mesh.share(range(len(source)))
    places = [place_in(source, e, (fold(seed, e, k),), layout.frames, reach) for e in numbers for k in range(each)]
    progress = Progress(f"{made.name}, {FOLDERS[split]}", len(places), speak=mesh.is_main)
    folder, prefix = made.folder / FOLDERS[split], f"tokens{mesh.data_rank:03d}"
    about = {
        "schema": VIDEO_TOKENS,
        "layout": layout.describe(),
        "codebook": layout.codebook,
        "tokenizer": settings.tokenizer_stage,
    }
    with ShardWriter(folder, kind=VIDEO_TOKENS, prefix=prefix, max_samples=20_000, resume=True) as writer:
        left = iter(places[writer.samples :])
        while group := list(islice(left, settings.clips_at_once)):
            for place, row in zip(group, _rows(group, source, model, settings, bins), strict=True):
                meta = about | {"episode": place.episode, "start": place.start, "context": place.context}
                writer.write(
                    {"tokens.npy": row.astype(np.uint16), "meta.json": meta}, key=f"{prefix}-{writer.samples:08d}"
                )
            progress.update(writer.samples)
    return writer.samples


def _rows(
    group: list[ClipPlace], source: Episodes, model: VideoTokenizer, settings: VideoEnvironment, bins: ActionBins
) -> Iterator[Any]:
    """Token rows of a few clips, encoded together."""
    layout = settings.layout
    wanted = [range(p.start, p.start + layout.frames) for p in group]
    frames = to_pictures(np.stack([source.frames(p.episode, w) for p, w in zip(group, wanted, strict=True)]), device())
    context = None
    if layout.context_tokens:
        context = to_pictures(np.stack([source.frames(p.episode, [p.context])[0] for p in group]), device())
    with torch.autocast(device().type, torch.bfloat16, enabled=settings.bf16):
        codes = model.tokenize(frames, context)
    actions = np.stack([bins.encode(source.actions(p.episode, w)) for p, w in zip(group, wanted, strict=True)])
    held = codes.context_BK.cpu().numpy() if codes.context_BK is not None else None
    yield from layout.assemble(codes.frames_BTN.cpu().numpy(), actions, held)
