"""Training of the video tokenizer, data-parallel; it ends with held-out quality and the use of its codes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ...core.background import Background, wait_for_all
from ...core.checkpoint import WAIT_SECONDS
from ...core.errors import ConfigError, StorageError
from ...core.files import file_digest, make_folder, storage_errors, sync_files, sync_folder
from ...core.progress import Progress
from ...core.rng import fold
from ...core.run import changed_rows
from ...models.hub import resolve
from ...models.video.augment import augment_clips
from ...models.video.lpips import find_weights
from ...models.video.released import check_released, load_released
from ...models.video.tokenizer import VideoTokenizer, utilisation
from ...models.video.training import TokenizerTrainer, save_tokenizer
from ...rl.environment import Split
from ...rl.rewards.video import frame_metrics
from ...rl.video.artifacts import WEIGHTS, device, episodes_of
from ...rl.video.clips import Episodes, training_clip
from ...rl.video.config import VideoEnvironment
from ...rl.video.imagine import to_pictures
from ..job import Job, StopRequested
from ..settings.video import VideoTokenizerTraining
from .verbs import made_for

# step, xxh3-128 of its bytes; states of earlier releases have none
STATE = re.compile(r"state-(\d{7})(?:-([0-9a-f]{32}))?\.pt")


def video_settings(job: Job) -> VideoEnvironment:
    """The recipe's environment, which the stages of video agree on."""
    assert isinstance(job.recipe.env, VideoEnvironment), "a recipe of video stages has an env of kind video"
    return job.recipe.env


def episodes(job: Job, split: Split) -> Episodes:
    """The episodes of the recipe's environment."""
    made = made_for(video_settings(job), job)
    assert made is not None
    return episodes_of(video_settings(job), made, split)


def check(stage: VideoTokenizerTraining, job: Job) -> None:
    """Released weights are the recipe's tokenizer; or the weights of the perceptual loss are there, and every rank,
    each of which holds the whole tokenizer whatever the layout of the transformer, has equally many clips.
    """
    if stage.released is not None:
        check_released(resolve(stage.released), video_settings(job).tokenizer)
        return
    if stage.loss.lpips:
        find_weights(stage.loss.net)
    ranks = job.recipe.ranks
    if stage.clips_per_step % ranks:
        raise ConfigError(
            f"stages: {stage.name}.clips_per_step = {stage.clips_per_step} must be a multiple of the {ranks} ranks"
        )


def run(stage: VideoTokenizerTraining, job: Job) -> dict[str, Any]:
    """Train to the last step, or take released weights; then measure."""
    folder = make_folder(job.stage_folder(stage.name))
    config = video_settings(job).tokenizer
    if stage.released is not None:
        model = load_released(resolve(stage.released), config.height, config.width).to(device())
    else:
        model = train(stage, job, folder)
    model.eval()
    scores = heldout(stage, job, model)
    if job.mesh.is_main:
        job.run.guard()
        save_tokenizer(model, folder / WEIGHTS)
        job.run.write_result(stage.name, table(stage, job, scores))
    job.mesh.barrier()
    return {"steps": 0 if stage.released else stage.steps, **scores}


def train(stage: VideoTokenizerTraining, job: Job, folder: Path) -> VideoTokenizer:
    """The tokenizer after its last step; a killed stage goes on from its last state."""
    source = episodes(job, "train")
    config = video_settings(job).tokenizer
    still = usual_picture(source).to(device()) if config.still else None
    trainer = TokenizerTrainer(
        config, stage.loss, stage.optimizer, device=device(), bf16=stage.bf16, seed=job.recipe.seed, still=still
    )
    start = resume(job, stage.name, folder, trainer)
    progress = Progress(stage.name, stage.steps, start=start, speak=job.mesh.is_main)
    share = stage.clips_per_step // job.mesh.ranks
    writer: Background | None = None  # of a state, one at a time
    started_at = time.monotonic()
    for step, clips in read_ahead(stage, job, source, start, share):
        frames, context = as_batch(stage, job, clips, first_clip(stage, job, step, share))
        done = step + 1
        noted = done % stage.log_every == 0 or done == stage.steps
        values = trainer.step(frames, context, noted)
        if job.mesh.is_main and noted:
            took = time.monotonic() - started_at
            pictures = frames.shape[0] * frames.shape[1] * job.mesh.ranks
            job.run.metrics.append(
                stage.name, done, {**values, "time/step_s": took, "time/frames_per_s": pictures / took}
            )
        progress.update(done, f"l1 {values['l1']:.4f}  psnr {values['psnr']:.1f}")
        stop = job.mesh.any_rank(job.stop_asked)
        with job.paused_for_saving():
            due = stop or done % stage.checkpoint_every == 0
            settle_state(job, writer, wait=due or done == stage.steps)
            if due and job.mesh.is_main:
                writer = keep(job, stage.name, folder, trainer)
            if stop or done == stage.steps:
                settle_state(job, writer, wait=True)
        if stop and done < stage.steps:
            raise StopRequested
        started_at = time.monotonic()
    return trainer.model


