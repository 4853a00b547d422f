"""Single-turn questions to a language world model: prompt ids in, an answer out, judged by a rule.

Samples have the shard kind of world-model pairs, so that converted public data and our own games train alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

from ..data.tokenizers import Tokenizer
from ..data.trajectory import Invalid
from .chat import first_ids
from .rewards import text_game, web_page
from .rewards.text_game_transition import Transition
from .rollout.episodes import rollout
from .rollout.sampler import Sample, Sampler, SamplingParams

Domain = Literal["text-game", "web-page"]
RewardKind = Literal["binary", "task_specific", "f1"]
MARKER = "The final answer is: "


@dataclass(frozen=True)
class Question:
    """One pair of a shard, read for training: the prompt, the true answer, and what the judge needs."""

    domain: Domain
    prompt: str
    answer: str
    row: dict[str, Any]
    gold: bool
    response: str = ""  # an answer with reasoning, if there is one

    @property
    def lesson(self) -> str:
        """What is imitated: the reasoned answer, or the bare one."""
        return self.response or self.answer

    def judge(self, response: str, kind: RewardKind, mode: text_game.Mode) -> tuple[float, str]:
        """The reward of a response, and the reason if it is 0 because the response is unreadable."""
        if self.domain == "web-page":
            verdict = web_page.judge(response, self.answer, mode)
            return verdict.reward, verdict.reason
        if kind == "f1":
            raise ValueError("reward: f1 is of web pages; text games have binary and task_specific")
        if not self.row:
            raise ValueError("data: this row holds an answer to imitate but no state, so nothing can be judged by it")
        verdict = text_game.judge(response, Transition.from_row(self.row), kind, mode)
        return verdict.reward, verdict.reason


def read_pair(sample: dict[str, Any]) -> Question:
    """A sample of the pair kind as a question. Text games have a state in `extra.json`, web pages a change list as
    target.
    """
    extra, target = sample["extra.json"], sample["target.json"]
    prompt = sample["prompt.json"][-1]["content"]
    # public rows for imitation: the target is the reasoned answer
    if isinstance(target, str) and extra.get("source") == "llm_simulator":
        return Question("text-game", prompt, "", {}, True, response=target)
    if isinstance(target, str):
        changed = target != web_page.NOTHING
        return Question(
            "web-page",
            prompt,
            target,
            {"changed": changed},
            changed,
            extra.get("response") or extra.get("answer") or "",
        )
    state = extra["state"] if isinstance(extra["state"], dict) else json.loads(extra["state"])
    (*before, score), (*after, next_score) = state["game_state"], target["game_state"]
    row = {
        "game": extra.get("game", ""),
        "state_id": extra.get("state_id", 0),
        "current_state": {"objects": before},
        "tick_state": {"objects": after, "lastAction": extra.get("action", "")},
        "current_score_state": score,
        "next_score_state": next_score,
    }
    step = Transition.from_row(row)
    answer = f"{MARKER}{text_game.state_difference(step)!r}"
    return Question("text-game", prompt, answer, row, step.gold, extra.get("response", ""))


@lru_cache(maxsize=256)  # the samples of a group share it
def prompt_ids(tokenizer: Tokenizer, prompt: str, multiple: int = 1) -> tuple[int, ...]:
    """The prompt's ids, as one user's turn where the tokenizer has a chat template; padded in front to a multiple so
    that prompts of like length are decoded together."""
    ids = first_ids(tokenizer, prompt)
    return (*(tokenizer.pad_id,) * (-len(ids) % multiple), *ids)


def readable(tokenizer: Tokenizer, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """The text of sampled ids. A model may have more ids than its tokenizer; such an id shows as the replacement
    character.
    """
    runs = groupby(ids, key=lambda i: i < tokenizer.vocab_size)
    return "".join(tokenizer.decode(list(run), keep_special=keep_special) if known else "\ufffd" for known, run in runs)


class AnswerEpisode:
    """One sampled answer to one question."""

    def __init__(
        self,
        question: Question,
        prompt_id: int,
        sample_index: int,
        tokenizer: Tokenizer,
        *,
        kind: RewardKind,
        mode: text_game.Mode,
        multiple: int = 1,
    ) -> None:
        self.question, self.prompt_id, self.sample_index, self.tokenizer = question, prompt_id, sample_index, tokenizer
        self.kind: RewardKind = kind
        self.mode: text_game.Mode = mode
        self.ids = prompt_ids(tokenizer, question.prompt, multiple)
        self.response: str | None = None
        self.task, self.prompts = question, [question.prompt]

    @property
    def answers(self) -> list[str]:
        """The answer as the one of a conversation."""
        return [] if self.response is None else [self.response]

    def context(self) -> tuple[int, ...] | None:
        return self.ids if self.response is None else None

    def receive(self, sample: Sample) -> None:
        self.response = readable(self.tokenizer, sample.ids)

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        assert self.response is not None
        reward, reason = self.question.judge(self.response, self.kind, self.mode)
        return [reward], reward, {"reason": reason}


def answers(
    sampler: Sampler,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    params: SamplingParams,
    seed: int,
    multiple: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    chunk: int = 256,
) -> list[str | Invalid]:
    """One answer to every question; a fault of the sampler stays Invalid."""
    found: list[str | Invalid] = []
    for start in range(0, len(questions), chunk):
        part = questions[start : start + chunk]
        episodes = [
            AnswerEpisode(
                q,
                start + i,
                0,
                tokenizer,
                kind="f1" if q.domain == "web-page" else "binary",
                mode="strict",
                multiple=multiple,
            )
            for i, q in enumerate(part)
        ]
        done = rollout(sampler, episodes, params, seed)
        found += [
            t.reward if isinstance(t.reward, Invalid) else e.response or "" for e, t in zip(episodes, done, strict=True)
        ]
        progress(len(found))
    return found
