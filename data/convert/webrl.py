"""WebRL rollouts (traces/ and actions/) to step samples, with the released pre-processing's stage 1, and its stage 2 as
a function.

Lengths, prompts and field names follow the release; where it is at fault we do the sane thing and say so: an unfinished
task (score below 0) is dropped and not a failure, an early stop's empty response is dropped, the first success of a
task is chosen over all traces and not by worker, and the length guard cuts the page, never the action.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import json_lines
from ..pickles import load_release
from ..schema import TEXT
from ..shards.order import permutation
from .base import Item

PAGE = "** Simplified html **"
USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>"
ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
MAX_CHARACTERS = 16384 - 512
SUCCESS = 0.5
GAMMA = 0.9


def round_prompt(intent: str, responses: Sequence[str], html: str) -> tuple[str, int]:
    """The prompt of round len(responses), and how many characters of the page were cut to fit.

    As in the release the limit counts past rounds and the page; the instruction and the headers of this round come on
    top.
    """
    history = ""
    for k, response in enumerate(responses):
        history += f"Round {k}\n\n{USER}\n{intent if k == 0 else PAGE}\n\n{ASSISTANT}\n{response}\n\n"
    cut = max(0, len(history) + len(html) - MAX_CHARACTERS)
    page = html[: max(0, len(html) - cut)]
    return f"Task Instruction: {intent}\n\n{history}Round {len(responses)}\n\n{USER}\n{page}\n\n{ASSISTANT}\n", min(
        cut, len(html)
    )


def trajectory_steps(steps: list[dict[str, Any]], score: float) -> list[dict[str, Any]]:
    """Stage 1: the step records of one trajectory, with the release's field names."""
    intent = steps[0]["target"]
    responses = [s["response"] for s in steps]
    records = []
    for i, step in enumerate(steps):
        observation, cut = round_prompt(intent, responses[:i], step["html"])
        # after the last step there is no page: the release shows its own again, as the next round
        following = steps[i + 1]["html"] if i + 1 < len(steps) else step["html"]
        next_observation, _ = round_prompt(intent, responses[: i + 1], following)
        records.append(
            {
                "observation": observation,
                "next_observation": next_observation,
                "task": intent,
                "action": step["response"],
                "reward": score,
                "done": i == len(steps) - 1,
                "trajectory_reward": int(score >= SUCCESS),
                "page_characters_cut": cut,
            }
        )
    return add_returns(records)


