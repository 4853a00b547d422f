"""Trajectories of web agents as they are kept: steps with the ids that were read and written, in shards of the text
kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...data.convert.webrl import ASSISTANT, GAMMA, SUCCESS, USER, round_prompt
from ...data.schema import TEXT
from ...data.shards import ShardSet
from ...data.trajectory import Role, TokenSequence
from ..tasks import Lesson
from .prompts import Prompter

MADE = "made-"  # begins the id of a task that a language model wrote


@dataclass(frozen=True)
class WebStep:
    """One action: what was read, what was written, what is read next, and the page as text."""

    prompt: tuple[int, ...]
    action: tuple[int, ...]  # with the token that ended it
    following: tuple[int, ...]  # the prompt of the next round; after the last step its own page again
    html: str
    response: str
    learn: bool = True  # a noise step of a demonstration stands in the history and is not imitated

    @property
    def ids(self) -> np.ndarray:
        return np.asarray([*self.prompt, *self.action], np.int64)

    @property
    def mask(self) -> np.ndarray:
        """1 on the action's tokens, aligned with `ids`."""
        return np.asarray([0.0] * len(self.prompt) + [1.0] * len(self.action), np.float32)

    def read(self, pad_id: int) -> np.ndarray:
        """1 on the prompt's tokens that follow another token of it, so neither on padding in front nor on the first
        one.
        """
        mask = 1.0 - self.mask
        mask[: int(np.argmax(self.ids != pad_id)) + 1] = 0.0
        return mask


@dataclass(frozen=True)
class WebTrajectory:
    """One episode. `score` is the world's (None where it cannot judge), `reward` is what training believes: the
    world's or the model's.
    """

    task_id: str
    intent: str
    site: str
    steps: tuple[WebStep, ...]
    reward: float
    score: float | None = None
    key: str = ""  # unique in its stage

    @property
    def success(self) -> bool:
        return self.reward >= SUCCESS

    def labelled(self, probability: float) -> WebTrajectory:
        """The same episode as the outcome reward model sees it, by its probability of YES."""
        return replace(self, reward=float(probability >= SUCCESS))


def mc_returns(steps: int, reward: float, gamma: float = GAMMA) -> list[float]:
    """The release's mc_return: every step carries the final score, so only its sign means anything."""
    total, found = 0.0, []
    for _ in range(steps):
        total = reward + gamma * total
        found.append(total)
    return found[::-1]


def key_of(number: int, sample: int) -> str:
    """The key of a sample of a stage's so many-th task."""
    return f"{number:06d}-{sample}"


def lessons_of(trajectory: WebTrajectory, held_out: bool) -> list[Lesson]:
    """Every step with the release's field names; roles tell prompt, action and next prompt apart. Those of successes
    are to be imitated.
    """
    responses = [s.response for s in trajectory.steps]
    returns = mc_returns(len(responses), trajectory.reward)
    lessons = []
    for i, step in enumerate(trajectory.steps):
        roles = (
            [Role.PROMPT] * len(step.prompt)
            + [Role.ACTION] * len(step.action)
            + [Role.OBSERVATION] * len(step.following)
        )
        prompt = round_prompt(trajectory.intent, responses[:i], step.html)[0]
        meta = {
            "schema": TEXT,
            "task_id": trajectory.task_id,
            "task": trajectory.intent,
            "site": trajectory.site,
            "trajectory": trajectory.key,
            "step": i,
            "reward": trajectory.reward,
            "score": trajectory.score,
            "trajectory_reward": int(trajectory.success),
            "done": i == len(responses) - 1,
            "mc_return": returns[i],
            "learn": step.learn,
        }
        fields = {
            "messages.json": [{"role": "user", "content": prompt}, {"role": "assistant", "content": step.response}],
            "states.json": [step.html],
            "meta.json": meta,
        }
        sequence = TokenSequence((*step.prompt, *step.action, *step.following), tuple(roles))
        lessons.append(Lesson(sequence, fields, held_out, trajectory.success and step.learn))
    return lessons


