"""The release's scripts as functions on its files: process_data's two stages, gen_task, generate_test_data and score,
with its field names, in JSONL. Its pickled files are read as plain data; none are written."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import json_lines
from ...data.convert.webrl import SUCCESS, add_returns, replay_filter, trajectory_steps
from ...data.pickles import load_release
from ...data.trajectory import Invalid
from ..statistics import Estimate, proportion
from ..worlds.web.tasks import REAL_PLACEHOLDERS, expand
from .chat import ChatApi
from .instructions import PATIENCE, possible, write_round

Steps = list[dict[str, Any]]
SITES = {
    "cms": "shopping_admin",
    "map": "map",
    "oss": "shopping",
    "reddit": "reddit",
    "gitlab": "gitlab",
}  # the release's names -> WebArena's


@dataclass(frozen=True)
class Rollout:
    """One finished trajectory of a result folder: its steps as traces/ holds them, without empty responses, and its
    score.
    """

    task_id: str
    steps: Steps
    score: float

    @property
    def intent(self) -> str:
        return str(self.steps[0]["target"])


@dataclass
class Found:
    """The rollouts of a folder, and why others are not among them."""

    rollouts: list[Rollout] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def read_lines(path: Path) -> list[Any]:
    """The values of a JSONL file."""
    try:
        return [json.loads(line) for _, line in json_lines(path.read_text(encoding="utf-8"))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSONL: {error}") from error


def write_lines(path: Path, rows: Iterable[Any], append: bool = False) -> int:
    """Values as JSONL; how many."""
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _score(path: Path) -> float:
    """The score that an actions file holds."""
    held = read_lines(path)
    if not held or not isinstance(held[0], dict) or not isinstance(held[0].get("score"), int | float):
        raise ConfigError(f"{path}: no score")
    return float(held[0]["score"])


def read_rollouts(folder: Path) -> Found:
    """The finished trajectories of a result folder, which holds traces/ and actions/."""
    traces, actions = folder / "traces", folder / "actions"
    if not traces.is_dir() or not actions.is_dir():
        raise ConfigError(f"--rollout-path {folder}: expected the result folder, which holds traces/ and actions/")
    found = Found()
    for path in sorted(traces.glob("*.jsonl"), key=lambda p: (len(p.stem), p.stem)):
        actions_file = actions / f"{path.stem}.json"
        if not actions_file.is_file():
            found.dropped["no actions file: the score is not known"] += 1
            continue
        steps, score = read_lines(path), _score(actions_file)
        if not all(isinstance(s, dict) for s in steps):
            raise ConfigError(f"{path}: a step that is no record")
        missing = next((k for s in steps for k in ("html", "response", "target") if k not in s), None)
        if missing:
            raise ConfigError(f"{path}: a step without {missing}")
        acted = [s for s in steps if s["response"]]  # an early stop's response is empty
        if score < 0:
            found.dropped["unfinished (score below 0)"] += 1
        elif not acted:
            found.dropped["no response"] += 1
        else:
            found.rollouts.append(Rollout(path.stem, acted, score))
    return found


def write_fixed(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """fixed_traces/, as the release leaves it beside traces/: every step with its response and the score that
    counts.
    """
    for r in rollouts:
        rows = [{**s, "fixed_response": s["response"], "score": r.score} for s in r.steps]
        write_lines(folder / "fixed_traces" / f"{r.task_id}.jsonl", rows)


def relabel(rollouts: Sequence[Rollout], judge: Callable[[Rollout], float]) -> list[Rollout]:
    """The same rollouts scored 1 or 0 by an outcome reward model's probability of YES."""
    return [replace(r, score=float(judge(r) >= SUCCESS)) for r in rollouts]


def stage_one(rollouts: Sequence[Rollout]) -> list[Steps]:
    """Trajectories of step records: observation, next_observation, task, action, reward, done, trajectory_reward."""
    return [trajectory_steps(r.steps, r.score) for r in rollouts]


def read_experience(path: Path) -> list[Steps]:
    """Trajectories of an earlier phase: a stage-1 file of ours (JSONL) or of the release (.pt, read as plain data)."""
    held = load_release(path) if path.suffix == ".pt" else read_lines(path)
    if not isinstance(held, list) or not all(isinstance(t, list) and t for t in held):
        raise ConfigError(f"--experience-paths {path}: expected trajectories (lists of steps), the output of stage 1")
    needed = ("observation", "next_observation", "task", "action", "reward", "trajectory_reward")
    for number, trajectory in enumerate(held):
        missing = next((k for s in trajectory for k in needed if k not in s), None)
        if missing:
            raise ConfigError(f"{path}: trajectory {number} has a step without {missing}")
    return [t if "mc_return" in t[0] else add_returns(list(t)) for t in held]


