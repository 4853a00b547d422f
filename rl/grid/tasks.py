"""A grid's world model as an environment: a task is a room, an episode some states that the model imagines in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...core.errors import ConfigError
from ...core.files import read_json
from ...core.rng import fold
from ...data.schema import TEXT
from ...data.shards import ShuffledOrder
from ...data.tokenizers import CharTokenizer, Tokenizer
from ...data.trajectory import Invalid, Role, TokenSequence, Trajectory
from ..environment import Split
from ..evaluation import TEST, Evaluation, Results
from ..language_tasks import Made
from ..rollout.episodes import rollout
from ..rollout.sampler import Sampler, SamplingParams
from ..tasks import Lesson, Tasks, held_out
from .config import GridEnvironment
from .evaluate import TaskScore, results, score_predictions
from .imagination import GridDynamics, ImaginationEpisode, ImaginationTask, prompt_ids, room_of, task_in
from .rooms import ROOMS, SHARDS, Transitions, make_data, transitions

TRAIN_KEY, TEST_KEY = 1, 3  # of the random numbers that tasks are drawn with


@dataclass(frozen=True)
class Room:
    """A room at its start, and the seed of what is drawn in it: where an episode begins and which actions are given."""

    state: str
    seed: int


class GridTasks(Tasks):
    """Imagination in the rooms that a collect stage made; before it has finished there is one room to look at."""

    free_text = False

    def __init__(self, settings: GridEnvironment, made: Made, tokenizer: Tokenizer, max_length: int | None) -> None:
        super().__init__(tokenizer, max_length, settings.steps)
        if made.settings.get("prompts") is None:
            raise ConfigError(f"env.data: '{made.name}' is no collect stage with prompts, the rooms of a grid")
        self.settings, self.made, self.dynamics = settings, made, GridDynamics.of(settings.tag, "env.tag")
        if not isinstance(tokenizer, CharTokenizer) or tokenizer.alphabet != self.dynamics.tokenizer().alphabet:
            raise ConfigError(
                "env: the states of a grid are read one token a cell; leave the start out, or name an exported grid "
                "model"
            )
        needed = 2 * self.dynamics.cells + 1
        if max_length is not None and needed > max_length:
            raise ConfigError(
                f"model.max_positions = {max_length}: state, action and next state of '{settings.tag}' take {needed}"
            )
        self.symbols = tokenizer

    # Tasks.

    @cached_property
    def rooms(self) -> dict[Split, list[Room]]:
        made = read_json(self.made.folder / ROOMS) if self.made.finished else None
        first = [self.dynamics.start(self.settings.first_seed)]
        states = made or {"train": first, "heldout": first}
        keys: dict[Split, tuple[str, int]] = {"train": ("train", TRAIN_KEY), "test": ("heldout", TEST_KEY)}
        return {
            split: [Room(state, fold(self.made.seed, key)) for state in states[name]]
            for split, (name, key) in keys.items()
        }

    def of(self, split: Split) -> Sequence[Room]:
        return self.rooms[split]

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        used = self.remaining(without)
        return lambda place: used[room_of(len(used), place, fold(seed, TRAIN_KEY))]

    def numbers(self, seed: int) -> Sequence[int]:
        return range(len(self.of("train")))

    def task(self, room: Room, prompt_id: int) -> ImaginationTask:
        """What is imagined in a room, by the number of the prompt."""
        return task_in(self.dynamics, room.state, prompt_id, self.settings.steps, self.settings.walk, room.seed)

    def params(self, max_new_tokens: int | None, temperature: float) -> SamplingParams:
        return SamplingParams(self.dynamics.cells, temperature)

    def episode(self, task: Room, prompt_id: int, sample_index: int) -> ImaginationEpisode:
        return ImaginationEpisode(self.task(task, prompt_id), sample_index, self.symbols)

    def play(self, sampler: Sampler, episodes: Sequence[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        return rollout(sampler, episodes, params, seed)

    def progress(self, values: dict[str, Any]) -> str:
        return f"{super().progress(values)}  all exact {values['reward/perfect']:.3f}"

    def shown(self, episode: ImaginationEpisode) -> list[dict[str, Any]]:
        return episode.picture(self.dynamics)

    # What is imitated: random play, not the tasks.

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        return make_data(self.settings, self.dynamics, self.made, guard)

    @cached_property
    def _transitions(self) -> Sequence[dict[str, Any]]:
        if self.made.finished:
            return Transitions(self.made.folder / SHARDS)
        return list(transitions(self.dynamics, [self.of("train")[0].state], 1, self.made.seed))

    def imitated(self) -> Sequence[dict[str, Any]]:
        return self._transitions

    def lesson_order(self, seed: int) -> Callable[[int], int]:
        played = self._transitions
        counts = played.shards.counts if isinstance(played, Transitions) else [len(played)]
        return ShuffledOrder(counts, seed=seed).__getitem__

    def lessons(self, tasks: Sequence[dict[str, Any]], where: str) -> list[list[TokenSequence]]:
        cells = self.dynamics.cells
        roles = (Role.PROMPT,) * (cells + 1) + (Role.STATE,) * cells  # one object for all of them
        asked = [
            (prompt_ids(self.symbols, t["state"], t["action"]), self.symbols.encode(t["next_state"])) for t in tasks
        ]
        return [[TokenSequence((*prompt, *after), roles)] for prompt, after in asked]

    def taught(self, episode: ImaginationEpisode, trajectory: Trajectory, held_out_share: float) -> list[Lesson]:
        """Every imagined state on its own."""
        aside = held_out(f"{episode.prompt_id}/{episode.sample_index}", held_out_share)
        meta = {
            "schema": TEXT,
            "task": str(episode.prompt_id),
            "sample": episode.sample_index,
            "reward": trajectory.reward,
        }
        lessons = []
        for sequence, turn in zip(trajectory.sequences, self.shown(episode), strict=True):
            asked = {"role": "user", "content": f"{turn['prompt']}\n{turn['action']}"}
            messages = [asked, {"role": "assistant", "content": turn["prediction"]}]
            lessons.append(Lesson(sequence, {"messages.json": messages, "meta.json": meta}, aside))
        return lessons

    # Evaluation.

    def parts(self, n: int) -> dict[str, list[Room]]:
        rooms = self.of("test")
        return {TEST: [rooms[room_of(len(rooms), i, rooms[0].seed)] for i in range(n)]}

    def require_judge(self, split: Split, samples: int) -> None:
        if samples > 1:
            raise ConfigError("samples: every task is imagined once; leave samples out")

    def judgements(self, episodes: Sequence[Any], played: Sequence[Trajectory]) -> list[TaskScore | Invalid]:
        pairs = zip(episodes, played, strict=True)
        return [t.reward if isinstance(t.reward, Invalid) else score_predictions(e.task, e.texts()) for e, t in pairs]

    def results(self, evaluation: Evaluation) -> Results:
        tasks = [self.task(room, i) for i, room in enumerate(evaluation.tasks[TEST])]
        return results(evaluation, tasks, len(self.of("test")))
