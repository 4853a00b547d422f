"""Real2Sim: graded policies in world models and in the true simulator; r, MMRV and the mean gap say whether a model
may stand in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError, StorageError
from ...core.files import file_digest, json_digest, read_json, write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.statistics import proportion
from ...rl.video.detector import succeeded
from ...rl.video.imagine import ClipDecoder
from ...rl.video.made import action_bins, frozen_tokenizer
from ...rl.video.policies import make_policy
from ...rl.video.real2sim import ENDINGS, WorldModelSimulator, agreement, policy_seed, run_policy
from ...rl.worlds.tabletop import TASKS
from ..job import Job
from ..settings.video import VideoReal2Sim
from .common import sampling
from .verbs import made_for
from .video_tokenizer import video_settings

TRUTH = "truth.json"
FIRST = "first.npz"


def check(stage: VideoReal2Sim, job: Job) -> None:
    """A robot whose policies and judge are here, and the truth where the simulator is not."""
    robot = video_settings(job).actions
    if robot != "tabletop":
        raise ConfigError(
            f"stages: {stage.name} runs on the table-top scene and not with env.actions = {robot}: RT-1's policies "
            "are TensorFlow files, "
            "and their success was judged by a person who watched the last frame; take the stage out"
        )
    if stage.truth is not None:
        load_truth(stage.truth)


def run(stage: VideoReal2Sim, job: Job) -> dict[str, Any]:
    """Rank 0 asks the simulator; every rank imagines its share of the episodes."""
    job.mesh.require_even(stage.episodes, f"stages: {stage.name}.episodes")
    truth = in_simulator(stage, job)
    chosen = video_settings(job)
    made = made_for(chosen, job)
    assert made is not None
    decoder = ClipDecoder(frozen_tokenizer(chosen, made), chosen.layout, stage.bf16)
    bins = action_bins(chosen, made)
    successes: dict[str, dict[str, int]] = {}
    progress = Progress(stage.name, len(stage.models) * len(stage.tasks) * len(stage.policies), speak=job.mesh.is_main)
    done = 0
    share = job.mesh.share(range(stage.episodes))
    with sampling(job, stage) as of:
        for name in stage.models:
            successes[name] = {}
            with of(name) as (sampler, _):
                choice = {"top_k": stage.top_k, "repetition_penalty": stage.repetition_penalty}
                simulator = partial(WorldModelSimulator, sampler, decoder, bins, **choice)
                for task, policy in product(stage.tasks, stage.policies):
                    given = (stage, job, simulator, task, policy, share, np.asarray(truth["first"][task]))
                    successes[name][f"{task}/{policy}"] = sum(
                        job.mesh.gather(job.mesh.from_leader(lambda g=given: imagined(*g)))
                    )
                    progress.update(done := done + 1)
    results = describe(stage, truth, successes)
    if job.mesh.is_main:
        job.run.write_result(stage.name, results["table"])
        job.run.write_result(f"{stage.name}-agreement", results["agreement"])
    job.mesh.barrier()
    return results["outcome"]


def in_simulator(stage: VideoReal2Sim, job: Job) -> dict[str, Any]:
    """True success by task and policy, the detector's verdict on true frames, and the first frames; made once."""
    folder = job.stage_folder(stage.name)
    if stage.truth is not None:
        return load_truth(stage.truth)
    if job.mesh.is_main and not (folder / TRUTH).exists():
        make_truth(stage, folder, video_settings(job).tokenizer.height, video_settings(job).tokenizer.width)
    job.mesh.barrier()
    return load_truth(str(folder / TRUTH))


def make_truth(stage: VideoReal2Sim, folder: Any, height: int, width: int) -> None:
    """Play every task with every policy in the simulator and keep what happened."""
    from ...core.files import make_folder
    from ...rl.video.record import EpisodePlan, play

    make_folder(folder)
    rates: dict[str, Any] = {}
    first: dict[str, np.ndarray] = {}
    for task in stage.tasks:
        for policy in stage.policies:
            wins, judged, starts = [], [], []
            for e in range(stage.episodes):
                plan = EpisodePlan(stage.first_seed + e, task, policy, stage.frames, height, width)
                frames, _, success = play(plan, policy_seed(stage.first_seed, e))
                wins.append(success)
                judged.append(succeeded(task, frames[-1], frames[0]))
                starts.append(frames[0])
            rates[f"{task}/{policy}"] = {
                "wins": sum(wins),
                "judged": sum(judged),
                "agree": sum(a == b for a, b in zip(wins, judged, strict=True)),
            }
            first[task] = np.stack(starts)
    np.savez_compressed(folder / FIRST, allow_pickle=False, **first)
    keep_truth(folder, stage.episodes, rates)


