"""Policies inside the world model: it stands in for the simulator, and the question is whether it ranks policies alike.

The window slides as published: context and last frame are the prompt, up to `horizon` frames are added, then it is
built anew. Shapes: B episodes side by side, N codes of a frame, K of a context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.rng import fold
from ...data.trajectory import Invalid
from ...data.video_actions import ActionBins
from ...models.video.tokenizer import Codes, CompressiveTokenizer
from ..rollout.sampler import Sampler, SampleRequest, SamplingParams
from ..statistics import Estimate, proportion
from .imagine import ClipDecoder, to_frames, to_pictures
from .policies import VideoPolicy

REPLIES = 3  # attempts to get an answer from the sampler
DRAWS = 4000  # of success rates, for an interval


@dataclass(frozen=True)
class Ending:
    """How a robot's action says that the episode is over: these numbers of it, from `at` on, equal `done`."""

    at: int
    done: tuple[int, ...]
    going: tuple[int, ...]  # what they are while it goes on

    def said(self, actions_BA: np.ndarray) -> np.ndarray:
        """Which of the actions end their episode."""
        part = actions_BA[:, self.at : self.at + len(self.done)] >= 0.5
        return (part == np.array(self.done, bool)).all(1)

    def still(self, dims: int, over: bool = True) -> np.ndarray:
        """No motion: the action of one who is done, or who waits."""
        action = np.zeros(dims)
        action[self.at : self.at + len(self.done)] = self.done if over else self.going
        return action


# RT-1: terminate_episode, one of three. Actions of other robots end nothing.
ENDINGS = {"tabletop": Ending(2, (1,), (0,)), "rt1": Ending(7, (1, 0, 0), (0, 1, 0))}


class WorldModelSimulator:
    """Frames in, actions in, frames out, for several episodes at once."""

    def __init__(
        self,
        sampler: Sampler,
        decoder: ClipDecoder,
        bins: ActionBins,
        *,
        top_k: int,
        repetition_penalty: float,
        seed: int,
        temperature: float = 1.0,
        waiting_A: np.ndarray | None = None,  # the action before the first frame; default: zeros
        first: int = 0,
    ) -> None:
        """The episodes are numbered from `first` on: with `seed`, an episode's number alone decides what is drawn in
        it, whichever episodes are imagined beside it.
        """
        self.first = first
        self.sampler, self.decoder, self.bins, self.layout, self.seed = sampler, decoder, bins, decoder.layout, seed
        self.waiting_A = np.zeros(self.layout.action_dims) if waiting_A is None else waiting_A
        self.params = SamplingParams(
            max_new_tokens=self.layout.frame_tokens,
            temperature=temperature,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            allowed=self.layout.ids_of("frame"),
        )

    @torch.no_grad()
    def reset(self, first_BHW3: np.ndarray) -> np.ndarray:
        """Begin from true first frames; what comes back is how the model sees them."""
        x = to_pictures(first_BHW3, self.decoder.device)
        tokenizer = self.decoder.tokenizer
        with self.decoder.autocast():
            codes = tokenizer.tokenize(x[:, None], x)
        self._take_context(codes.context_BK)
        frame_BN = codes.frames_BTN[:, 0].cpu().numpy()
        still = np.tile(self.waiting_A, (len(x), 1))
        given = self.layout.history
        self.frames: list[np.ndarray] = [frame_BN] * given
        self.actions: list[np.ndarray] = [self.bins.encode(still)] * (given - 1)
        self.count = 0
        return self._pictures()

    def _take_context(self, context_BK: torch.Tensor | None) -> None:
        tokenizer, self.cache = self.decoder.tokenizer, None
        if isinstance(tokenizer, CompressiveTokenizer) and context_BK is not None:
            with self.decoder.autocast():
                self.cache = tokenizer.context_cache(context_BK)
        self.context_BK = context_BK.cpu().numpy() if context_BK is not None else None

    def snapshot(self) -> dict[str, Any]:
        """Where the episodes are, as JSON values."""
        context = None if self.context_BK is None else self.context_BK.tolist()
        codes = {"frames": [f.tolist() for f in self.frames], "actions": [a.tolist() for a in self.actions]}
        return {"context": context, **codes, "count": self.count, "seed": self.seed}

    @torch.no_grad()
    def restore(self, held: dict[str, Any]) -> np.ndarray:
        """Go back to a snapshot; the frames that were seen then."""
        context = None if held["context"] is None else torch.tensor(held["context"], device=self.decoder.device)
        self._take_context(context)
        self.frames = [np.array(f, np.int64) for f in held["frames"]]
        self.actions = [np.array(a, np.int64) for a in held["actions"]]
        self.count, self.seed = int(held["count"]), int(held["seed"])
        return self._pictures()

    @torch.no_grad()
    def step(self, actions_BA: np.ndarray) -> np.ndarray:
        """The next frames, uint8 [B, H, W, 3]."""
        self.actions.append(self.bins.encode(actions_BA))
        prompts = self._prompts()
        keys = [(self.seed, self.first + b, self.count) for b in range(len(prompts))]
        found: dict[int, tuple[int, ...]] = {}
        for attempt in range(REPLIES):
            waiting = [b for b in range(len(prompts)) if b not in found]
            answers = self.sampler.generate([SampleRequest(prompts[b], keys[b], self.params) for b in waiting])
            for b, answer in zip(waiting, answers, strict=True):
                if not isinstance(answer, Invalid):
                    found[b] = answer.ids
                elif attempt == REPLIES - 1:
                    raise RuntimeError(f"the sampler failed on an imagined frame: {answer.reason}")
            if len(found) == len(prompts):
                break
        self.frames.append(np.array([found[b] for b in range(len(prompts))], np.int64))
        self.count += 1
        if len(self.frames) == self.layout.frames:  # the window is full: go on from its last frames
            keep = self.layout.history
            self.frames, self.actions = self.frames[-keep:], self.actions[-(keep - 1) :] if keep > 1 else []
        return self._pictures()

    def _prompts(self) -> list[tuple[int, ...]]:
        layout = self.layout
        parts = [] if self.context_BK is None else [self.context_BK + layout.context_start]
        frames, actions = self.frames, self.actions
        if layout.markers:  # one frame at a time: only the given ones are read
            frames, actions = frames[-layout.history :], actions[-layout.history :]
        for frame_BN, action_BA in zip(frames, actions, strict=True):
            parts += [frame_BN, action_BA + layout.action_start]
        if layout.markers:
            parts.append(np.full((len(frames[0]), 1), layout.bos))
        return [tuple(row) for row in np.concatenate(parts, 1).tolist()]

    def _pictures(self) -> np.ndarray:
        codes = torch.from_numpy(self.frames[-1]).to(self.decoder.device)[:, None]
        with self.decoder.autocast():
            return to_frames(self.decoder.tokenizer.detokenize(Codes(codes), self.cache)[:, 0].float())