def add_returns(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The release's mc_return: the discounted sum of the final score that every step carries. Only its sign means
    anything.
    """
    total = 0.0
    for record in reversed(records):
        total = record["reward"] + GAMMA * total
        record["mc_return"] = total
    return records


def replay_filter(
    earlier: Sequence[list[dict[str, Any]]],
    new_steps: list[dict[str, Any]],
    probability: Callable[[dict[str, Any]], float],
    *,
    low: float = 0.5,
    high: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Stage 2: steps of earlier successes that the actor finds neither sure nor unlikely, at most twice the new ones,
    mixed with them.

    `probability` is the geometric mean of the action's token probabilities under the actor of now. Of each task the
    first success counts.
    """
    seen: set[str] = set()
    kept: list[dict[str, Any]] = []
    for trajectory in earlier:
        if not trajectory or not trajectory[0]["trajectory_reward"] or trajectory[0]["task"] in seen:
            continue
        seen.add(trajectory[0]["task"])
        for step in trajectory:
            p = probability(step)
            if low < p <= high:
                kept.append({**step, "rank_score": p})
    chosen = [kept[i] for i in permutation((seed, 1), len(kept))[: 2 * len(new_steps)]] if kept else []
    together = [*chosen, *new_steps]
    return [together[i] for i in permutation((seed, 2), len(together))]


def read(source: Path, cursor: str | None, *, replay: str = "all") -> Iterator[Item]:
    """Every step of every finished trace; `replay=successes` keeps what later phases may replay."""
    if replay not in ("all", "successes"):
        raise ConfigError(f"replay={replay!r}: expected all or successes")
    if source.suffix == ".pt":
        yield from _from_release(source, cursor, replay)
        return
    traces, actions = source / "traces", source / "actions"
    if not traces.is_dir() or not actions.is_dir():
        raise ConfigError(f"{source}: expected the result folder, which holds traces/ and actions/")
    files = sorted(traces.glob("*.jsonl"), key=lambda p: (len(p.stem), p.stem))
    names = [p.stem for p in files]
    # "task:step" of the last one taken
    begin, taken = (
        (0, -1) if cursor is None else (names.index(cursor.rpartition(":")[0]), int(cursor.rpartition(":")[2]))
    )
    for number in range(begin, len(files)):
        path, done = files[number], (number + 1) / len(files)
        for item in _trace_items(path, actions, replay, done):
            step = int(item.cursor.rpartition(":")[2])
            if number > begin or step > taken or step < 0:
                yield item


def _trace_items(path: Path, actions: Path, replay: str, done: float) -> Iterator[Item]:
    task = path.stem

    def dropped(reason: str) -> Item:
        return Item(f"{task}:-1", dropped=reason, where=path.name, done=done)

    actions_file = actions / f"{task}.json"
    if not actions_file.is_file():
        yield dropped("no actions file: the score is not known")
        return
    try:
        steps = [json.loads(line) for _, line in json_lines(path.read_text(encoding="utf-8"))]
        score = float(json.loads(actions_file.read_text(encoding="utf-8"))["score"])
        missing = next((k for s in steps for k in ("index", "html", "response", "target") if k not in s), None)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        yield dropped(f"not readable: {type(error).__name__}")
        return
    if not steps or missing:
        yield dropped(f"a step without {missing}" if missing else "no steps")
        return
    if score < 0:
        yield dropped("unfinished (score below 0)")
        return
    if [s["index"] for s in steps] != list(range(len(steps))):
        yield dropped("steps are missing or out of order")
        return
    if replay == "successes" and score < SUCCESS:
        yield dropped("not a success")
        return
    acted = [s for s in steps if s["response"]]
    for i, record in enumerate(trajectory_steps(acted, score) if acted else []):
        yield Item(
            f"{task}:{i}", step_sample(record, task, i), key=f"{task}-{i:04d}", where=f"{path.name}:{i}", done=done
        )
    for step in steps:
        if not step["response"]:
            yield Item(
                f"{task}:{len(acted)}",
                dropped="empty response (early stop)",
                where=f"{path.name}:{step['index']}",
                done=done,
            )


def _from_release(source: Path, cursor: str | None, replay: str) -> Iterator[Item]:
    """A stage-1 file (a list of trajectories) or a stage-2 file (a flat list of steps)."""
    held = load_release(source)
    if not isinstance(held, list):
        raise ConfigError(f"{source}: expected a list of trajectories or of steps, found {type(held).__name__}")
    for number, entry in enumerate(held):
        records = [entry] if isinstance(entry, dict) else entry
        if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
            records = [{}]  # neither: dropped below
        if isinstance(entry, list) and all("reward" in r and "mc_return" not in r for r in records):
            add_returns(records)
        for i, record in enumerate(records):
            here = f"{number}:{i}"
            if cursor is not None and [number, i] <= [int(part) for part in cursor.split(":")]:
                continue
            where, done = f"{source.name}[{number}]", (number + 1) / len(held)
            missing = next(
                (
                    k
                    for k in ("observation", "next_observation", "action", "reward", "trajectory_reward")
                    if k not in record
                ),
                None,
            )
            reason = (
                f"a step without {missing}" if missing else None if record["action"] else "empty response (early stop)"
            )
            if reason is None and replay == "successes" and not record["trajectory_reward"]:
                reason = "not a success"
            if reason is not None:
                yield Item(here, dropped=reason, where=where, done=done)
            else:
                yield Item(
                    here,
                    step_sample(record, f"release-{number}", i),
                    key=f"release-{number:06d}-{i:04d}",
                    where=where,
                    done=done,
                )


def step_sample(record: dict[str, Any], task_id: str, index: int) -> dict[str, Any]:
    """A step record as a text trajectory: the prompt is one string that holds its own header tokens."""
    messages = [{"role": "user", "content": record["observation"]}, {"role": "assistant", "content": record["action"]}]
    meta = {k: v for k, v in record.items() if k not in ("observation", "action", "next_observation")}
    return {
        "messages.json": messages,
        "states.json": [record["observation"], record["next_observation"]],
        "meta.json": {"schema": TEXT, "task_id": task_id, "step": index, "raw_prompt": True, **meta},
    }