def keep_truth(folder: Path, episodes: int, rates: dict[str, Any]) -> None:
    """Write down what happened, with digests of it and of the frames beside it: a later start, or another run,
    trusts it.
    """
    truth = {"episodes": episodes, "rates": rates, "frames": file_digest(folder / FIRST)}
    write_json(folder / TRUTH, {**truth, "digest": json_digest(truth)})


def load_truth(path: str) -> dict[str, Any]:
    """What make_truth kept: the JSON file, and the first frames beside it."""
    truth = read_json(Path(path))
    if truth is None:
        raise ConfigError(
            f"truth: {path} is not there; run the stage once where MuJoCo is installed and copy its {TRUTH} and {FIRST}"
        )
    beside = Path(path).with_name(FIRST)
    if "digest" in truth:  # those of earlier releases have none
        if truth.pop("digest") != json_digest(truth):
            raise StorageError(
                f"{path}: damaged, it does not match its own digest; restore it, or delete it and it is made again"
            )
        if not beside.is_file() or truth.pop("frames") != file_digest(beside):
            raise StorageError(f"{beside}: is not the one that {path} was written with; restore both, or delete both")
    with np.load(beside, allow_pickle=False) as held:
        return truth | {"first": {name: held[name] for name in held.files}}


def imagined(
    stage: VideoReal2Sim,
    job: Job,
    simulator: Callable[..., WorldModelSimulator],
    task: str,
    policy: str,
    which: Sequence[int],
    first: np.ndarray,
) -> int:
    """Successes of this rank's episodes inside the model, by the detector."""
    players = [make_policy(policy) for _ in which]
    for player, e in zip(players, which, strict=True):
        player.reset(policy_seed(stage.first_seed, e))
    seed = fold(job.recipe.seed, 51, stage.policies.index(policy), sorted(TASKS).index(task), which[0])
    ending = ENDINGS[video_settings(job).actions]
    starts, instructions = first[list(which)], [TASKS[task]] * len(which)
    frames = run_policy(simulator(seed=seed), players, starts, instructions, stage.frames, ending)
    return sum(succeeded(task, clip[-1], first[e]) for clip, e in zip(frames, which, strict=True))


def describe(stage: VideoReal2Sim, truth: dict[str, Any], found: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Success rates side by side, and how well each model agrees with reality."""
    keys = [f"{task}/{policy}" for task in stage.tasks for policy in stage.policies]
    n, rates = stage.episodes, truth["rates"]
    if truth["episodes"] != n:
        raise ConfigError(f"truth: made with {truth['episodes']} episodes, the stage asks for {n}")
    real = [rates[k]["wins"] / n for k in keys]
    rows = [
        {
            "name": "true simulator",
            "kind": "ceiling",
            "cells": [proportion(rates[k]["wins"], n).to_cell() for k in keys],
        }
    ]
    rows.append(
        {
            "name": "true frames, judged by the detector",
            "kind": "other",
            "cells": [proportion(rates[k]["judged"], n).to_cell() for k in keys],
        }
    )
    agree = sum(rates[k]["agree"] for k in keys)
    rows += [
        {"name": name, "kind": "model", "cells": [proportion(wins[k], n).to_cell() for k in keys]}
        for name, wins in found.items()
    ]
    half = {k: 0.5 for k in keys}
    lines, outcome = [], {"detector_agrees": agree / (n * len(keys))}
    for name, model in [
        ("every policy succeeds half the time", half),
        *((name, {k: w / n for k, w in wins.items()}) for name, wins in found.items()),
    ]:
        a = agreement(real, [model[k] for k in keys])
        kind = "baseline" if model is half else "model"
        lines.append({"name": name, "kind": kind, "cells": [a.r if a.r == a.r else "no spread", a.mmrv, a.gap]})
        if kind == "model":
            outcome |= {f"{name}/r": a.r if a.r == a.r else None, f"{name}/mmrv": a.mmrv, f"{name}/gap": a.gap}
    note = (
        f"{n} episodes of {stage.frames} frames each; the detector agrees with the simulator on {agree} of "
        f"{n * len(keys)} true ones."
    )
    columns = ["Pearson r", "MMRV", "mean gap"]
    return {
        "table": {"title": f"Success of policies: {stage.name}", "columns": keys, "rows": rows, "note": note},
        "agreement": {
            "title": f"Agreement with the simulator: {stage.name}",
            "columns": columns,
            "rows": lines,
            "note": note,
            "lower": columns[1:],
        },
        "outcome": outcome,
    }
