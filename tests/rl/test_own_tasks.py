"""Rows of one's own data as tasks: what would end a run in its middle is refused before its first stage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from terrella.core.by_path import ByPath, OwnFile
from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.conversation import Scripted
from terrella.rl.own.config import DataEnvironment
from terrella.rl.own.tasks import DataTasks, load_rows, open_tasks
from terrella.rl.rollout.sampler import SamplingParams
from terrella.rl.rollout.stream import Stream
from terrella.rl.tasks import Tasks

Change = Callable[[list[dict[str, Any]]], None]


@contextmanager
def tasks_of(
    folder: Path, change: Change = lambda rows: None, max_length: int = 64, **settings: Any
) -> Iterator[DataTasks]:
    """Ten rows, of which the tenth is held out, changed by a function."""
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(10)]
    change(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_rows.cache_clear()  # a run's rows never change
    named = {"train": OwnFile(str(folder / "rows.jsonl")), "reward": "exact"} | settings
    with open_tasks(DataEnvironment("data", **named), ByteTokenizer(), max_length) as tasks:
        assert isinstance(tasks, DataTasks)
        tasks.stage = "rl"
        yield tasks


def spoil(rows: list[dict[str, Any]]) -> None:
    rows[4]["answer"] = ""
    rows[7]["prompt"] = "x" * 90


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [
        ("exact", None, r"rows\.jsonl:3: the row has no true answer to compare with; name its column"),
        ("contains", "", r"rows\.jsonl:3: the true answer is empty"),
        ("number", "four", r"rows\.jsonl:3: the true answer 'four' holds no number; .* \(and 1 more row\)"),
    ],
)
def test_every_true_answer_can_be_compared_before_the_start(
    tmp_path: Path, reward: str, answer: str | None, message: str
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[2]["answer"] = answer
        rows[5]["answer"] = "four"

    with tasks_of(tmp_path, change, reward=reward) as tasks:
        tasks.require_judge("test", 1)
        with pytest.raises(ConfigError, match=f"env.reward = {reward}: .*{message}"):
            tasks.require_judge("train", 1)


def test_every_row_is_measured_before_the_start(tmp_path: Path) -> None:
    with tasks_of(tmp_path, spoil) as tasks:
        numbers = r"rows\.jsonl:8: its prompt has 90 tokens, .*stages\.rl\.max_new_tokens = 4 .*max_positions = 64;"
        for split in ("train", None):
            with pytest.raises(ConfigError, match=numbers):
                tasks.require_room(4, split)
        tasks.require_room(4, "test")
        with pytest.raises(ConfigError, match=r"^here: .*rows\.jsonl:5: has no answer to imitate.*; .*env\.answer"):
            tasks.require_lessons("here")
        with pytest.raises(ConfigError, match="max_new_tokens: answers of this environment may have any length"):
            tasks.require_room(None)
    with tasks_of(tmp_path, spoil, max_length=94) as tasks:
        tasks.require_room(4)  # it just fits
        with pytest.raises(ConfigError, match=r"rows\.jsonl:8: "):
            tasks.require_room(5)


def test_a_held_out_row_need_not_be_imitated_and_others_are_counted(tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[9] |= {"prompt": "y" * 80, "answer": ""}

    with tasks_of(tmp_path, change) as tasks:
        tasks.require_lessons("here")
        tasks.require_room(4, "train")
        with pytest.raises(ConfigError, match=r"rows\.jsonl:10: "):
            tasks.require_room(4, "test")

    def longer(rows: list[dict[str, Any]]) -> None:
        for number in (2, 5, 6):
            rows[number]["answer"] = "z" * (60 + number)

    with tasks_of(tmp_path, longer) as tasks:
        said = "rows.jsonl:3: prompt and answer have 67 tokens, model.max_positions is 64 (and 2 more rows)"
        with pytest.raises(ConfigError, match=re.escape(said)):
            tasks.require_lessons("here")
    with tasks_of(tmp_path, longer, max_length=67) as tasks:
        with pytest.raises(ConfigError, match=re.escape("rows.jsonl:6: prompt and answer have 70 tokens")):
            tasks.require_lessons("here")


def test_a_chat_is_measured_as_the_model_reads_it(tmp_path: Path) -> None:
    with tasks_of(tmp_path, system="Say the sum.") as tasks:
        read = len(tasks.lessons(tasks.of("train")[:1], "here")[0][0].ids) - 2  # without the answer and its end
        tasks.max_length = read + 4
        tasks.require_room(4)
        with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: its prompt has {read} tokens.*\(and 9 more rows\)"):
            tasks.require_room(5)


def test_only_rows_that_may_not_fit_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    class Counting(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(text)
            return super().encode(text)

    with tasks_of(tmp_path, spoil, max_length=1024 + 64 + 90) as tasks:
        monkeypatch.setattr(tasks, "tokenizer", Counting())
        tasks.require_room(4)
    assert encoded == ["x" * 90]


def test_a_prompt_that_is_too_long_in_play_is_named_by_its_task(tmp_path: Path) -> None:
    with tasks_of(tmp_path, spoil) as tasks:
        talks = [tasks.episode(task, number, 0) for number, task in enumerate(tasks.of("train"))]
        with pytest.raises(
            ConfigError,
            match=r"a prompt of 90 tokens .* lower max_new_tokens, .* of task .*rows\.jsonl:8, and begins with 'xxx",
        ):
            tasks.play(Scripted(tasks.tokenizer, lambda number, turn: "1"), talks, SamplingParams(4), 0)


def test_an_environment_is_asked_for_its_first_demonstration_alone() -> None:
    asked: list[Any] = []

    class Listed(Tasks):
        def of(self, split: Any) -> list[str]:
            return ["a", "b"]

        def lessons(self, tasks: Any, where: str) -> list[Any]:
            asked.append((list(tasks), where))
            return []

    Listed(ByteTokenizer(), 64).require_lessons("here")
    assert asked == [(["a"], "here")]


@pytest.mark.parametrize(("ranks", "streamed", "judged"), [(1, False, 3), (2, False, 5), (4, False, 8), (1, True, 3)])
def test_a_reward_that_dies_is_called_until_the_step_cannot_be_saved(
    tmp_path: Path, ranks: int, streamed: bool, judged: int
) -> None:
    """A quarter may be Invalid of the 8 samples of this rank and, of every other, 9: a task more."""
    (tmp_path / "dies.py").write_text("import os\ndef score(prompt, answer, info): os._exit(3)\n")
    with tasks_of(tmp_path, reward=ByPath(str(tmp_path / "dies.py:score"))) as tasks:
        tasks.max_invalid_share, tasks.ranks = 0.25, ranks
        sampler = Scripted(tasks.tokenizer, lambda prompt, turn: "2")
        stream = Stream(sampler) if streamed else None
        episodes = [tasks.episode(row, i, 0) for i, row in enumerate(tasks.of("train")[:8])]
        played = tasks.play(stream or sampler, episodes, SamplingParams(4), 0)
        if stream is not None:
            stream.close()
    reasons = [t.reward.reason for t in played]
    assert all("ended its process with exit code 3" in reason for reason in reasons), reasons
    left = sum("not judged, after too many" in reason for reason in reasons)
    # those of a stream come in parts, and what is asked meanwhile does not know of the last part yet
    assert 0 < left <= 8 - judged if streamed else left == 8 - judged, reasons