def stage_two(
    earlier: Sequence[Steps], new: Sequence[Steps], probability: Callable[[dict[str, Any]], float], seed: int
) -> Steps:
    """The flat, shuffled list that a phase trains on: new steps, and steps of earlier successes in the actor's band."""
    return replay_filter(earlier, [s for t in new for s in t], probability, seed=seed)


def generate_tasks(
    failed: Sequence[Mapping[str, str]], api: ChatApi, count: int, seed: int, feasible: bool
) -> tuple[list[dict[str, str]], Counter[str]]:
    """gen_task: `count` new instructions from failed ones, none twice; `feasible` asks for each of them whether the
    site can do it, and goes on until enough have survived or several rounds in a row add none. With counts."""
    for number, row in enumerate(failed):
        if row.get("web") not in SITES or not isinstance(row.get("task"), str):
            raise ConfigError(
                f"line {number + 1} of the failed tasks: needs `task`, and `web` as one of {', '.join(SITES)}"
            )
    rng, counts, short = random.Random(seed), Counter[str](), {site: name for name, site in SITES.items()}
    by_site: dict[str, list[str]] = {}
    for row in failed:
        by_site.setdefault(SITES[row["web"]], []).append(row["task"])
    known, made, quiet = {row["task"] for row in failed}, list[dict[str, str]](), 0
    while by_site and len(made) < count and quiet < PATIENCE:
        before, fresh = len(made), []
        for site, text in write_round(by_site, api, count - len(made), rng):
            counts["written"] += 1
            if text in known:
                counts["seen before"] += 1
            else:
                known.add(text)
                fresh.append((site, text))
        answers = possible(fresh, api) if feasible and fresh else [True] * len(fresh)
        for (site, text), answer in zip(fresh, answers, strict=True):
            if isinstance(answer, Invalid):
                counts["unanswered"] += 1
            elif not answer:
                counts["not feasible"] += 1
            elif len(made) < count:
                made.append({"task": text, "web": short[site]})
        quiet = 0 if len(made) > before else quiet + 1
    counts["kept"] = len(made)
    return made, counts


def read_task_list(path: Path) -> list[dict[str, Any]]:
    """The records of a list file of tasks."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(held, list):
        raise ConfigError(f"{path}: expected a list of tasks")
    for index, task in enumerate(held):
        if not isinstance(task, dict) or "task_id" not in task or not isinstance(task.get("sites"), list):
            raise ConfigError(f"{path}[{index}]: a task is a record with task_id and sites")
    return held


def expand_tasks(raw: Path, addresses: Mapping[str, str]) -> list[dict[str, Any]]:
    """generate_test_data: the tasks of a raw file with addresses in the place of placeholders; one without an
    address is refused.
    """
    tasks = expand(read_task_list(raw), {f"__{name}__": url for name, url in addresses.items()})
    for index, task in enumerate(tasks):
        missing = next((p for p in REAL_PLACEHOLDERS if p in json.dumps(task)), None)
        if missing:
            raise ConfigError(
                f"{raw}[{index}]: there is no address for {missing}; set the environment variable {missing.strip('_')}"
            )
    return tasks


@dataclass(frozen=True)
class SiteScore:
    """Success of one combination of sites: over the episodes that ended, and over all tasks."""

    sites: str
    finished: Estimate
    overall: Estimate


def score_table(folder: Path, tasks: Sequence[Mapping[str, Any]]) -> tuple[list[SiteScore], list[Any]]:
    """score.py: rows by sites with the total last, and the ids of the solved tasks (`old_task_id` where there is one).
    A task whose score is missing or below 0 did not end: it counts in the second rate alone."""
    if not (folder / "actions").is_dir():
        raise ConfigError(f"{folder}: expected a result folder, which holds actions/")
    rows: dict[str, list[float | None]] = {}
    solved = []
    ids = {str(task["task_id"]) for task in tasks}
    for index, task in enumerate(tasks):
        # files are named by task or by place in the list; that of a place may be another task's
        names = [str(task["task_id"]), *([str(index)] if str(index) not in ids else [])]
        found = [path for name in names if (path := folder / "actions" / f"{name}.json").is_file()]
        score = _score(found[0]) if found else -1.0
        known = score if score >= 0 else None
        for name in (", ".join(task["sites"]), "all"):
            rows.setdefault(name, []).append(known)
        if known is not None and known >= 1.0:
            solved.append(task.get("old_task_id", task["task_id"]))
    table = []
    for name in [*sorted(n for n in rows if n != "all"), "all"]:
        ended = [s for s in rows[name] if s is not None]
        wins = sum(s >= 1.0 for s in ended)
        table.append(SiteScore(name, proportion(wins, len(ended)), proportion(wins, len(rows[name]))))
    return table, solved