def read_trajectories(folders: Iterable[Path]) -> list[WebTrajectory]:
    """The trajectories of some folders of shards, ordered by their keys, so that the order does not depend on who
    wrote what.
    """
    steps: dict[str, list[tuple[int, WebStep, dict[str, Any]]]] = {}
    for sample in (sample for folder in folders if any(folder.glob("*.tar")) for sample in _samples(folder)):
        meta, ids, roles = sample["meta.json"], np.asarray(sample["tokens.npy"]), np.asarray(sample["roles.npy"])
        parts = [tuple(ids[roles == int(role)].tolist()) for role in (Role.PROMPT, Role.ACTION, Role.OBSERVATION)]
        step = WebStep(
            parts[0],
            parts[1],
            parts[2],
            sample["states.json"][0],
            sample["messages.json"][-1]["content"],
            meta["learn"],
        )
        steps.setdefault(meta["trajectory"], []).append((meta["step"], step, meta))
    kept = []
    for key in sorted(steps):
        rows = sorted(steps[key], key=lambda row: row[0])
        first, taken = rows[0][2], tuple(step for _, step, _ in rows)
        kept.append(
            WebTrajectory(first["task_id"], first["task"], first["site"], taken, first["reward"], first["score"], key)
        )
    return kept


def _samples(folder: Path) -> Iterator[dict[str, Any]]:
    shards = ShardSet(folder)
    return (shards[index] for index in range(len(shards)))


def converted(folder: Path, prompter: Prompter) -> list[WebTrajectory]:
    """Trajectories of shards that the converters `webrl` and `sharegpt` made of the release's files: texts, encoded
    here with the headers of the model's family. A prompt above the limit loses the end of its page."""
    found: dict[str, list[tuple[int, str, str, str, dict[str, Any]]]] = {}
    shards, last = ShardSet(folder), ""
    for index in range(len(shards)):
        sample = shards[index]
        messages, meta = sample["messages.json"], sample["meta.json"]
        if "step" in meta:
            observation, following = sample["states.json"]
            found.setdefault(str(meta["task_id"]), []).append(
                (int(meta["step"]), observation, following, messages[-1]["content"], meta)
            )
            continue
        intent, number = _round_of(messages, f"{folder}: row {index}")
        # rows of one trajectory follow one another; what succeeded was written down, so its reward is 1
        if number == 0 or not last or found[last][-1][0] != number - 1 or found[last][-1][4]["task"] != intent:
            last = f"row-{index:06d}"
        row = (number, messages[0]["content"], "", messages[-1]["content"], {"task": intent, "reward": 1.0})
        found.setdefault(last, []).append(row)
    return [_trajectory(key, sorted(rows, key=lambda row: row[0]), prompter) for key, rows in sorted(found.items())]


def _trajectory(key: str, rows: list[tuple[int, str, str, str, dict[str, Any]]], prompter: Prompter) -> WebTrajectory:
    steps, encode, first = [], prompter.tokenizer.encode, rows[0][4]
    responses = [row[3] for row in rows]
    for place, (_, observation, following, answer, _) in enumerate(rows):
        head, _, rest = observation.rpartition(f"{USER}\n")
        html = rest.rpartition(f"\n\n{ASSISTANT}")[0] if head else ""
        if not following:  # a file of single steps: the next row's prompt, and after the last step its own page again
            after = rows[place + 1][1] if place + 1 < len(rows) else round_prompt(first["task"], responses, html)[0]
            following = after
        ids = [(*prompter.begin, *_cut(text, prompter)) for text in (observation, following)]
        steps.append(WebStep(ids[0], (*encode(answer), prompter.stop_id), ids[1], html, answer))
    reward = float(first["reward"])
    return WebTrajectory(key, first["task"], str(first.get("site", "")), tuple(steps), reward, reward, key)


def _round_of(messages: Sequence[dict[str, Any]], where: str) -> tuple[str, int]:
    """Instruction and round of a row of WebRL's SFT files: one prompt with all rounds in it, and one action."""
    if [m["role"] for m in messages] == ["user", "assistant"]:
        said = re.match(r"Task Instruction: (.*?)\n\nRound 0\n", messages[0]["content"], re.DOTALL)
        rounds = re.findall(rf"Round (\d+)\n\n{re.escape(USER)}\n", messages[0]["content"])
        if said and rounds:
            return said[1], int(rounds[-1])
    raise ConfigError(
        f"{where}: no step of WebRL's SFT files, which is a prompt 'Task Instruction: ... Round 0 ...' and one action"
    )


def _cut(text: str, prompter: Prompter) -> list[int]:
    """The ids of a prompt, the end of its last page left out where it is too long."""
    encode, headers = prompter.tokenizer.encode, prompter.headers
    before, mark, page = text.rpartition(f"{USER}\n")
    page, end, tail = page.rpartition(f"\n\n{ASSISTANT}")
    head, body, last = encode(headers.translate(before + mark)), encode(page), encode(headers.translate(end + tail))
    return [*head, *body[: max(0, prompter.limit - len(prompter.begin) - len(head) - len(last))], *last]
