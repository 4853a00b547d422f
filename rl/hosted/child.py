"""The child process of a host: loads the user's reward or environment and executes calls.

It imports no torch unless the user's code does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.by_path import file_digest, load_object
from ...core.errors import ConfigError
from ...core.process import die_with_parent
from ...data.trajectory import Invalid
from .checks import Fault, check_prompt, normal_score
from .wire import LARGEST_MESSAGE, ChildWire, digest, name_call, pack_in_child, show, unpack_in_child

AT_ONCE = 64  # rows of an async reward that run at a time
PAGE = 8_000_000  # bytes of tasks in one message
MOST_TASKS = 10_000_000  # per split: an endless generator would fill the memory
Reply = tuple[Any, ...]  # ("score", reward, parts), ("prompt", said), ("value", any) ... or ("invalid", reason)


class Child:
    """The user's object and its live episodes. A method `do_X` executes the call X."""

    def __init__(self, target: str, base: Path, deadline_s: float) -> None:
        self.target, self.base, self.deadline_s = target, base, deadline_s
        self.folder = base  # of the user's code: the source of an error is reported relative to it
        self.object: Any = None
        self.batched = self.concurrent = False
        self.episodes: dict[int, Any] = {}
        self.listed: dict[str, list[Any]] = {}
        self.runner = asyncio.Runner()

    def load(self, args: dict[str, Any], sha256: str) -> dict[str, Any]:
        """Import and create the user's object; returns what the host must know about it."""
        sha256 = sha256 or file_digest(self.target, self.base)
        self.object = load_object(self.target, self.base, sha256)
        source = getattr(sys.modules.get(self.object.__module__), "__file__", None)
        self.folder = Path(source).parent if source else self.base
        if isinstance(self.object, type):
            self.object = self.object(**args)
        elif args:
            raise ConfigError(f"{self.target} is a function, and takes no arguments from the recipe: {', '.join(args)}")
        environment = hasattr(self.object, "play")
        if not environment:
            self._check_reward()
        return {"environment": environment, "batched": self.batched, "concurrent": self.concurrent, "sha256": sha256}

    def _check_reward(self) -> None:
        try:
            taken = inspect.signature(self.object)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.target} is neither an Environment (it has no play) nor a function") from error
        try:
            self.batched = "prompts" in taken.parameters
            names = ("prompts", "answers", "infos") if self.batched else ("prompt", "answer", "info")
            taken.bind(**dict.fromkeys(names))
        except TypeError as error:
            asked = "a reward takes (prompt, answer, info), or (prompts, answers, infos)"
            raise ConfigError(
                f"{self.target}{taken}: {asked}; an Environment is a class with the method play"
            ) from error
        call = self.object if inspect.isroutine(self.object) else type(self.object).__call__
        self.concurrent = inspect.iscoroutinefunction(call) and not self.batched

    def reason(self, error: BaseException, kind: str) -> str:
        """Why there is no result: the function, its error, and the line of user code that it came from."""
        name = name_call(self.target, kind)
        if isinstance(error, Fault):
            return f"{name} {error}"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        folder = f"{self.folder}{os.sep}"
        own = [f for f in frames if f.filename.startswith(folder) and "site-packages" not in f.filename] or frames[:1]
        where = f" at {own[-1].filename.removeprefix(folder)}:{own[-1].lineno}" if own else ""
        try:
            text = " ".join(str(error).split())[:300]
        except BaseException:
            text = "(its text cannot be shown)"
        return f"{name} raised {type(error).__name__}{': ' if text else ''}{text}{where}"

    def finish(self, made: Any) -> Any:
        """The result of a call of user code, awaited if it is a coroutine."""
        return self.runner.run(self.within_deadline(made)) if inspect.iscoroutine(made) else made

    async def within_deadline(self, made: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's value; at the deadline it is cancelled, so that the process need not be killed."""
        task = asyncio.ensure_future(made)
        done, _ = await asyncio.wait([task], timeout=self.deadline_s)
        if not done:
            task.cancel()  # not awaited: it may refuse to end
            raise Fault(f"did not finish within {self.deadline_s:g} s (deadline_s)")
        return task.result()

    def scored(self, value: Any) -> Reply:
        """The reply with a score; Fault if it is not one."""
        score = normal_score(value)
        return ("invalid", str(score.reason)) if isinstance(score, Invalid) else ("score", *score)

    def do_score(self, prompt: Any, answer: str, info: Any) -> Reply:
        return self.scored(self.finish(self.object(prompt=prompt, answer=answer, info=info)))

    def do_scores(self, prompts: list[Any], answers: list[str], infos: list[Any]) -> Reply:
        given = self.finish(self.object(prompts=prompts, answers=answers, infos=infos))
        listed = hasattr(given, "__len__") and hasattr(given, "__iter__")
        if not listed or isinstance(given, str | bytes | dict | set | frozenset):  # a set has lost the order
            raise Fault(f"gave {show(given)} ({type(given).__name__}); a batched reward gives a list of scores")
        if len(given) != len(answers):
            raise Fault(f"gave {len(given)} scores for {len(answers)} answers")
        rows: list[Reply] = []
        for place, value in enumerate(given):
            try:
                rows.append(self.scored(value))
            except Fault as error:
                rows.append(("invalid", f"{self.target}: answer {place} of {len(answers)}: {error}"))
        return ("scores", rows)

    def do_start(self, episode: int, task: Any) -> Reply:
        self.episodes.pop(episode, None)
        playing = self.object.play(task)
        if not inspect.isgenerator(playing):
            given = f"{show(playing)} ({type(playing).__name__})"
            raise Fault(f"gave {given}; it must be a generator, which yields what is said to the model")
        try:
            said = check_prompt(next(playing), first=True)
        except StopIteration as ended:
            raise Fault(f"returned {show(ended.value)} before it yielded a first prompt") from ended
        self.episodes[episode] = playing
        return ("prompt", said)

    def do_answer(self, episode: int, text: str) -> Reply:
        playing = self.episodes.pop(episode)
        try:
            said = check_prompt(playing.send(text), first=False)
        except StopIteration as ended:
            return self.scored(ended.value)
        self.episodes[episode] = playing
        return ("prompt", said)

    def do_replay(self, episode: int, task: Any, answers: list[str]) -> Reply:
        """Replay an episode up to its last prompt; returns fingerprints of the prompts."""
        replies = [self.do_start(episode, task)]
        for text in answers:
            replies.append(self.do_answer(episode, text))
            if replies[-1][0] != "prompt":
                break
        return ("replayed", [digest(said) if kind == "prompt" else b"" for kind, said, *_ in replies])

    def do_forget(self, *episodes: int) -> Reply:
        for episode in episodes:
            self.episodes.pop(episode, None)
        return ("value", None)

    def do_tasks(self, split: str, first: int) -> Reply:
        """The number of tasks, and a page of them from `first` on, each packed separately."""
        if split not in self.listed:
            self.listed[split] = list(islice(self.object.tasks(split), MOST_TASKS + 1))
            if len(self.listed[split]) > MOST_TASKS:
                raise Fault(
                    f"gave more than {MOST_TASKS:,} tasks for '{split}'; give a list of fewer, or stop the generator"
                )
        page: list[bytes] = []
        size = 0
        for place in range(first, len(self.listed[split])):
            try:
                blob = pack_in_child(self.listed[split][place])
            except Exception as error:
                raise Fault(f"gave task {place}, which cannot be pickled: {error}") from error
            if len(blob) > LARGEST_MESSAGE:
                largest = f"{len(blob):,} bytes; at most {LARGEST_MESSAGE:,} are carried"
                raise Fault(f"gave task {place} of {largest}: name a file in the task instead of holding its contents")
            size += len(blob)
            if page and size > PAGE:
                break
            page.append(blob)
        return ("value", (len(self.listed[split]), page))

    def do_demonstration(self, task: Any) -> Reply:
        given = self._optional("demonstration", task)
        listed = isinstance(given, list) and all(isinstance(answer, str) for answer in given)
        if given is not None and not isinstance(given, str) and not listed:
            raise Fault(f"gave {show(given)} ({type(given).__name__}); it is a str, or a list of str, one a turn")
        return ("value", given)

    def do_baselines(self) -> Reply:
        return ("value", list(self._baselines()))

    def do_baseline(self, name: str, prompt: Any, task: Any) -> Reply:
        answer = self._baselines()[name](prompt, task)
        if not isinstance(answer, str):
            raise Fault(f"{name!r} gave {show(answer)} ({type(answer).__name__}); an answer is a str")
        return ("value", answer)

    def _baselines(self) -> dict[str, Callable[..., Any]]:
        given = self._optional("baselines") or {}
        if not isinstance(given, dict) or not all(isinstance(n, str) and callable(f) for n, f in given.items()):
            asked = "a dict of names and functions (prompt, task) -> str"
            raise Fault(f"gave {show(given)} ({type(given).__name__}); it is {asked}")
        return given

    def _optional(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.object, method)(*args) if hasattr(self.object, method) else None
        except NotImplementedError:
            return None

    def do(self, kind: str, packed: bytes) -> Reply:
        """Execute one call; whatever user code does, short of ending the process, becomes a reply."""
        try:
            return getattr(self, f"do_{kind}")(*unpack_in_child(packed))
        except BaseException as error:
            return ("invalid", self.reason(error, kind))

    async def score_together(self, rows: list[bytes], reply: Callable[[int, Reply], None]) -> None:
        """Score rows of an async reward, a few at a time; each reply is sent when it is ready."""
        free = asyncio.Semaphore(AT_ONCE)

        async def one(place: int, row: bytes) -> None:
            async with free:
                try:
                    prompt, answer, info = unpack_in_child(row)
                    made = self.object(prompt=prompt, answer=answer, info=info)
                    scored = self.scored(await self.within_deadline(made))
                except Exception as error:
                    scored = ("invalid", self.reason(error, "score"))
                reply(place, scored)

        await asyncio.gather(*(one(place, row) for place, row in enumerate(rows)))


def serve(descriptor: int, parent: int) -> None:
    """Execute the host's calls until it closes the connection or dies."""
    die_with_parent(parent)
    os.dup2(2, 1)  # output of user code goes to the host, and from there to the log
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1)  # before a late child is killed it dumps its stack to the log
    wire = ChildWire(descriptor)
    hello = wire.receive()
    if hello is None:
        return
    target, base, deadline_s, args, sha256 = unpack_in_child(hello)
    child = Child(target, Path(base), deadline_s)
    try:
        wire.send(pack_in_child(("ready", child.load(args, sha256))))
    except BaseException as error:
        why = str(error) if isinstance(error, ConfigError) else child.reason(error, "score")
        wire.send(pack_in_child(("failed", why)))
        return
    while (message := wire.receive()) is not None:
        calls = unpack_in_child(message)  # (kind, packed arguments) each
        if child.concurrent and all(kind == "score" for kind, _ in calls):
            rows = [packed for _, packed in calls]
            child.runner.run(child.score_together(rows, lambda place, answer: wire.reply(place, answer, target)))
        else:
            for place, (kind, packed) in enumerate(calls):
                wire.reply(place, child.do(kind, packed), target)
