"""Self-play data for learning a world before acting in it: the agent's own turns, with the world's true states written
into their tags.

The loss covers what the agent thinks and answers, the true states included (roles ACTION and STATE); what the world
says is prompt. The other variants are the ablations: same turns, same format, other states.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Role, TokenSequence
from ..rollout.sampler import Sample, SampleRequest
from ..tasks import held_out
from ..worlds.base import World
from .config import Format, Variant
from .episode import AgentEpisode
from .format import OPENING, ground, has_states

HIDDEN = "..."
BLANK = "-"  # a token of its own, also where several stand together
UNREADABLE = "\ufffd"  # an id that the tokenizer does not know
THOUGHT = "I try some moves."
_SPAN = re.compile(r"(?<=<observation>\n).*?(?=\n</observation>)|(?<=<prediction>\n).*?(?=\n</prediction>)", re.DOTALL)
_CELL = re.compile(r"\((\d+),(\d+)\)")


@dataclass(frozen=True)
class Lesson:
    """One turn to imitate, and whether its trajectory is held out."""

    sequence: TokenSequence
    text: str
    held_out: bool
    turn: int
    asked: int  # ids of the prompt


def _scatter(state: str, rng: random.Random) -> str:
    """The state with every coordinate replaced by a random one of the same range."""
    highest = max((int(n) for cell in _CELL.findall(state) for n in cell), default=0)
    return _CELL.sub(lambda _: f"({rng.randint(0, highest)},{rng.randint(0, highest)})", state)


def written_response(episode: AgentEpisode, turn: int, variant: Variant) -> str:
    """The response of one turn with its state tags filled the way the variant says; a missing tag stays missing."""
    response = episode.parsed[turn].response
    before, after = episode.states[turn], episode.states[turn + 1]
    if variant == "belief":
        return response
    if variant == "masked":
        return ground(response, HIDDEN, HIDDEN)
    if variant == "blanked":
        return ground(response, *(BLANK * len(episode.tokenizer.encode(state)) for state in (before, after)))
    if variant == "random_coordinates":
        rng = random.Random(f"{episode.seed}/{episode.sample_index}/{turn}")
        return ground(response, _scatter(before, rng), _scatter(after, rng))
    return ground(response, before, after)


def encode_spans(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Ids of the whole text, and for each whether it starts inside one of the character spans."""
    hf = getattr(tokenizer, "hf", None)
    if hf is not None:
        encoded = hf(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        return ids, [any(a <= start < b for a, b in spans) for start in starts]
    # Character and byte tokenizers never join pieces, so pieces may be encoded apart.
    ids, inside, at = [], [], 0
    for a, b in [*spans, (len(text), len(text))]:
        for piece, flag in ((text[at:a], False), (text[a:b], True)):
            encoded = tokenizer.encode(piece)
            ids += encoded
            inside += [flag] * len(encoded)
        at = b
    return ids, inside


def lessons(
    episode: AgentEpisode,
    variant: Variant = "truth",
    only_tagged: bool = True,
    validation_share: float = 0.2,
    learn_blanks: bool = False,
) -> list[Lesson]:
    """Every turn of a finished episode as a sequence to imitate, earlier turns in its context corrected alike.

    Masked and blanked states carry no loss; `learn_blanks` gives blanked ones theirs, to teach the shape of an answer
    alone.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant: {variant!r} must be one of {', '.join(get_args(Variant))}")
    opening = OPENING[episode.settings.fmt]
    answers: list[list[int]] = []
    out = []
    aside = held_out(f"{episode.seed}/{episode.sample_index}", validation_share)
    for turn, parsed in enumerate(episode.parsed):
        text = written_response(episode, turn, variant)
        context = episode.context_of(answers)
        tagged = (
            parsed.ok and UNREADABLE not in text and (episode.settings.fmt != "state" or has_states(parsed.response))
        )
        if parsed.ok and UNREADABLE not in text:
            written = text.removeprefix(opening)
            ids, inside = encode_spans(episode.tokenizer, written, [found.span() for found in _SPAN.finditer(written)])
        else:  # nothing to fill in: what was sampled stays as it was
            ids = [i for i in episode.turns[turn].answer if i not in episode.tokenizer.stop_ids]
            inside = [False] * len(ids)
        state_role = Role.PROMPT if variant == "masked" or (variant == "blanked" and not learn_blanks) else Role.STATE
        roles = [Role.PROMPT] * len(context) + [state_role if flag else Role.ACTION for flag in inside] + [Role.ACTION]
        answer = [*ids, episode.tokenizer.eos_id]
        if tagged or not only_tagged:
            out.append(Lesson(TokenSequence((*context, *answer), tuple(roles)), text, aside, turn, len(context)))
        answers.append(answer)
    return out


def tagged_share(episodes: Iterable[AgentEpisode]) -> float:
    """The share of turns that the tag filter keeps, to be reported beside the data."""
    turns = [parsed.ok and has_states(parsed.response) for episode in episodes for parsed in episode.parsed]
    return sum(turns) / len(turns) if turns else float("nan")


class RandomPlayer:
    """A sampler of random actions in an agent's format: it neither looks nor predicts. `worlds` finds the world of a
    request's key.
    """

    def __init__(
        self,
        world_of: Callable[[tuple[int, ...]], World],
        tokenizer: Tokenizer,
        actions: int = 3,
        fmt: Format = "state",
    ) -> None:
        self.world_of, self.tokenizer, self.actions, self.fmt = world_of, tokenizer, actions, fmt

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """One answer for each request; its key and the world's state decide the words."""
        out: list[Sample | Invalid] = []
        states = f"<observation>{HIDDEN}</observation> {THOUGHT} <prediction>{HIDDEN}</prediction>"
        start = {"state": f" {states} </think> <answer> ", "think": f" {THOUGHT} </think> <answer> ", "answer": " "}[
            self.fmt
        ]
        for request in requests:
            rng, world = random.Random(repr(request.key)), self.world_of(request.key)
            words = [world.random_action(rng) for _ in range(self.actions)]
            ids = (*self.tokenizer.encode(f"{start}{' || '.join(words)} </answer>"), self.tokenizer.eos_id)
            out.append(Sample(ids, (0.0,) * len(ids), "stop", 0))
        return out
