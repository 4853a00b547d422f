"""Real2Sim: policies in world models beside what became of them in reality; r, MMRV and the mean gap say whether a
model may stand in.

Reality is the simulator of the table-top scene, or for recorded episodes (RT-1's) a file of success rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError, StorageError
from ...core.files import file_digest, json_digest, make_folder, read_json, write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.rollout.resample import make_with_republish
from ...rl.statistics import proportion
from ...rl.video import recorded
from ...rl.video.artifacts import action_bins, frozen_tokenizer
from ...rl.video.clips import Episodes
from ...rl.video.detector import succeeded
from ...rl.video.imagine import ClipDecoder
from ...rl.video.policies import VideoPolicy
from ...rl.video.real2sim import (
    ENDINGS,
    Ending,
    Rate,
    WorldModelSimulator,
    agreement,
    agreement_cells,
    policy_seed,
    run_policy,
)
from ...rl.worlds.tabletop import TASKS, Table
from ..job import Job
from ..settings.video import VideoReal2Sim
from .common import sampling
from .verbs import made_for
from .video_tokenizer import episodes as held_episodes
from .video_tokenizer import video_settings

TRUTH = "truth.json"
FIRST = "first.npz"
REPLAYED, WAITING = "recorded actions", "standing still"  # what every world model is tried with besides policies


def on_recordings(stage: VideoReal2Sim, job: Job) -> bool:
    """Whether trials begin with recorded episodes; otherwise in the table-top scene."""
    return stage.shards is not None or video_settings(job).actions != "tabletop"


def check(stage: VideoReal2Sim, job: Job) -> None:
    """What is not the scene's is there: policies, the recorded episodes, the truth."""
    place = f"stages: {stage.name}"
    if not on_recordings(stage, job):
        unknown = next((task for task in stage.tasks if task not in TASKS), None)
        if unknown is not None:
            raise ConfigError(f"{place}.tasks: '{unknown}' is none of the table-top scene's: {', '.join(TASKS)}")
        if stage.judge is not None:
            raise ConfigError(f"{place}.judge: judges recorded episodes; the table-top scene has its detector")
        if stage.truth is not None:
            truth_of(stage, stage.truth, video_settings(job).table)
        return
    recorded.require_own(stage.policies, f"{place}.policies")
    if stage.truth is None:
        raise ConfigError(
            f"{place}.truth: name a file with the true success of each policy in each task; no simulator of "
            f"env.actions = {video_settings(job).actions} is here to find out"
        )
    recorded.read_rates(stage.truth, stage.tasks, [recorded.name_of(p) for p in stage.policies])
    for own in (*stage.policies, stage.judge):
        if not isinstance(own, str) and own is not None:
            own.load()
    if video_settings(job).shards is not None or stage.shards is not None:
        recorded.find_episodes(recordings(stage, job), stage.tasks, stage.episodes, place)


def recordings(stage: VideoReal2Sim, job: Job) -> Episodes:
    """The episodes that trials may begin with."""
    return Episodes(stage.shards) if stage.shards is not None else held_episodes(job, "test")


@dataclass(frozen=True)
class Trial:
    """One policy's episodes of one task, those of this rank."""

    first_BHW3: np.ndarray
    instructions: list[str]
    players: list[VideoPolicy]
    judge: Callable[[int, np.ndarray, int], bool]  # which one, its frames, how many until it was over
    to_end: bool  # whether it looks at the last frame, whenever the episode was over


def run(stage: VideoReal2Sim, job: Job) -> dict[str, Any]:
    """Every rank imagines its share of the episodes; reality is asked once."""
    chosen = video_settings(job)
    made = made_for(chosen, job)
    assert made is not None
    decoder = ClipDecoder(frozen_tokenizer(chosen, made), chosen.layout, stage.bf16)
    bins, ending = action_bins(chosen, made), ENDINGS.get(chosen.actions)
    world = (Recordings if on_recordings(stage, job) else Scene)(stage, job)
    successes: dict[str, dict[str, int]] = {}
    share = job.mesh.share(range(stage.episodes))
    progress = Progress(stage.name, len(stage.models) * len(stage.tasks) * len(world.played), speak=job.mesh.is_main)
    done = 0
    waiting = None if ending is None else ending.still(chosen.action_dims, over=False)
    with sampling(job, stage) as of:
        for name in stage.models:
            successes[name] = {}
            with of(name) as (sampler, _, publish):
                choice: dict[str, Any] = {"top_k": stage.top_k, "temperature": stage.temperature}
                choice |= {"repetition_penalty": stage.repetition_penalty, "waiting_A": waiting}
                simulator = partial(WorldModelSimulator, sampler, decoder, bins, **choice)
                for task, (number, policy) in product(stage.tasks, enumerate(world.played)):
                    seed = fold(job.recipe.seed, 51, number, world.task_number(task), 0)
                    given = partial(world.trial, task, policy, share), partial(simulator, seed=seed, first=share[0])
                    tried = partial(imagined, *given, stage.frames, ending)
                    won = make_with_republish(job.mesh, sampler, tried, publish, f"stage {stage.name}")
                    wins = sum(job.mesh.gather(won))
                    successes[name][f"{task}/{recorded.name_of(policy)}"] = wins
                    progress.update(done := done + 1)
    results = describe(stage, world, successes, job.recipe.seed)
    if job.mesh.is_main:
        for table, value in results["tables"].items():
            job.run.write_result(f"{stage.name}{table}", value)
    job.mesh.barrier()
    return results["outcome"]