def usual_picture(source: Episodes, most: int = 64) -> torch.Tensor:
    """What the camera sees when nothing is in the way: the median of the first, middle and last frames of some
    episodes; [3, H, W].
    """
    chosen = range(0, len(source), max(1, len(source) // most))
    frames = [source.frames(e, [0, source.length(e) // 2, source.length(e) - 1]) for e in chosen]
    return to_pictures(np.median(np.concatenate(frames), 0).astype(np.uint8), "cpu")


def first_clip(stage: VideoTokenizerTraining, job: Job, step: int, share: int) -> int:
    """The number of the first of this rank's clips of a step."""
    return step * stage.clips_per_step + job.mesh.rank * share


def read_ahead(
    stage: VideoTokenizerTraining, job: Job, source: Episodes, start: int, share: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, this rank's clips) to the last step; a thread reads those of the next while this one trains."""
    with ThreadPoolExecutor(1) as reader:

        def begin(step: int) -> Future[np.ndarray]:
            return reader.submit(read_clips, stage, job, source, first_clip(stage, job, step, share), share)

        coming = begin(start)
        for step in range(start, stage.steps):
            clips, coming = coming.result(), begin(step + 1)
            yield step, clips


def read_clips(stage: VideoTokenizerTraining, job: Job, source: Episodes, first: int, count: int) -> np.ndarray:
    """Clips number `first` and on, before each its context frame where there is one: pixels depend on the seed and the
    number alone.
    """
    compressive = video_settings(job).tokenizer.kind == "compressive"
    taken = [
        training_clip(source, fold(job.recipe.seed, 11), first + i, stage.frames_per_clip, compressive, stage.window)
        for i in range(count)
    ]
    return np.stack(
        [frames if context is None else np.concatenate([context[None], frames]) for frames, context in taken]
    )


def as_batch(
    stage: VideoTokenizerTraining, job: Job, clips: np.ndarray, first: int, augment: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(frames, context frames) on the device, varied at random where the stage says so."""
    pictures = to_pictures(clips, device())
    if stage.augment if augment is None else augment:
        pictures = augment_clips(pictures, torch.Generator().manual_seed(fold(job.recipe.seed, 12, first) >> 1))
    return (
        (pictures[:, 1:], pictures[:, 0]) if video_settings(job).tokenizer.kind == "compressive" else (pictures, None)
    )


def table(stage: VideoTokenizerTraining, job: Job, scores: dict[str, float]) -> dict[str, Any]:
    """Held-out reconstruction as a table of the report."""
    config, columns = video_settings(job).tokenizer, ["mae", "psnr", "ssim", "codes used", "perplexity"]
    trivial = "the context frame for ever" if config.kind == "compressive" else "the mean colour"
    cells = [scores[f"heldout/{name}"] for name in ("mae", "psnr", "ssim", "codes_used", "perplexity")]
    rows = [
        {"name": trivial, "kind": "baseline", "cells": [None, scores["heldout/baseline_psnr"], None, None, None]},
        {"name": stage.name, "kind": "model", "cells": cells},
    ]
    note = (
        f"{stage.heldout_clips} held-out clips of {stage.frames_per_clip} frames, encoded and decoded: "
        f"{config.frame_tokens} tokens a frame"
    )
    note += f", {config.context_tokens} a context frame, codebook {config.codebook}."
    return {"title": f"Reconstruction: {stage.name}", "columns": columns, "rows": rows, "note": note, "lower": ["mae"]}


def resume(job: Job, stage: str, folder: Path, trainer: TokenizerTrainer) -> int:
    """Load the newest whole state, and cut the metrics record back to its step, which is returned; 0 where there is no
    state.

    A damaged state is named, and the one before it taken.
    """

    def newest() -> str | None:
        found = sorted(path for path in folder.glob("state-*.pt") if STATE.fullmatch(path.name))
        for path in reversed(found):
            stated = STATE.fullmatch(path.name)[2]  # type: ignore[index]
            if stated is None or file_digest(path) == stated:
                return path.name
            job.warn(
                f"{path}: damaged, its bytes do not match the digest in its name. This state is passed over, and "
                "steps are repeated"
            )
        if found:
            raise StorageError(
                f"{folder}: none of its states is whole; restore one from a backup, or add --back-to {stage} to the "
                "same command, "
                "which repeats the stage from its beginning"
            )
        return None

    name = job.mesh.from_main(newest)
    held: dict[str, Any] = torch.load(folder / name, map_location=device(), weights_only=True) if name else {}
    if name:
        step = int(STATE.fullmatch(name)[1])  # type: ignore[index]
        if held["step"] != step:
            raise StorageError(
                f"{folder / name}: is the state of step {held['step']}, under another name; move it away"
            )
        trainer.load(held)
    if job.mesh.is_main:
        record, written = job.run.metrics, held.get("metrics")
        if written and (now := record.digest(stage, trainer.step_number)) != written:
            job.warn(changed_rows(record.path, stage, now["rows"], written["rows"]))
        record.rewind(stage, trainer.step_number, job.later(stage))
    return trainer.step_number


def keep(job: Job, stage: str, folder: Path, trainer: TokenizerTrainer) -> Background:
    """Begin to write the state to resume from, from a copy in host memory; the newest two stay."""
    job.run.guard()
    step = trainer.step_number
    copied = tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x, trainer.state())
    held = {**copied, "metrics": job.run.metrics.digest(stage, step)}
    writer = Background(f"{folder}: the state of step {step}", lambda: write_state(folder, step, held, job.run.guard))
    writer.start()
    return writer


def settle_state(job: Job, writer: Background | None, wait: bool) -> None:
    """Raise the error of a state that was written, or with `wait` is to be: then all ranks wait for the main one."""
    error = wait_for_all(writer, job.mesh.any_rank, WAIT_SECONDS) if wait else writer and writer.error
    if error is not None:
        raise error


def write_state(folder: Path, step: int, held: dict[str, Any], guard: Callable[[], None]) -> None:
    """Write a state, its digest in its name, and delete all but the newest two."""
    partial = folder / ".state.partial"
    with storage_errors(partial):
        with open(partial, "wb") as stream:  # to a path torch would call a full disk "unexpected pos"
            torch.save(held, stream)
        sync_files(partial)
        guard()
        partial.rename(folder / f"state-{step:07d}-{file_digest(partial)}.pt")
        sync_folder(folder)
        for old in sorted(folder.glob("state-*.pt"))[:-2]:
            old.unlink()


@torch.no_grad()
def heldout(stage: VideoTokenizerTraining, job: Job, model: VideoTokenizer) -> dict[str, float]:
    """Reconstruction of frames that were not trained on, beside the copy of the context or of the mean picture, and
    code use.
    """
    source = episodes(job, "test")
    names: tuple[Any, ...] = ("mae", "psnr", "ssim")
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in (*names, "baseline_psnr")}
    codes = []
    for first in range(0, stage.heldout_clips, stage.clips_per_step):
        count = min(stage.clips_per_step, stage.heldout_clips - first)
        clips = read_clips(stage, job, source, first, count)
        frames, context = as_batch(stage, job, clips, first, augment=False)
        with torch.autocast(device().type, torch.bfloat16, enabled=stage.bf16):
            tokenized = model.tokenize(frames, context)
            made = model.detokenize(tokenized).float()
        codes.append(tokenized.frames_BTN.cpu())
        for name, value in frame_metrics(made, frames, names).items():
            scores[name].append(value.flatten().cpu())
        trivial = (
            context[:, None].expand_as(frames)
            if context is not None
            else frames.mean((-1, -2), keepdim=True).expand_as(frames)
        )
        scores["baseline_psnr"].append(frame_metrics(trivial, frames, ("psnr",))["psnr"].flatten().cpu())
    used, perplexity = utilisation(torch.cat([c.flatten() for c in codes]), model.config.codebook)
    means = {f"heldout/{name}": float(torch.cat(parts).mean()) for name, parts in scores.items()}
    return means | {"heldout/codes_used": used, "heldout/perplexity": perplexity}
