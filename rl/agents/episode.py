"""An agent's episode in a world: turns of prompt and answer, on the very token ids that were sampled.

Nothing sampled is ever tokenised again: a later context repeats earlier answers by their ids, and only what the world
says is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid
from ..chat import Chat, with_bos
from ..language import readable
from ..rewards.state_match import world_model_bonus
from ..rollout.sampler import Sample
from ..worlds.base import attempt
from ..worlds.tasks import Task
from .config import AgentSettings
from .format import OPENING, SYSTEM, Parsed, TurnResult, parse, play, prefix, turn_text


@dataclass
class _Turn:
    said: str  # by the world
    answer: tuple[int, ...] = ()
    reward: float = 0.0  # the world's
    left: int = 0  # actions that could still be made before it
    bonus: float = 0.0  # for states that were written right


@dataclass
class AgentEpisode:
    """One sample of one seed of a task, as the rollout drives it."""

    task: Task
    seed: int
    prompt_id: int
    sample_index: int
    tokenizer: Tokenizer
    chat: Chat
    settings: AgentSettings = field(default_factory=AgentSettings)
    encoded: dict[str, list[int]] = field(default_factory=dict)  # by text; the episodes of a rollout share it
    turns: list[_Turn] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # one before each turn and one at the end
    boards: list[str] = field(default_factory=list)  # the same as grids, of worlds that have them
    penalty: float = 0.0
    actions: int = 0
    effective: int = 0  # turns whose last action had an effect
    success: bool = False
    done: bool = False
    truncated: bool = False  # over because no actions were left
    fault: Invalid | None = None

    def __post_init__(self) -> None:
        self.world = self.task.make()
        started = attempt(self.world.reset, self.seed, self.sample_index)
        self.fault = started if isinstance(started, Invalid) else None
        if self.fault is None:
            self._note()

    def _note(self) -> None:
        self.states.append(self._state())
        board = self.world.drawing()
        if board is not None:
            self.boards.append(board)

    def _state(self) -> str:
        return self.world.render("text_with_coordinates" if self.settings.coordinates else "text")

    def _ask(self) -> None:
        left, number = self.task.max_actions - self.actions, len(self.turns) + 1
        if self.settings.prompt == "bare":
            self.turns.append(_Turn(f"{self.states[-1]}\n"))
            return
        text = turn_text(number, self.states[-1], left, self.task, self.settings.fmt)
        if self.turns:
            text = f"Reward:\n{self.turns[-1].reward:g}\n{text}"
        self.turns.append(_Turn(text))

    def context(self) -> tuple[int, ...] | None:
        """Ids to continue from, or None when the episode is over."""
        if self.done or self.fault or len(self.parsed) >= self.settings.max_turns:
            return None
        if len(self.turns) == len(self.parsed):
            self._ask()
        return self.context_of([turn.answer for turn in self.turns[:-1]])

    def context_of(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Ids that ask for the turn after these answers: the rules, then the turns in the window, ending in the
        opening tag.
        """
        last = len(answers)
        first = max(0, last + 1 - self.settings.window) if self.settings.window else 0
        opening = self.chat.agent + OPENING[self.settings.fmt]
        ids: list[int] = []
        for number in range(first, last + 1):
            said = self.turns[number].said
            if self.settings.prompt == "bare":
                text, opening = said, OPENING[self.settings.fmt]
            elif number == first:
                rules = prefix(self.task, self.world, self.settings.fmt)
                text = self.chat.start + SYSTEM + self.chat.first_user + rules + said[said.index("\nTurn ") :]
            else:
                text = self.chat.next_user + said
            asked = self._encode(text + opening)
            asked = with_bos(self.tokenizer, asked) if number == first else asked
            # The end of the agent's turn is not repeated where the sampler already wrote it.
            ids += asked[1:] if ids and ids[-1] == asked[0] else asked
            ids += answers[number] if number < last else ()
        return tuple(ids)

    def _encode(self, text: str) -> list[int]:
        """Ids of a text. Every turn repeats those before it, and the samples of a task begin alike."""
        if text not in self.encoded:
            self.encoded[text] = self.tokenizer.encode(text)
        return self.encoded[text]

    def receive(self, sample: Sample) -> None:
        """Take the answer: parse it, execute its actions, note the state they led to."""
        parsed = self.parse(sample)
        result = attempt(
            play, self.world, parsed.actions, self.task.max_actions - self.actions, self.settings.format_penalty
        )
        if isinstance(result, Invalid):
            self.fault = result
        else:
            self.take(sample, parsed, result)

    def parse(self, sample: Sample) -> Parsed:
        """An answer taken apart."""
        text = OPENING[self.settings.fmt] + readable(self.tokenizer, sample.ids)
        return parse(text, self.settings.fmt, self.settings.actions_per_turn)

    def take(self, sample: Sample, parsed: Parsed, result: TurnResult) -> None:
        """Note an answer and what came of it."""
        turn = self.turns[-1]
        turn.answer, turn.reward, turn.left = sample.ids, result.reward, self.task.max_actions - self.actions
        self.parsed.append(parsed)
        self._note()
        paid = (self.settings.observation_reward, self.settings.prediction_reward)
        turn.bonus = world_model_bonus(parsed, self.states[-2], self.states[-1], *paid) if any(paid) else 0.0
        self.penalty += result.penalty
        self.actions += len(result.executed)
        self.effective += bool(result.info.get("action_is_effective", False))
        self.success = bool(result.info.get("success", False)) and not result.truncated
        self.done, self.truncated = result.done, result.truncated

    def score(self) -> tuple[list[float], float | Invalid, dict[str, Any]]:
        """Turn rewards, their sum with the format penalties, and the numbers of a report."""
        if self.fault is not None:
            return [], self.fault, {"seed": self.seed, "tag": self.task.name}
        rewards = [turn.reward + turn.bonus for turn in self.turns if turn.answer]
        count = max(1, len(rewards))
        info = {
            "tag": self.task.name,
            "seed": self.seed,
            "success": self.success,
            "num_actions": self.actions,
            "action_is_effective": self.effective / count,
            "format_ok": sum(p.ok for p in self.parsed) / count,
            "penalty": self.penalty,
            "bonus": sum(turn.bonus for turn in self.turns),
            "response_tokens": sum(len(turn.answer) for turn in self.turns),
            "turns": len(rewards),
        }
        right = self.world.right_answer()
        if right is not None:
            info["right_answer"] = right
        return rewards, sum(rewards) + self.penalty, info