def imagined(
    begin: Callable[[], Trial], simulator: Callable[[], WorldModelSimulator], frames: int, ending: Ending | None
) -> int:
    """How many of this rank's episodes succeed inside the model."""
    trial = begin()
    given = trial.players, trial.first_BHW3, trial.instructions
    clips, lasted = run_policy(simulator(), *given, frames, ending, trial.to_end)
    return sum(trial.judge(i, clip, int(n)) for i, (clip, n) in enumerate(zip(clips, lasted, strict=True)))


class Scene:
    """The table-top scene, judged by the detector; the simulator says what is true."""

    real_name = "true simulator"

    def __init__(self, stage: VideoReal2Sim, job: Job) -> None:
        self.stage, self.table, self.dims = stage, video_settings(job).table, video_settings(job).action_dims
        self.truth = in_simulator(stage, job)
        self.played: list[Any] = list(stage.policies)
        rates, keys, n = self.truth["rates"], played_in(stage), stage.episodes
        self.real = {key: Rate(rates[key]["wins"] / n, n) for key in keys}
        judged = [proportion(rates[key]["judged"], n).to_cell() for key in keys]
        self.rows = [{"name": "true frames, judged by the detector", "kind": "other", "cells": judged}]
        agree, of = sum(rates[key]["agree"] for key in keys), n * len(keys)
        self.outcome = {"detector_agrees": agree / of}
        self.note = f"the detector agrees with the simulator on {agree} of {of} true ones"

    def task_number(self, task: str) -> int:
        return sorted(TASKS).index(task)

    def trial(self, task: str, policy: Any, share: Sequence[int]) -> Trial:
        first = np.asarray(self.truth["first"][task])
        players = [recorded.player(policy, self.dims, self.table) for _ in share]
        for one, e in zip(players, share, strict=True):
            one.reset(policy_seed(self.stage.first_seed, e))

        def judge(i: int, frames: np.ndarray, lasted: int) -> bool:
            return succeeded(task, frames[-1], first[share[i]])

        return Trial(first[list(share)], [TASKS[task]] * len(share), players, judge, to_end=True)


class Recordings:
    """Recorded episodes of any robot; a file says what is true. Besides the policies, recorded actions are played again
    and nothing at all is done, which says what the model and the judge are worth.
    """

    real_name = "in reality"

    def __init__(self, stage: VideoReal2Sim, job: Job) -> None:
        self.stage, self.env = stage, video_settings(job)
        self.names = [recorded.name_of(p) for p in stage.policies]
        self.real = recorded.read_rates(str(stage.truth), stage.tasks, self.names)
        self.episodes = recordings(stage, job)
        self.found = recorded.find_episodes(self.episodes, stage.tasks, stage.episodes, f"stages: {stage.name}")
        self.played: list[Any] = [*stage.policies, REPLAYED, WAITING]
        self.rows: list[dict[str, Any]] = []
        self.outcome: dict[str, float] = {}
        share = job.mesh.share(range(stage.episodes))
        self.judged: dict[str, dict[str, int]] = {"recorded frames": {}, "the first frame for ever": {}}
        for task in stage.tasks:
            verdicts = job.mesh.gather(job.mesh.from_leader(partial(self._verdicts, task, share)), patient=True)
            for wins, each in zip(self.judged.values(), zip(*verdicts, strict=True), strict=True):
                wins[task] = sum(each)
        total = stage.episodes * len(stage.tasks)
        for name, wins in self.judged.items():
            self.outcome[f"judged done/{name}"] = sum(wins.values()) / total
        done = sum(self.judged["recorded frames"].values())
        self.note = f"the judge takes {done} of {total} recorded ones for done"

    def _held(self, task: str, share: Sequence[int]) -> list[recorded.Recording]:
        size = self.env.tokenizer.height, self.env.tokenizer.width
        return [recorded.recording(self.episodes, self.found[task][e], *size) for e in share]

    def _verdicts(self, task: str, share: Sequence[int]) -> tuple[int, int]:
        """How many episodes as they were recorded are taken for done, and how many of their first frames."""
        held, judge = self._held(task, share), partial(recorded.verdict, self.stage.judge)
        return sum(judge(r.frames_THW3, r) for r in held), sum(judge(r.frames_THW3[:1], r) for r in held)

    def task_number(self, task: str) -> int:
        return self.stage.tasks.index(task)

    def trial(self, task: str, policy: Any, share: Sequence[int]) -> Trial:
        held, dims, ending = self._held(task, share), self.env.action_dims, ENDINGS.get(self.env.actions)
        if policy == REPLAYED:
            players: list[Any] = [recorded.Replay(r.actions_TA) for r in held]
        elif policy == WAITING:
            still = np.zeros(dims) if ending is None else ending.still(dims, over=False)
            players = [recorded.Still(still) for _ in held]
        else:
            players = [recorded.player(policy, dims) for _ in held]
            for one, e in zip(players, share, strict=True):
                one.reset(policy_seed(self.stage.first_seed, e))

        def judge(i: int, frames: np.ndarray, lasted: int) -> bool:
            return recorded.verdict(self.stage.judge, frames[:lasted], held[i])

        first = np.stack([r.frames_THW3[0] for r in held])
        return Trial(first, [r.instruction for r in held], players, judge, to_end=False)


