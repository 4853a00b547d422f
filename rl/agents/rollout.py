"""Rollouts of agents: seats of instances, played through rl/multiturn.py, and what a step's record says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Trajectory
from ..chat import Chat, chat_of
from ..multiturn import DEFAULT_LIMITS, Imagination, Limits, rollout_worlds
from ..rollout.sampler import Sampler, SamplingParams
from ..worlds.base import World
from ..worlds.tasks import Task
from .dynamics import ImaginedEpisode
from .episode import AgentEpisode, AgentSettings


@dataclass(frozen=True)
class Instance:
    """A seed of a tag: what is played."""

    task: Task
    seed: int
    imagined: bool = False  # a world model plays it, not the world

    def __str__(self) -> str:
        return f"{self.task.name}, seed {self.seed}"


@dataclass
class Seat:
    """A place in a rollout: task, seed and sample. `episode` is the last one begun there; a fault may have begun
    several.
    """

    task: Task
    seed: int
    prompt_id: int
    sample_index: int
    episode: AgentEpisode | None = None
    imagined: bool = False


def seats_of(instances: Sequence[Instance], samples: int) -> list[Seat]:
    """A seat for every sample of every instance; the samples of one share its seed."""
    return [
        Seat(one.task, one.seed, number, sample) for number, one in enumerate(instances) for sample in range(samples)
    ]


@dataclass(frozen=True)
class Player:
    """How seats are played: tokenizer with its chat template, shape of the episodes, limits."""

    tokenizer: Tokenizer
    settings: AgentSettings
    limits: Limits = DEFAULT_LIMITS

    def play(
        self,
        sampler: Sampler,
        seats: Sequence[Seat],
        params: SamplingParams,
        seed: int,
        imagination: Imagination | None = None,
    ) -> list[Trajectory]:
        """All seats to the end of their episodes; `imagination` plays the worlds of those that are imagined."""
        chat = chat_of(self.tokenizer)
        encoded: dict[str, list[int]] = {}
        makers = [self._maker(seat, chat, encoded) for seat in seats]
        return rollout_worlds(sampler, makers, params, seed, self.limits, imagination)

    def _maker(self, seat: Seat, chat: Chat, encoded: dict[str, list[int]]) -> Callable[[], AgentEpisode]:
        place = seat.task, seat.seed, seat.prompt_id, seat.sample_index

        def make() -> AgentEpisode:
            kind = ImaginedEpisode if seat.imagined else AgentEpisode
            seat.episode = kind(*place, self.tokenizer, chat, self.settings, encoded)
            return seat.episode

        return make


def world_finder(seats: Sequence[Seat]) -> Callable[[tuple[int, ...]], World]:
    """The world behind a request's key, for players that need no model."""
    by_name = {(seat.prompt_id, seat.sample_index): seat for seat in seats}

    def find(key: tuple[int, ...]) -> World:
        episode = by_name[key[1], key[2]].episode
        assert episode is not None
        return episode.world

    return find


def actions_taken(trajectories: Sequence[Trajectory], imagined: bool = False) -> int:
    """Environment steps: the actions that worlds executed; those of imagined ones are counted apart."""
    valid = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
    return sum(int(info.get("num_actions", 0)) for info in valid if bool(info.get("imagined")) == imagined)


def describe_agents(trajectories: Sequence[Trajectory], gather: Callable[[Any], list[Any]]) -> dict[str, float]:
    """Means over the valid trajectories of all ranks, and the success rate of each tag where there are several."""
    names = ("success", "num_actions", "action_is_effective", "format_ok", "response_tokens", "bonus")
    valid = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
    rows = [[float(info[n]) for n in names] + [info["tag"]] for info in valid]
    everywhere = [row for part in gather(rows) for row in part]
    if not everywhere:
        return {}
    values = {f"agent/{name}": sum(row[i] for row in everywhere) / len(everywhere) for i, name in enumerate(names)}
    imagined = [info["unreadable"] for info in valid if "unreadable" in info]
    unreadable = [value for part in gather(imagined) for value in part]
    if unreadable:
        values["agent/unreadable"] = sum(unreadable) / len(unreadable)  # of what the world model said
    tags = sorted({row[-1] for row in everywhere})
    for tag in tags if len(tags) > 1 else ():
        successes = [row[0] for row in everywhere if row[-1] == tag]
        values[f"agent/success/{tag}"] = sum(successes) / len(successes)
    return values


def turns_of(seat: Seat) -> list[dict[str, Any]]:
    """An episode as the report shows it: the prompt as the model read it, what it wrote, what came of it.

    Only a state that the model foretold is held against the true one; any other answer is shown as it is.
    """
    episode = seat.episode
    if episode is None:
        return []
    answers = [turn.answer for turn in episode.turns]
    right = episode.world.right_answer()
    shown = []
    for turn, parsed in enumerate(episode.parsed):
        entry: dict[str, Any] = {
            "context": episode.tokenizer.decode(episode.context_of(answers[:turn]), keep_special=True),
            "action": " || ".join(parsed.actions),
            "reward": episode.turns[turn].reward,
        }
        if parsed.prediction is None or right is not None:
            entry |= {"answer": parsed.response, "after": episode.states[turn + 1]}
        else:
            truth = episode.states[turn + 1]
            entry |= {
                "before": episode.states[turn],
                "prediction": parsed.prediction,
                "truth": truth,
                "exact": parsed.prediction == truth,
            }
        if episode.boards:
            entry["boards"] = episode.boards[turn : turn + 2]
        shown.append(entry)
    return shown
