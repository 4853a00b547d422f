"""Agents behind an OpenAI-compatible address: the same prompts, formats and scores as for models of our own, by
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ...data.trajectory import Invalid, Trajectory
from ..text_games.teacher import Teacher
from ..worlds.base import attempt
from .config import AgentSettings
from .format import OPENING, Turn, messages, parse, play
from .rollout import Seat


@dataclass(frozen=True)
class ApiPlayer:
    """Plays seats with a chat model behind an address; `teacher` knows it, its deadline and its retries."""

    teacher: Teacher
    settings: AgentSettings

    def play(self, seats: Sequence[Seat], progress: Callable[[int], None] = lambda done: None) -> list[Trajectory]:
        """All seats, several at a time. A line that fails, or a world that breaks, makes a trajectory Invalid, never
        a failure.
        """
        with ThreadPoolExecutor(self.teacher.together) as pool:
            waiting = {pool.submit(self.episode, seat): i for i, seat in enumerate(seats)}
            played: dict[int, Trajectory] = {}
            for done in as_completed(waiting):
                played[waiting[done]] = done.result()
                progress(len(played))
        return [played[i] for i in range(len(seats))]

    def episode(self, seat: Seat) -> Trajectory:
        """One seat to its end."""
        world, settings = seat.task.make(), self.settings
        mode = "text_with_coordinates" if settings.coordinates else "text"
        history: list[Turn] = []
        rewards: list[float] = []
        penalty, actions, effective, right, words, success = 0.0, 0, 0, 0, 0, False

        def ended(reward: float | Invalid) -> Trajectory:
            count = max(1, len(rewards))
            info = {
                "tag": seat.task.name,
                "seed": seat.seed,
                "success": success,
                "num_actions": actions,
                "action_is_effective": effective / count,
                "format_ok": right / count,
                "response_tokens": words,  # words: the server's tokens are not ours
                "bonus": 0.0,
            }
            return Trajectory(seat.prompt_id, seat.sample_index, [], reward, rewards, info)

        started = attempt(world.reset, seat.seed, seat.sample_index)
        if isinstance(started, Invalid):
            return ended(started)
        for _ in range(settings.max_turns):
            history.append(Turn(world.render(mode), seat.task.max_actions - actions))
            said = self.teacher.chat(messages(seat.task, world, history, settings.fmt, settings.window))
            if isinstance(said, Invalid):
                return ended(said)
            opening = OPENING[settings.fmt]
            parsed = parse(said if opening in said else opening + said, settings.fmt, settings.actions_per_turn)
            result = attempt(play, world, parsed.actions, seat.task.max_actions - actions, settings.format_penalty)
            if isinstance(result, Invalid):
                return ended(result)
            history[-1].response, history[-1].reward = parsed.response or " ", result.reward
            rewards.append(result.reward)
            penalty, actions, words = (
                penalty + result.penalty,
                actions + len(result.executed),
                words + len(said.split()),
            )
            right += parsed.ok
            effective += bool(result.info.get("action_is_effective", False))
            success = bool(result.info.get("success", False)) and not result.truncated
            if result.done:
                break
        return ended(sum(rewards) + penalty)
