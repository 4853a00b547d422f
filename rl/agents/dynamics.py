"""World models of agents' worlds: lessons from transitions, and episodes of agents in the world a model imagines.

A question is a state and the actions of a turn; the answer is the state after them, or what changes in it where the
world writes that, the reward, and whether the episode is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.trajectory import Invalid, Role, TokenSequence
from ..chat import with_bos
from ..language import readable
from ..rollout.sampler import Sample
from ..tasks import held_out
from .episode import AgentEpisode
from .format import SEPARATOR, Parsed, TurnResult, prefix, understood
from .selfplay import Lesson

ON, WON, LOST = "=", "+", "-"  # after the reward: the episode goes on, or is over
SYSTEM = "You foretell what follows in small worlds. "
ASKED = (
    "\nWrite the state after these actions. Then, on a line of its own, the reward, followed by = if the task goes on, "
    "+ if it is solved, - if it is over unsolved. No extra text."
)


def question(episode: AgentEpisode, state: str, words: Sequence[str]) -> tuple[int, ...]:
    """What a world model reads."""
    actions = f" {SEPARATOR} ".join(words)
    if episode.settings.prompt == "bare":
        return tuple(with_bos(episode.tokenizer, episode.tokenizer.encode(f"{state}\n{actions}\n")))
    chat, rules = episode.chat, prefix(episode.task, episode.world, "answer")
    text = f"{chat.start}{SYSTEM}{chat.first_user}{rules}\nState:\n{state}\nActions:\n{actions}{ASKED}{chat.agent}"
    return tuple(with_bos(episode.tokenizer, episode.tokenizer.encode(text)))


def answer(state: str, reward: float, mark: str) -> str:
    """The answer that a world model learns to write."""
    return f"{state}\n{round(reward, 6):g}{mark}"


def read(text: str) -> tuple[str, float, str] | None:
    """State, reward and mark of a world model's answer; None if it is malformed."""
    state, _, last = text.strip().rpartition("\n")
    mark, number = last[-1:], last[:-1]
    if not state or mark not in (ON, WON, LOST):
        return None
    try:
        reward = float(number)
    except ValueError:
        return None
    return (state, reward, mark) if abs(reward) < 1e6 else None


def transitions(episode: AgentEpisode, validation_share: float = 0.2) -> list[Lesson]:
    """Every turn with actions of a finished episode, as a lesson on the world."""
    aside = held_out(f"{episode.seed}/{episode.sample_index}", validation_share)
    tokenizer, last, out = episode.tokenizer, len(episode.parsed) - 1, []
    for turn, parsed in enumerate(episode.parsed):
        actions, _ = understood(episode.world, parsed.actions, 0.0)
        words = [word for word, _ in actions[: episode.turns[turn].left]]
        if not words:
            continue
        over = turn == last and episode.done and not episode.truncated
        mark = (WON if episode.success else LOST) if over else ON
        asked = question(episode, episode.states[turn], words)
        written = episode.world.change(*episode.states[turn : turn + 2])
        text = answer(written, episode.turns[turn].reward, mark)
        ids = (*tokenizer.encode(text), tokenizer.eos_id)
        roles = (Role.PROMPT,) * len(asked) + (Role.STATE,) * len(ids)
        out.append(Lesson(TokenSequence((*asked, *ids), roles), text, aside, turn, len(asked)))
    return out


@dataclass
class ImaginedEpisode(AgentEpisode):
    """An agent's episode in the world that a model imagines: only the start is true. An unreadable answer of the model
    leaves the state unchanged.
    """

    place: str | None = None  # the state that was last imagined
    unreadable: int = 0
    asked: tuple[Sample, Parsed, tuple[str, ...], float] | None = None  # an answer that waits for the imagined state

    def _note(self) -> None:
        self.states.append(self._state() if self.place is None else self.place)

    def receive(self, sample: Sample) -> None:
        """Take the answer; if it has an action, the model is asked what follows."""
        parsed = self.parse(sample)
        actions, penalty = understood(self.world, parsed.actions, self.settings.format_penalty)
        words = tuple(word for word, _ in actions[: self.task.max_actions - self.actions])
        if words:
            self.asked = sample, parsed, words, penalty
            return
        self.place = self.states[-1]
        self.take(sample, parsed, TurnResult(0.0, penalty, False, False, ()))

    def question(self) -> tuple[int, ...] | None:
        """The question to the world model before the next turn; None if there is none."""
        return question(self, self.states[-1], self.asked[2]) if self.asked else None

    def imagine(self, sample: Sample) -> None:
        """Take the world model's answer."""
        assert self.asked is not None
        (acted, parsed, words, penalty), self.asked = self.asked, None
        before = self.states[-1]
        found = read(readable(self.tokenizer, sample.ids))
        after = self.world.changed(before, found[0]) if found else None
        self.unreadable += after is None
        self.place, reward, mark = (after, *found[1:]) if found and after is not None else (before, 0.0, ON)
        left = self.task.max_actions - self.actions
        done, truncated = mark != ON, mark == ON and len(words) >= left
        info = {"success": float(mark == WON), "action_is_effective": float(self.place != before)}
        self.take(acted, parsed, TurnResult(reward, penalty, done or truncated, truncated, words, info))

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        rewards, reward, info = super().score()
        return rewards, reward, {**info, "imagined": True, "unreadable": self.unreadable / max(1, len(self.parsed))}
