"""The token layout of a video world model, said once: which ids mean what, what stands where, what is given, sampled
and learnt.

Data, sampler, masks and decoder all read it from here; both published layouts are instances of it. Shapes: B clips, T
frames, N codes of a frame, K of a context, A numbers of an action, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from .trajectory import Role, TokenSequence

Part = Literal["context", "frame", "action", "bos", "eos"]


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one meaning. `frame` counts the clip's frames from 0; markers and the context have -1."""

    part: Part
    frame: int
    start: int
    tokens: int
    given: bool  # in the prompt, or forced between sampled spans
    learnt: bool  # by imitation

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class VideoLayout:
    """`history` frames are given, `horizon` frames predicted; each frame is followed by the action taken in it.

    With `markers` a bos stands before the predicted frames and an eos in place of the last action; both are learnt.
    """

    codebook: int = 4375
    frame_tokens: int = 320
    context_tokens: int = 0
    history: int = 4
    horizon: int = 1
    markers: bool = True
    action_dims: int = 13
    action_bins: int = 256

    def __post_init__(self) -> None:
        for name in ("codebook", "frame_tokens", "history", "horizon", "action_dims", "action_bins"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")

    @property
    def context_start(self) -> int:
        """First id of context codes; frame codes begin at 0."""
        return self.codebook

    @property
    def action_start(self) -> int:
        return self.codebook * (2 if self.context_tokens else 1)

    @property
    def bos(self) -> int:
        return self.action_start + self.action_bins

    @property
    def eos(self) -> int:
        """Where there are no markers it is an id that never occurs."""
        return self.bos + 1

    @property
    def vocab(self) -> int:
        return self.eos + 1

    @property
    def frames(self) -> int:
        """Frames of a clip, without the context."""
        return self.history + self.horizon

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The sequence, part by part."""
        out: list[Segment] = []

        def put(part: Part, frame: int, tokens: int, given: bool, learnt: bool = False) -> None:
            out.append(Segment(part, frame, out[-1].stop if out else 0, tokens, given, learnt))

        if self.context_tokens:
            put("context", -1, self.context_tokens, True)
        for t in range(self.frames):
            predicted = t >= self.history
            if self.markers and t == self.history:
                put("bos", -1, 1, True, True)
            put("frame", t, self.frame_tokens, not predicted, predicted)
            if self.markers and t == self.frames - 1:
                put("eos", -1, 1, False, True)
            else:
                put("action", t, self.action_dims, True)
        return tuple(out)

    @property
    def total(self) -> int:
        return self.segments[-1].stop

    @property
    def prompt(self) -> int:
        """Tokens before the first sampled one."""
        return next(s.start for s in self.segments if not s.given)

    @property
    def response(self) -> int:
        return self.total - self.prompt

    @property
    def sampled(self) -> int:
        """Tokens that the model chooses in a rollout."""
        return sum(s.tokens for s in self.segments if not s.given)

    def ids_of(self, part: Part) -> tuple[int, int]:
        """Half-open range of the ids of a part."""
        starts = {
            "frame": (0, self.codebook),
            "context": (self.context_start, self.context_start + (self.codebook if self.context_tokens else 0)),
            "action": (self.action_start, self.bos),
            "bos": (self.bos, self.eos),
            "eos": (self.eos, self.vocab),
        }
        return starts[part]

    @cached_property
    def loss_mask_L(self) -> np.ndarray:
        """What imitation learns: the predicted frames, and the markers."""
        return np.concatenate([np.full(s.tokens, s.learnt) for s in self.segments])

    def assemble(
        self, frames_BTN: np.ndarray, actions_BTA: np.ndarray, context_BK: np.ndarray | None = None
    ) -> np.ndarray:
        """Sequences of ids from codes and action bins, offsets added. Frame t is followed by the action taken in
        frame t.
        """
        self._check(frames_BTN, actions_BTA, context_BK)
        rows = np.empty((len(frames_BTN), self.total), np.int64)
        for s in self.segments:
            place = slice(s.start, s.stop)
            if s.part == "frame":
                rows[:, place] = frames_BTN[:, s.frame]
            elif s.part == "action":
                rows[:, place] = actions_BTA[:, s.frame] + self.action_start
            elif s.part == "context":
                assert context_BK is not None
                rows[:, place] = context_BK + self.context_start
            else:
                rows[:, place] = self.bos if s.part == "bos" else self.eos
        return rows

    def _check(self, frames_BTN: np.ndarray, actions_BTA: np.ndarray, context_BK: np.ndarray | None) -> None:
        if frames_BTN.shape[1:] != (self.frames, self.frame_tokens):
            raise ValueError(
                f"frame codes have shape {frames_BTN.shape[1:]}, the layout has {(self.frames, self.frame_tokens)}"
            )
        if actions_BTA.shape[1:] != (self.frames, self.action_dims):
            raise ValueError(
                f"actions have shape {actions_BTA.shape[1:]}, the layout has {(self.frames, self.action_dims)}"
            )
        if bool(self.context_tokens) != (context_BK is not None):
            raise ValueError(
                f"the layout has {self.context_tokens} context tokens, the clip "
                f"{'none' if context_BK is None else 'some'}"
            )
        for codes, limit, what in (
            (frames_BTN, self.codebook, "frame"),
            (actions_BTA, self.action_bins, "action"),
            (context_BK, self.codebook, "context"),
        ):
            if codes is not None and codes.size and (codes.min() < 0 or codes.max() >= limit):
                raise ValueError(f"{what} codes must lie in 0..{limit - 1}, found {codes.min()}..{codes.max()}")

    def take(self, rows_BL: np.ndarray, part: Part, *, clamp: bool = False) -> np.ndarray:
        """The codes of a part, offsets subtracted: [B, T, tokens] of frames and actions, [B, K] of the context.

        An id outside the part's range is an error, or with `clamp` is moved to the nearest one, as sampled frames need.
        Rows may lack the last action, which has no effect.
        """
        places = [s for s in self.segments if s.part == part and s.stop <= rows_BL.shape[1]]
        codes = np.stack([rows_BL[:, s.start : s.stop] for s in places], 1)
        low, high = self.ids_of(part)
        if clamp:
            codes = codes.clip(low, high - 1)
        elif codes.min() < low or codes.max() >= high:
            raise ValueError(f"{part}: ids must lie in {low}..{high - 1}, found {codes.min()}..{codes.max()}")
        codes = codes - low
        return codes[:, 0] if part == "context" else codes

    def sequence(self, row_L: Sequence[int] | np.ndarray) -> TokenSequence:
        """A true clip as a sequence to imitate."""
        roles = tuple(Role.STATE if learnt else Role.PROMPT for learnt in self.loss_mask_L)
        return TokenSequence(tuple(int(i) for i in row_L), roles)

    def prompt_ids(self, row_L: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """What the model reads before it predicts."""
        return tuple(int(i) for i in row_L[: self.prompt])

    def forced(self, row_L: Sequence[int] | np.ndarray) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For the sampler: (sampled so far, ids to insert) for each action between predicted frames; the last one is
        left out.
        """
        out, count = [], 0
        for s in self.segments:
            if not s.given:
                count += s.tokens
            elif s.start >= self.prompt and count < self.sampled:
                out.append((count, tuple(int(i) for i in row_L[s.start : s.stop])))
        return tuple(out)

    def describe(self) -> list[dict[str, int | str]]:
        """For a sample's meta.json: the parts in their order."""
        return [{"name": s.part if s.frame < 0 else f"{s.part}{s.frame}", "tokens": s.tokens} for s in self.segments]
