"""The interface between the stages collect, sft, rl and eval and an environment that was opened for one of them.
Environments of text inherit most of it.

Stages contain no code or setting for a particular environment; whatever differs between environments is a method here.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..core.batch import PackedBatch
from ..core.errors import ConfigError, LengthError
from ..core.mesh import Mesh
from ..core.rng import permutation, shuffled
from ..data.schema import TEXT
from ..data.tokenizers import Tokenizer
from ..data.trajectory import Invalid, Role, TokenSequence, Trajectory
from .conversation import Conversation, Conversations, EpisodeHost, Scripted, shown, text_of
from .environment import Prompt, Split
from .evaluation import TEST, TRUTH, Evaluation, Results, picture, reward_results, spread
from .rollout.sampler import Sampler, SamplingParams

Scorer = Callable[[list[PackedBatch]], list[Any]]  # log-probs of packed rows
Gather = Callable[[Any], list[Any]]  # a value of every data rank, as a list
EMPTY = "empty answer"
CUT = 0x637574  # the key of the draw of tasks to validate on


@dataclass(frozen=True)
class Lesson:
    """A sequence to imitate; tokens to learn have the role ACTION or STATE."""

    sequence: TokenSequence
    fields: dict[str, Any]  # further fields of its sample of kind TEXT
    held_out: bool
    learn: bool = True  # False: kept only for stages that also learn from failures


def held_out(name: str, share: float) -> bool:
    """Whether this episode is held out for validation; all turns of an episode get the same answer."""
    return random.Random(name).random() < share


class Tasks(ABC):
    """Tasks of both splits, how they are played, imitated and shown, and trivial policies to compare a model with."""

    free_text: ClassVar[bool] = True  # answers are free text: their length and repetition are watched
    shows_turns: ClassVar[bool] = True  # the report shows episodes of RL turn by turn
    evaluation_key: ClassVar[int] = 3  # of the random numbers that an evaluation draws
    lesson_tokens: int | None = None  # tokens that each demonstration teaches, if the same for all
    collection_key: ClassVar[int] = 4  # and a stage that collects
    # entries of `tally` that RL records in every step, to compare the cost of models
    counted: tuple[str, ...] = ()
    stage: str = ""  # the name of the stage it was opened for
    seed: int = 0  # of the recipe
    ranks: int = 1  # data ranks that play at once, each its share of the episodes
    max_invalid_share: float = 1.0  # share of Invalid episodes over all ranks, above which none is used
    imagined_by: str | None = None  # the stage whose model plays the world of training tasks
    imagination: Sampler | None = None  # that model, once a stage has loaded it

    def __init__(self, tokenizer: Tokenizer, max_length: int | None, max_turns: int = 100) -> None:
        self.tokenizer, self.max_length, self.max_turns = tokenizer, max_length, max_turns
        self.pad_id: int = tokenizer.pad_id  # for prompts; never learnt

    def episode_host(self) -> EpisodeHost:
        """What plays this environment's conversations; environments with another kind of episode override `play`."""
        raise NotImplementedError(f"{type(self).__name__}: has no conversations")

    @cached_property
    def conversations(self) -> Conversations:
        """The conversations of this environment."""
        return Conversations(self.episode_host(), self.tokenizer, self.max_turns, self.max_length)

    @abstractmethod
    def of(self, split: Split) -> Sequence[Any]:
        """The tasks of a split."""

    def why_empty(self, split: Split) -> str:
        """Why a split has no task and what to change, if the environment knows."""
        return ""

    def chosen(self, n: int) -> list[Any]:
        """The training tasks of a stage that collects n of them: the first n."""
        train = self.of("train")
        return [train[place % len(train)] for place in range(n)]

    def keep(self, folder: Path, chosen: Sequence[Any]) -> None:
        """Record what stages after a collection of these tasks need to know about them; called on one rank."""
        return

    def recorded(self) -> tuple[list[Any], list[Trajectory]] | None:
        """Existing episodes and trajectories that take the place of demonstrations; None if tasks are played."""
        return None

    def facts(self) -> dict[str, Any]:
        """Facts about the tasks for the outcome of an RL stage."""
        return {}

    def reset(self, split: Split) -> None:
        """Reset what the tasks act on before a stage plays; called on one rank."""
        return

    def judged(self) -> bool:
        """Whether episodes get a score; environments judge their own."""
        return True

    def require_judge(self, split: Split, samples: int) -> None:
        """Check before the run starts that everything needed to judge a split is there, such as a metric's weights."""
        return None

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        """The training task at a place of the endless stream, which skips those in `without`."""
        used = self.remaining(without)
        return lambda place: used[shuffled(len(used), seed, place)]

    def remaining(self, without: Collection[int]) -> list[int]:
        """The numbers of all training tasks except these."""
        left_out = set(without)
        return [number for number in range(len(self.of("train"))) if number not in left_out]

    def numbers(self, seed: int) -> Sequence[int]:
        """The numbers of all training tasks; those used for validation come last."""
        return permutation(len(self.of("train")), seed, CUT)

    def some(self, n: int) -> list[Any]:
        """At most n held-out tasks, spread evenly."""
        return spread(self.of("test"), n)

    def params(self, max_new_tokens: int | None, temperature: float) -> SamplingParams:
        """How answers are sampled."""
        if max_new_tokens is None:
            raise ConfigError(
                "max_new_tokens: answers of this environment may have any length; give the stage this limit"
            )
        return SamplingParams(max_new_tokens, temperature, stop_ids=self.tokenizer.stop_ids)

    def require_room(self, max_new_tokens: int | None, split: Split | None = None) -> None:
        """Refuse answers too long to fit the model after the prompts of a split, or of both, if prompt lengths are
        known.
        """
        return

    def episode(self, task: Any, prompt_id: int, sample_index: int) -> Any:
        """One sample of a task, ready to be played."""
        return Conversation(task, prompt_id, sample_index)

    def imagined(self, task: Any) -> Any:
        """The same task in the world imagined by the stage `imagined_by`."""
        raise NotImplementedError(f"{type(self).__name__}: no model plays its world")

    def play(self, sampler: Sampler, episodes: Sequence[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        """Play episodes to their end."""
        samples = 1 + max((episode.sample_index for episode in episodes), default=0)
        whole = len(episodes) + (self.ranks - 1) * (len(episodes) + samples)  # others may have one task more
        return self.conversations.converse(sampler, episodes, params, seed, math.floor(self.max_invalid_share * whole))

    def measures(self, trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, float]:
        """What is recorded of a step's episodes besides the reward: means of the other numbers of their scores."""
        valid = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
        infos = [info for part in gather(valid) for info in part]
        names = dict.fromkeys(name for info in infos for name in info)
        return {
            f"score/{name}": sum(i[name] for i in infos if name in i) / sum(name in i for i in infos) for name in names
        }

    def scores(self, trajectories: Sequence[Trajectory], samples: int) -> dict[str, float]:
        """The values of a validation on held-out tasks, with this many samples of each: the mean reward."""
        rewards = [t.reward for t in trajectories if not isinstance(t.reward, Invalid)]
        return {"mean": sum(rewards) / len(rewards)} if rewards else {}

    def actions(self, trajectories: Sequence[Trajectory]) -> int:
        """Actions taken in valid episodes; an answer is one."""
        return sum(len(t.turn_rewards) for t in trajectories if not isinstance(t.reward, Invalid))

    def tally(self, trajectories: Sequence[Trajectory]) -> dict[str, int]:
        """Counts over a step's episodes, for an RL stage."""
        return {"actions": self.actions(trajectories)}

    def progress(self, values: dict[str, Any]) -> str:
        """A step's record in a few words."""
        return f"reward {values['reward/mean']:.3f}"

    def shown(self, episode: Any) -> list[dict[str, Any]]:
        """The turns of a played episode, as the report shows them."""
        return shown(episode, self.tokenizer)

    def step_tables(self, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Tables, by name, of the record that the steps of the RL stage `name` left."""
        return {}

    def pictures(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """A few played episodes as the report shows them."""
        return picture(0, episodes, played, self.shown)

    def player(self, episodes: Sequence[Any]) -> Sampler:
        """What plays if no model does: the demonstrations."""
        answers = {episode.prompt_id: self._required(episode.task, "model") for episode in episodes}
        return Scripted(
            self.tokenizer, lambda number, turn: answers[number][turn] if turn < len(answers[number]) else ""
        )

    def taught(self, episode: Any, trajectory: Trajectory, held_out_share: float) -> list[Lesson]:
        """What to imitate of a valid episode: all its answers."""
        aside = held_out(f"{episode.prompt_id}/{episode.sample_index}", held_out_share)
        asked = [{"role": "user", "content": text_of(prompt)} for prompt in episode.prompts]
        said = [{"role": "assistant", "content": answer} for answer in episode.answers]
        fields = {
            "messages.json": [message for turn in zip(asked, said, strict=False) for message in turn],
            "meta.json": {
                "schema": TEXT,
                "task": str(episode.task)[:200],
                "sample": episode.sample_index,
                "reward": trajectory.reward,
            },
        }
        return [Lesson(sequence, fields, aside) for sequence in trajectory.sequences]

    def counts(self, episodes: Sequence[Any], trajectories: Sequence[Trajectory]) -> dict[str, int]:
        """Counts over valid episodes, for a stage that collects them."""
        return {"actions": self.actions(trajectories)}

    def shares(self, counts: dict[str, int]) -> dict[str, float]:
        """Shares computed from the summed counts of all ranks."""
        return {}

    def parts(self, n: int) -> dict[str, list[Any]]:
        """What an evaluation plays: held-out tasks by the name of their part, n of the test split at most."""
        return {TEST: self.some(n)}

    def shown_as(self, model: str, temperature: float, part: str) -> str | None:
        """The name of an evaluation's episodes in the report; None where they are not shown."""
        return f"{model}-t{temperature:g}"

    def judgements(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[Any]:
        """What an evaluation keeps of each episode for its tables: the reward. It is sent between ranks."""
        return [trajectory.reward for trajectory in played]

    def probe(self, score: Scorer, tasks: Sequence[Any]) -> Any:
        """What an evaluation measures by log-probs, besides playing the tasks of a part; called on every rank."""
        return None

    def results(self, evaluation: Evaluation) -> Results:
        """The tables, numbers and summary of an evaluation; called on the main rank alone."""
        return reward_results(evaluation, self._judged_baselines)

    def _judged_baselines(self, tasks: list[Any]) -> dict[str, list[list[Any]]]:
        """What trivial policies score on each task, and the demonstrations where every task has one."""
        played = {name: self.baseline(policy, tasks) for name, policy in self.baselines().items()}
        lessons = [self.demonstration(task) or [] for task in tasks]
        if all(lessons):
            played[TRUTH] = self.scripted(tasks, lambda i, turn: lessons[i][turn] if turn < len(lessons[i]) else "")
        return {name: [[trajectory.reward] for trajectory in trajectories] for name, trajectories in played.items()}

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        """Make this environment's data in the folder of the collect stage that its setting `data` names; returns
        counts. On the main rank only; `guard` is called before writing.
        """
        raise ConfigError("env.data: names the collect stage itself, but this environment makes no data of its own")

    def make_part(self, guard: Callable[[], None], mesh: Mesh) -> dict[str, int]:
        """A data rank's part of the data, after `make`; the counts of all ranks are added up."""
        return {}

    def require_source(self) -> None:
        """Check before the run starts that `make` has what it needs."""
        return

    def imitated(self) -> Sequence[Any]:
        """What supervised fine-tuning imitates: the training tasks, unless the environment has something else to
        learn from.
        """
        return self.of("train")

    def lesson_order(self, seed: int) -> Callable[[int], int]:
        """Which of them comes at a place of an endless stream."""
        return self.order(seed)

    def require_lessons(self, where: str) -> None:
        """Refuse, before the run starts, tasks that cannot be imitated. The first stands for all where an environment
        makes them alike.
        """
        self.lessons(self.imitated()[:1], where)

    def demonstration(self, task: Any) -> list[str] | None:
        """The answers to imitate, one a turn; None where there are none."""
        return None

    def lessons(self, tasks: Sequence[Any], where: str) -> list[list[TokenSequence]]:
        """Demonstrations as sequences to imitate: what is learnt has the role ACTION or STATE. They are played through
        the environment, so that every turn is read as in RL."""
        answers = [self._required(task, where) for task in tasks]

        def answer(prompt_id: int, turn: int) -> str:
            if turn >= len(answers[prompt_id]):
                raise ConfigError(
                    f"{where}: the demonstration of task {str(tasks[prompt_id])[:80]} has {turn} answers, not enough "
                    "to end it"
                )
            return answers[prompt_id][turn]

        played = self.scripted(tasks, answer)
        for task, trajectory in zip(tasks, played, strict=True):
            if isinstance(trajectory.reward, Invalid):
                raise ConfigError(
                    f"{where}: the demonstration of task {str(task)[:80]} cannot be played: {trajectory.reward.reason}"
                )
        return [trajectory.sequences for trajectory in played]

    def _required(self, task: Any, where: str) -> list[str]:
        answers = self.demonstration(task)
        if not answers:
            raise ConfigError(
                f"{where}: task {str(task)[:80]} has no demonstration to imitate; name a collect stage, or a model "
                "that plays"
            )
        return answers

    def answer_ids(self, context: Sequence[int], answer: str, where: str) -> TokenSequence:
        """A context and its answer, closed by the end of text, as one sequence to imitate."""
        ids = (*self.tokenizer.encode(answer), self.tokenizer.eos_id)
        length, most = len(context) + len(ids), self.max_length
        if most is not None and length > most:
            raise LengthError(
                f"{where}: prompt and answer have {length} tokens, model.max_positions is {most}; leave the task out "
                "or cut it"
            )
        return TokenSequence((*context, *ids), (Role.PROMPT,) * len(context) + (Role.ACTION,) * len(ids))

    def baselines(self) -> dict[str, Callable[[Prompt, Any], str | Invalid]]:
        """Trivial policies by name, each a function of prompt and task."""
        return {EMPTY: lambda prompt, task: ""}

    def scripted(self, tasks: Sequence[Any], answer: Callable[[int, int], str | Invalid]) -> list[Trajectory]:
        """Tasks played with the answers that a function of (number of the task, turn) gives."""
        return self._scripted([Conversation(task, i, 0) for i, task in enumerate(tasks)], answer)

    def _scripted(self, asked: list[Conversation], answer: Callable[[int, int], str | Invalid]) -> list[Trajectory]:
        return self.conversations.converse(Scripted(self.tokenizer, answer), asked, SamplingParams(max_new_tokens=1), 0)

    def baseline(self, policy: Callable[[Prompt, Any], str | Invalid], tasks: Sequence[Any]) -> list[Trajectory]:
        """Tasks played by a trivial policy."""
        asked = [Conversation(task, i, 0) for i, task in enumerate(tasks)]
        return self._scripted(asked, lambda number, turn: policy(asked[number].prompts[-1], asked[number].task))