def in_simulator(stage: VideoReal2Sim, job: Job) -> dict[str, Any]:
    """True success by task and policy, the detector's verdict on true frames, and the first frames; made once."""
    folder, table = job.stage_folder(stage.name), video_settings(job).table
    if stage.truth is None and not job.mesh.from_main((folder / TRUTH).exists):
        job.mesh.from_main(lambda: make_truth(stage, folder, table))
    return truth_of(stage, stage.truth or str(folder / TRUTH), table)


def make_truth(stage: VideoReal2Sim, folder: Path, table: Table) -> None:
    """Play every task with every policy in the simulator and keep what happened."""
    from ...rl.video.record import EpisodePlan, play

    make_folder(folder)
    rates: dict[str, Any] = {}
    first: dict[str, np.ndarray] = {}
    for task in stage.tasks:
        for policy in stage.policies:
            wins, judged, starts = [], [], []
            for e in range(stage.episodes):
                plan = EpisodePlan(stage.first_seed + e, task, recorded.name_of(policy), stage.frames, table)
                one = recorded.player(policy, len(table.action_ranges), table)
                frames, _, success = play(plan, policy_seed(stage.first_seed, e), one)
                wins.append(success)
                judged.append(succeeded(task, frames[-1], frames[0]))
                starts.append(frames[0])
            rates[f"{task}/{recorded.name_of(policy)}"] = {
                "wins": sum(wins),
                "judged": sum(judged),
                "agree": sum(a == b for a, b in zip(wins, judged, strict=True)),
            }
            first[task] = np.stack(starts)
    np.savez_compressed(folder / FIRST, allow_pickle=False, **first)
    keep_truth(folder, stage.episodes, rates, made_under(stage, table))


def played_in(stage: VideoReal2Sim) -> list[str]:
    """Every task with every policy, as the truth calls them."""
    return [f"{task}/{recorded.name_of(policy)}" for task in stage.tasks for policy in stage.policies]


def truth_of(stage: VideoReal2Sim, path: str, table: Table) -> dict[str, Any]:
    """What make_truth kept, refused where it is not of the episodes, tasks and policies that the stage imagines."""
    truth = load_truth(path)
    require_same_conditions(truth, stage, table)
    if missing := [key for key in played_in(stage) if key not in truth["rates"]]:
        raise ConfigError(f"truth: {path} has no {missing[0]}; write it anew with these tasks and policies")
    return truth


def made_under(stage: VideoReal2Sim, table: Table) -> dict[str, Any]:
    """What true success depends on besides the policies."""
    return {"frames_each": stage.frames, "first_seed": stage.first_seed, "table": asdict(table)}


def require_same_conditions(truth: dict[str, Any], stage: VideoReal2Sim, table: Table) -> None:
    """Refuse success that was found in other episodes than the stage imagines."""
    for key, value in {"episodes": stage.episodes, **made_under(stage, table)}.items():
        if truth.get(key, value) != value:  # earlier releases kept the episodes alone
            raise ConfigError(
                f"truth: {stage.truth} was made with {key} = {truth[key]}, stage {stage.name} asks for {value}; write "
                "it anew, or change the setting"
            )


def keep_truth(folder: Path, episodes: int, rates: dict[str, Any], how: dict[str, Any]) -> None:
    """Write down what happened, with digests of it and of the frames beside it: a later start, or another run,
    trusts it.
    """
    truth = {"episodes": episodes, **how, "rates": rates, "frames": file_digest(folder / FIRST)}
    write_json(folder / TRUTH, {**truth, "digest": json_digest(truth)})


