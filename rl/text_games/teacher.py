"""Reasoned answers from a teacher behind an OpenAI-compatible address: kept where the judge says they are right, cut by
length.

A fault of the line is Invalid after a few tries and never counts as a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...core.errors import StorageError
from ...core.files import storage_errors, write_atomic
from ...core.rng import uniform
from ...data.trajectory import Invalid
from ..chat_completion import NO_ANSWER, complete
from ..language import Question

PART = 64  # answers that are waited for together
REASONING = ("reasoning_content", "reasoning")  # where servers put what was thought before the answer


@dataclass(frozen=True)
class Teacher:
    """A chat model behind an address such as http://host:8000/v1."""

    url: str
    model: str
    key: str = ""
    system: str = "You are a helpful assistant."
    temperature: float = 0.6
    max_tokens: int = 4096
    timeout_s: float = 600.0
    tries: int = 3
    pause_s: float = 2.0
    together: int = 8  # requests in flight

    def ask(self, prompt: str) -> str | Invalid:
        """Reasoning and answer as one text, the way they are imitated; Invalid when the line failed every time."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat([*messages, {"role": "user", "content": prompt}])

    def chat(self, messages: list[dict[str, str]]) -> str | Invalid:
        """The next message of a chat, as `ask` gives it."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        reason = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                message = complete(self.url, body, self.key, self.timeout_s)
                thought = next((message[name] for name in REASONING if message.get(name)), "")
                return f"{thought}{message.get('content') or ''}"
            except urllib.error.HTTPError as error:
                reason = f"{self.url}: HTTP {error.code}"
                if error.code < 500 and error.code not in (408, 429):
                    break  # asking again does not help
            except NO_ANSWER as error:
                reason = f"{self.url}: {type(error).__name__}: {error}"
        return Invalid(reason)

    def ask_all(self, prompts: Sequence[str]) -> list[str | Invalid]:
        """Answers in the order of the prompts, several requests at a time."""
        with ThreadPoolExecutor(self.together) as pool:
            return list(pool.map(self.ask, prompts))

    def ask_once(self, prompts: Sequence[str], record: Path) -> Iterator[str | Invalid]:
        """The same, one after the other and each paid for once: what was answered is in `record` at once, and is not
        asked again.
        """
        known: dict[str, str] = {}
        if record.exists():
            with storage_errors(record):
                lines = record.read_bytes().split(b"\n")
            known = dict(_answer_in(line, f"{record}:{number}") for number, line in enumerate(lines[:-1], 1))
            if lines[-1]:  # torn by a kill
                write_atomic(record, b"".join(line + b"\n" for line in lines[:-1]).decode())
        ids = [hashlib.sha256(f"{self.model}\n{self.system}\n{prompt}".encode()).hexdigest()[:32] for prompt in prompts]
        with record.open("a", encoding="utf-8") as file:
            for start in range(0, len(prompts), PART):
                part = range(start, min(start + PART, len(prompts)))
                missing = [i for i in part if ids[i] not in known]
                faults: dict[int, Invalid] = {}
                for i, response in zip(missing, self.ask_all([prompts[i] for i in missing]), strict=True):
                    if isinstance(response, Invalid):
                        faults[i] = response
                        continue
                    known[ids[i]] = response
                    file.write(json.dumps({"id": ids[i], "response": response, "sum": _sum(ids[i], response)}) + "\n")
                file.flush()
                os.fsync(file.fileno())
                yield from (faults[i] if i in faults else known[ids[i]] for i in part)


def _sum(key: str, response: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{key}\n{response}".encode("utf-8", "surrogatepass"))


def _answer_in(line: bytes, place: str) -> tuple[str, str]:
    """Question and answer of a line of the record. They were paid for, so a damaged line is never dropped without a
    word.
    """
    try:
        row = json.loads(line)
        key, response = row["id"], row["response"]
        if (
            not isinstance(key, str)
            or not isinstance(response, str)
            or ("sum" in row and row["sum"] != _sum(key, response))
        ):
            raise ValueError("its checksum does not match")
        if row.keys() - {"id", "response", "sum"}:
            raise ValueError(f"its keys are {', '.join(row)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(
            f"{place}: damaged ({error}); restore the line, or delete it and its question is asked again"
        ) from error
    return key, response


@dataclass
class Harvest:
    """What became of the teacher's answers."""

    asked: int = 0
    kept: int = 0
    wrong: int = 0
    too_long: int = 0
    left_out: int = 0  # right, but of a row without changes
    invalid: int = 0


def reasoned_samples(
    pairs: Iterable[tuple[dict[str, Any], Question]],
    responses: Iterable[str | Invalid],
    length: Callable[[str], int],
    harvest: Harvest,
    *,
    max_tokens: int = 4000,
    keep_unchanged: float = 0.01,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Samples to imitate: right answers to gold rows, a small share of right answers to others, none above
    `max_tokens`.

    `pairs` are samples of the pair kind with their questions; the response goes into `extra.json` as `response`.
    """
    for number, ((sample, question), response) in enumerate(zip(pairs, responses, strict=True)):
        harvest.asked += 1
        if isinstance(response, Invalid):
            harvest.invalid += 1
        elif question.judge(response, "f1" if question.domain == "web-page" else "binary", "strict")[0] < 1.0:
            harvest.wrong += 1
        elif length(response) > max_tokens:
            harvest.too_long += 1
        elif not question.gold and uniform(seed, number) >= keep_unchanged:
            harvest.left_out += 1
        else:
            harvest.kept += 1
            yield {**sample, "extra.json": {**sample["extra.json"], "response": response}}