def run_policy(
    simulator: WorldModelSimulator,
    policies: Sequence[VideoPolicy],
    first_BHW3: np.ndarray,
    instructions: Sequence[str],
    frames: int,
    ending: Ending | None,
    to_end: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Imagined episodes, uint8 [B, frames, H, W, 3], and how many frames each policy saw until it said done; from then
    on it stands still. Once all are done the last frame is repeated; with `to_end` it is imagined on, as then a last
    frame does not depend on when others are done.
    """
    seen = [simulator.reset(first_BHW3)]
    done = np.zeros(len(first_BHW3), bool)
    lasted = np.full(len(first_BHW3), frames)
    for _ in range(frames - 1):
        actions = np.stack([p.act(f, text) for p, f, text in zip(policies, seen[-1], instructions, strict=True)])
        if ending is not None:
            said = ending.said(actions) & ~done
            lasted[said], done = len(seen), done | said
            actions[done] = ending.still(actions.shape[1])
        seen.append(simulator.step(actions))
        if done.all() and not to_end:
            break
    while len(seen) < frames:
        seen.append(seen[-1])
    return np.stack(seen, 1), lasted


@dataclass(frozen=True)
class Agreement:
    """How two sets of success rates agree. Pearson's r is NaN where one of them does not vary."""

    r: float
    mmrv: float
    gap: float


def agreement(real: Sequence[float], model: Sequence[float]) -> Agreement:
    """Pearson's r, mean maximum rank violation, mean absolute gap.

    A violation is a pair that the model ranks the other way than reality; it weighs the real difference of the pair.
    """
    return Agreement(*(float(value[0]) for value in _agreements(np.asarray([real], float), np.asarray([model], float))))


def _agreements(x_SK: np.ndarray, y_SK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for S pairs of sets at once."""
    dx, dy = x_SK - x_SK.mean(1, keepdims=True), y_SK - y_SK.mean(1, keepdims=True)
    norm = np.sqrt((dx**2).sum(1) * (dy**2).sum(1))
    r = np.divide((dx * dy).sum(1), norm, out=np.full(len(norm), math.nan), where=norm > 0)
    wrong = (x_SK[:, :, None] < x_SK[:, None, :]) != (y_SK[:, :, None] < y_SK[:, None, :])
    mmrv = (np.abs(x_SK[:, :, None] - x_SK[:, None, :]) * wrong).max(2).mean(1)
    return r, mmrv, np.abs(x_SK - y_SK).mean(1)


@dataclass(frozen=True)
class Rate:
    """A success rate: so many of n episodes, or, where nobody says of how many (n = 0), taken as exact."""

    value: float
    n: int = 0

    def draws(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Rates that would explain it: from Jeffreys' posterior, which stays honest where all episodes agree."""
        wins = self.value * self.n
        return rng.beta(wins + 0.5, self.n - wins + 0.5, count) if self.n else np.full(count, self.value)

    def to_cell(self) -> Any:
        return proportion(round(self.value * self.n), self.n).to_cell() if self.n else self.value


def agreement_cells(real: Sequence[Rate], model: Sequence[Rate], seed: int) -> list[Any]:
    """r, MMRV and gap with 95 % intervals that say how far the episodes decide them; the policies and tasks are
    taken as given.
    """
    found = agreement([x.value for x in real], [y.value for y in model])
    rng = np.random.default_rng(seed)
    drawn = [np.stack([rate.draws(rng, DRAWS) for rate in rates], 1) for rates in (real, model)]
    cells: list[Any] = []
    for value, several in zip((found.r, found.mmrv, found.gap), _agreements(*drawn), strict=True):
        if math.isnan(value) or np.isnan(several).all():
            cells.append("no spread" if math.isnan(value) else value)
            continue
        low, high = np.nanquantile(several, (0.025, 0.975))
        n = sum(rate.n for rate in model)
        cells.append(Estimate(value, min(value, float(low)), max(value, float(high)), n).to_cell())
    return cells


def policy_seed(seed: int, episode: int) -> int:
    """The same policy noise in the simulator and in every model."""
    return fold(seed, episode) >> 1