def load_truth(path: str) -> dict[str, Any]:
    """What make_truth kept: the JSON file, and the first frames beside it."""
    truth = read_json(Path(path))
    if truth is None:
        raise ConfigError(
            f"truth: {path} is not there; run the stage once where MuJoCo is installed and copy its {TRUTH} and {FIRST}"
        )
    if not isinstance(truth, dict) or not isinstance(truth.get("rates"), dict):
        raise ConfigError(f"truth: {path} has no rates of tasks and policies; name the {TRUTH} of such a stage")
    beside = Path(path).with_name(FIRST)
    if not beside.is_file():
        raise StorageError(f"{beside}: is not there, and {path} was written with it; restore both, or delete both")
    if "digest" in truth:  # those of earlier releases have none
        if truth.pop("digest") != json_digest(truth):
            raise StorageError(
                f"{path}: damaged, it does not match its own digest; restore it, or delete it and it is made again"
            )
        if truth.pop("frames") != file_digest(beside):
            raise StorageError(f"{beside}: is not the one that {path} was written with; restore both, or delete both")
    with np.load(beside, allow_pickle=False) as held:
        return truth | {"first": {name: held[name] for name in held.files}}


def describe(
    stage: VideoReal2Sim, world: Scene | Recordings, found: dict[str, dict[str, int]], seed: int
) -> dict[str, Any]:
    """Success rates side by side, and how well each model agrees with reality."""
    n, names = stage.episodes, [recorded.name_of(p) for p in stage.policies]
    keys = played_in(stage)
    rows = [{"name": world.real_name, "kind": "ceiling", "cells": [world.real[k].to_cell() for k in keys]}, *world.rows]
    rows += [
        {"name": name, "kind": "model", "cells": [proportion(wins[k], n).to_cell() for k in keys]}
        for name, wins in found.items()
    ]
    half = {k: Rate(0.5) for k in keys}
    lines, outcome = [], dict(world.outcome)
    for name, model in [
        ("every policy succeeds half the time", half),
        *((name, {k: Rate(wins[k] / n, n) for k in keys}) for name, wins in found.items()),
    ]:
        kind = "baseline" if model is half else "model"
        groups = {name: keys}
        if kind == "model" and len(stage.tasks) > 1:  # as SIMPLER has it: policies are ranked within a task
            groups |= {f"{name}, {task}": [f"{task}/{policy}" for policy in names] for task in stage.tasks}
        for line, chosen in groups.items():
            real, imagined = ([rates[k] for k in chosen] for rates in (world.real, model))
            lines.append({"name": line, "kind": kind, "cells": agreement_cells(real, imagined, fold(seed, 52))})
        if kind == "model":
            a = agreement([world.real[k].value for k in keys], [model[k].value for k in keys])
            outcome |= {f"{name}/r": a.r if a.r == a.r else None, f"{name}/mmrv": a.mmrv, f"{name}/gap": a.gap}
    note = f"{n} episodes of {stage.frames} frames each; {world.note}."
    columns = ["Pearson r", "MMRV", "mean gap"]
    tables = {
        "": {"title": f"Success of policies: {stage.name}", "columns": keys, "rows": rows, "note": note},
        "-agreement": {
            "title": f"Agreement with {'reality' if isinstance(world, Recordings) else 'the simulator'}: {stage.name}",
            "columns": columns,
            "rows": lines,
            "note": note,
            "lower": columns[1:],
        },
    }
    if isinstance(world, Recordings):
        tables["-judge"] = judge_table(stage, world, found, note)
    return {"tables": tables, "outcome": outcome}


def judge_table(stage: VideoReal2Sim, world: Recordings, found: dict[str, dict[str, int]], note: str) -> dict[str, Any]:
    """How often the judge takes for done what should be, and what should not."""

    def row(name: str, kind: str, wins: dict[str, int]) -> dict[str, Any]:
        cells = [proportion(wins[task], stage.episodes).to_cell() for task in stage.tasks]
        return {"name": name, "kind": kind, "cells": cells}

    kinds = {"recorded frames": "ceiling", "the first frame for ever": "baseline"}
    rows = [row(name, kinds[name], wins) for name, wins in world.judged.items()]
    for name, wins in found.items():
        for played, kind in ((REPLAYED, "model"), (WAITING, "baseline")):
            rows.append(row(f"{name}, {played}", kind, {task: wins[f"{task}/{played}"] for task in stage.tasks}))
    title = f"Judged done without a policy: {stage.name}"
    return {"title": title, "columns": list(stage.tasks), "rows": rows, "note": note}
