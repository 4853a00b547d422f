"""A user's reward or environment, run in a child process. A fault is Invalid, never a zero."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.by_path import local_imports, require_unchanged
from ...core.errors import ConfigError
from ...core.progress import say
from ...data.trajectory import Invalid
from ..environment import End, Prompt
from .process import ChildProcess, Late, Lost
from .wire import LARGEST_MESSAGE, digest, name_call, pack_in_host, unpack_in_host

GROUP = 8_000_000  # bytes of calls in one message, which the child reads completely before it answers
LOADING_S = 300.0  # for importing the user's code, making its object, and listing tasks
CHECKING_S = 30.0  # the same for `terrella check`, which should answer within a minute


@dataclass
class _Call:
    kind: str  # the method do_KIND of the child
    args: tuple[Any, ...]
    limit_s: float
    episode: int | None = None


@dataclass
class _Live:
    """A running episode, with what is needed to rebuild it in a fresh child."""

    task: Any
    answers: list[str] = field(default_factory=list)
    said: list[bytes] = field(default_factory=list)  # fingerprints of its prompts


class Host:
    """A reward function or an Environment by path, in a child process that is started on first use and after a kill.

    A call that misses its deadline, or during which the child dies, is Invalid with the reason. Later rows are scored
    in a fresh child; other live episodes are first rebuilt there by replaying their answers.
    """

    def __init__(
        self,
        target: str,
        base: Path,
        deadline_s: float,
        args: Mapping[str, Any] | None = None,
        sha256: str = "",
        loading_s: float = LOADING_S,
    ) -> None:
        self.target, self.base, self.deadline_s, self.loading_s = target, Path(base).resolve(), deadline_s, loading_s
        self.args, self.sha256 = dict(args or {}), sha256  # a class is called with args; the file must have this digest
        self.beside: dict[str, str] = {}  # digests of the modules that the first child found next to it
        # same string hashing in every child, so that a replay sees the same set order
        self.environ = {"PYTHONHASHSEED": "0", **os.environ}
        self.child: ChildProcess | None = None
        self.about: dict[str, Any] = {}  # what the child reported: environment, batched, concurrent, sha256
        self.live: dict[int, _Live] = {}
        self.present: set[int] = set()  # live episodes that the present child has
        self.warned = False  # a late call has been reported
        self.lock = threading.RLock()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def batched(self) -> bool:
        """Whether it is a reward that scores many rows in one call."""
        with self.lock:
            self._ensure()
            return bool(self.about["batched"])

    def require_reward(self) -> None:
        """Load it now; ConfigError if it cannot be loaded or is not a reward."""
        with self.lock:
            self._need(environment=False)

    def tasks(self, split: str) -> list[Any]:
        """All tasks of a split. Objects of user classes come as `Sealed`, to be passed back unopened."""
        tasks: list[Any] = []
        end = time.monotonic() + self.loading_s
        while True:
            if time.monotonic() > end:
                late = self._in_words(Late(), self.loading_s)
                self.close()
                raise ConfigError(f"{name_call(self.target, 'tasks')} {late}; {len(tasks):,} tasks had come")
            total, page = self._value("tasks", split, len(tasks))
            tasks += [unpack_in_host(blob) for blob in page]
            if len(tasks) >= total:
                return tasks

    def score(
        self, prompts: Sequence[Any], answers: Sequence[str], infos: Sequence[Any], max_invalid: float = math.inf
    ) -> list[End]:
        """One score per row. The deadline applies to each row, or to the one call of a batched function; once a call is
        lost and more than `max_invalid` rows are Invalid, the remaining calls are not made.
        """
        if not len(prompts) == len(answers) == len(infos):
            counts = f"{len(prompts)} prompts, {len(answers)} answers and {len(infos)} infos"
            raise ValueError(f"{counts}: a row needs one of each")
        with self.lock:
            self._need(environment=False)
            if not answers:
                return []
            if not self.about["batched"]:
                rows = [_Call("score", row, self.deadline_s) for row in zip(prompts, answers, infos, strict=True)]
                return [_score(reply) for reply in self._run(rows, max_invalid)]
            (reply,) = self._run([_Call("scores", (list(prompts), list(answers), list(infos)), self.deadline_s)])
            return [_score(row) for row in (reply[1] if reply[0] == "scores" else [reply] * len(answers))]

    def start(self, episode: int, task: Any) -> Prompt | End:
        """Start an episode under a number of the caller's choice; returns what `play(task)` yields first."""
        return self.start_many([(episode, task)])[0]

    def answer(self, episode: int, text: str) -> Prompt | End:
        """Send the model's answer: the next prompt, or the end with its score."""
        return self.answer_many([(episode, text)])[0]

    def start_many(self, items: Iterable[tuple[int, Any]], max_invalid: float = math.inf) -> list[Prompt | End]:
        """`start` for many episodes in one round trip, each with its own deadline; `max_invalid` as for `score`."""
        items = _distinct(items)
        with self.lock:
            self._need(environment=True)
            for episode, task in items:
                self.live[episode] = _Live(task)
                self.present.discard(episode)
            return self._play([_Call("start", item, self.deadline_s, item[0]) for item in items], max_invalid)

    def answer_many(self, items: Iterable[tuple[int, str]], max_invalid: float = math.inf) -> list[Prompt | End]:
        """`answer` for many episodes in one round trip, each with its own deadline; `max_invalid` as for `score`."""
        items = _distinct(items)
        with self.lock:
            for episode, _ in items:
                if episode not in self.live:
                    raise ValueError(f"episode {episode} is not going on: it has ended, or was never started")
            return self._play([_Call("answer", item, self.deadline_s, item[0]) for item in items], max_invalid)

    def forget(self, episodes: Iterable[int]) -> None:
        """Drop episodes that will not be continued."""
        with self.lock:
            gone = [episode for episode in episodes if self.live.pop(episode, None) and episode in self.present]
            self.present.difference_update(gone)
            if gone:
                self._run([_Call("forget", tuple(gone), self.deadline_s)])

    def demonstration(self, task: Any) -> str | list[str] | Invalid | None:
        """The answer to imitate, or one a turn; None where the environment has none."""
        return self._ask("demonstration", (task,), self.deadline_s)

    def baseline_names(self) -> list[str]:
        """The names of the environment's trivial policies."""
        return self._value("baselines")

    def baseline(self, name: str, prompt: Any, task: Any) -> str | Invalid:
        """What a trivial policy answers."""
        return self._ask("baseline", (name, prompt, task), self.deadline_s)

    def close(self) -> None:
        """End the child; a later call starts a new one."""
        with self.lock:
            self._kill()

    def _need(self, environment: bool) -> None:
        self._ensure()
        if self.about["environment"] is not environment:
            kinds = ("a reward function", "an Environment")
            raise ConfigError(f"{self.target} is {kinds[not environment]}, and {kinds[environment]} is needed here")

    def _ask(self, kind: str, args: tuple[Any, ...], limit_s: float) -> Any:
        with self.lock:
            self._need(environment=True)
            word, value = self._run([_Call(kind, args, limit_s)])[0]
        return value if word == "value" else Invalid(value)

    def _value(self, kind: str, *args: Any) -> Any:
        """The value of a call that must succeed."""
        value = self._ask(kind, args, self.loading_s)
        if isinstance(value, Invalid):
            raise ConfigError(value.reason)
        return value

    def _play(self, calls: list[_Call], max_invalid: float) -> list[Prompt | End]:
        return [reply[1] if reply[0] == "prompt" else _score(reply) for reply in self._run(calls, max_invalid)]

    def _run(self, calls: list[_Call], max_invalid: float = math.inf) -> list[tuple[Any, ...]]:
        """Replies to calls, in order. A call that loses the child is Invalid; later ones go to a new child."""
        replies: dict[int, tuple[Any, ...]] = {}
        packed = [pack_in_host(call.args) for call in calls]
        for number, (call, blob) in enumerate(zip(calls, packed, strict=True)):
            if len(blob) > LARGEST_MESSAGE:
                size = f"{len(blob):,} bytes; at most {LARGEST_MESSAGE:,} are carried"
                why = f"{name_call(self.target, call.kind)} would get {size}"
                self._record(call, number, ("invalid", why), replies)
        alone = False  # one call per message after a loss, to learn which of several concurrent rows caused it
        while len(replies) < len(calls):
            child = self._ensure()
            slack = 1.0 if self.about["concurrent"] else 0.0  # the child itself cancels async rows at the deadline
            unanswered = dict(enumerate(self._group(calls, packed, replies, alone)))
            try:
                message = pack_in_host([(call.kind, blob) for _, call, blob in unanswered.values()])
                child.send(message, self.deadline_s + 1.0)
                while unanswered:
                    first = next(iter(unanswered.values()))[1]
                    place, reply = child.receive(first.limit_s + slack)
                    if place not in unanswered:
                        raise Lost("wrote into descriptors that are not its own: an answer to no question")
                    number, call, _ = unanswered.pop(place)
                    self._record(call, number, reply, replies)
            except Lost as lost:
                self._kill(say_where=True)
                if self.about["concurrent"] and len(unanswered) > 1:
                    alone = True
                    continue
                number, call, _ = next(iter(unanswered.values()))
                why = f"{name_call(self.target, call.kind)} {self._in_words(lost, call.limit_s)}"
                if isinstance(lost, Late) and not self.warned:  # a step of late calls may take an hour
                    self.warned = True
                    skipped = max_invalid + 1 < len(calls)
                    end = f"; after {max_invalid + 1:g} the others are not waited for" if skipped else ""
                    say(f"{why}. Its sample is Invalid; later ones are only counted{end}")
                self._record(call, number, ("invalid", why), replies)
                if sum(word == "invalid" for word, *_ in replies.values()) > max_invalid:
                    why = f"not judged, after too many that were Invalid; the last: {why}"
                    for number, call in enumerate(calls):
                        self._record(call, number, ("invalid", why), replies)
            except BaseException:  # Ctrl-C: pending replies would be taken for those of the next calls
                self._kill()
                raise
        return [replies[number] for number in range(len(calls))]

    def _group(
        self, calls: list[_Call], packed: list[bytes], replies: dict[int, tuple[Any, ...]], alone: bool
    ) -> list[tuple[int, _Call, bytes]]:
        """The next calls that fit a message, each preceded by a replay of its episode if the child does not have it."""
        group: list[tuple[int, _Call, bytes]] = []
        size = 0
        for number, call in enumerate(calls):
            if number in replies:
                continue
            if group and (alone or size + len(packed[number]) > GROUP):
                break
            if call.kind == "answer" and call.episode is not None and call.episode not in self.present:
                live = self.live[call.episode]
                limit_s = call.limit_s * (1 + len(live.answers))
                replay = _Call("replay", (call.episode, live.task, live.answers), limit_s, call.episode)
                group.append((number, replay, pack_in_host(replay.args)))
                size += len(group[-1][2])
            group.append((number, call, packed[number]))
            size += len(packed[number])
        return group

    def _record(self, call: _Call, number: int, reply: tuple[Any, ...], replies: dict[int, tuple[Any, ...]]) -> None:
        """Store a reply and update its episode."""
        if number in replies:  # the call after a failed replay
            return
        if call.episode is None:
            replies[number] = reply
            return
        live = self.live[call.episode]
        if call.kind == "replay":
            if reply == ("replayed", live.said):
                self.present.add(call.episode)
                return
            reply = ("invalid", self._replay_fault(reply, live))
        replies[number] = reply
        if reply[0] != "prompt":
            del self.live[call.episode]
            self.present.discard(call.episode)
            return
        if call.kind == "answer":
            live.answers.append(call.args[1])
        live.said.append(digest(reply[1]))
        self.present.add(call.episode)

    def _replay_fault(self, reply: tuple[Any, ...], live: _Live) -> str:
        if reply[0] != "replayed":
            return f"{reply[1]} (in the replay of the episode in a fresh process, after another call's fault)"
        pairs = enumerate(zip(reply[1], live.said, strict=False))
        turn = next((number for number, (new, old) in pairs if new != old), len(reply[1]))
        where = f"gave another prompt in turn {turn + 1} when the episode was replayed in a fresh process"
        asked = "it must depend on the task and the answers alone (draw from random.Random(a seed in the task))"
        return f"{name_call(self.target, 'play')} {where}; {asked}"

    def _ensure(self) -> ChildProcess:
        """A child that has loaded the object; ConfigError if it cannot."""
        if self.child is not None and self.child.alive:
            return self.child
        self._kill()  # died between two calls: no call is to blame
        beside = local_imports(self.target, self.base)
        require_unchanged(self.beside, beside)  # later children must find the same modules
        self.beside = beside
        self.child = child = ChildProcess(self.environ, self.target)
        try:
            hello = (self.target, str(self.base), self.deadline_s, self.args, self.sha256)
            child.send(pack_in_host(hello), self.loading_s)
            word, value = child.receive(self.loading_s)
        except Lost as lost:
            self._kill(say_where=True)
            raise ConfigError(f"{self.target}: loading it {self._in_words(lost, self.loading_s)}") from lost
        except BaseException:
            self._kill()
            raise
        if word == "failed":
            self._kill()
            raise ConfigError(value)
        self.about, self.sha256 = value, value["sha256"]  # later children must find the same file
        return child

    def _in_words(self, lost: Lost, limit_s: float) -> str:
        """Why a call was lost; if it was late, with the setting to raise, or the limit of a start."""
        if not isinstance(lost, Late):
            return str(lost)
        longer = (
            " (deadline_s)"
            if limit_s != self.loading_s
            else f" (a start waits {LOADING_S:g} s)"
            if limit_s < LOADING_S
            else ""
        )
        return f"did not finish within {limit_s:g} s{longer}; its process was killed"

    def _kill(self, say_where: bool = False) -> None:
        child, self.child = self.child, None
        self.present.clear()
        if child is not None:
            child.kill(say_where)


def _distinct(items: Iterable[tuple[int, Any]]) -> list[tuple[int, Any]]:
    items = list(items)
    if len({episode for episode, _ in items}) < len(items):
        raise ValueError("an episode is named twice in one call")
    return items


def _score(reply: tuple[Any, ...]) -> End:
    return End(reply[1], dict(reply[2])) if reply[0] == "score" else End(Invalid(reply[1]))
