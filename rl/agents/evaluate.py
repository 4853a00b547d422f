"""Scores of agents on fixed seeds: Pass@1 and Pass@k with intervals over seeds, what their turns did, how well they
know states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.packing import TrainSequence, pack, unpack
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Trajectory
from ..chat import chat_of
from ..statistics import Estimate, mean, mean_change, mean_share
from ..tasks import Scorer
from ..worlds.baselines import ceiling, pass_at_k, random_policy
from ..worlds.tasks import Task
from .episode import AgentEpisode, AgentSettings
from .rollout import Instance


@dataclass(frozen=True)
class AgentScores:
    """What one agent did on the validation seeds. `wins` holds (successes, valid samples) of every seed that has any,
    and `seeds` which those are.
    """

    wins: list[tuple[int, int]]
    seeds: list[int]
    effective: Estimate
    tokens: Estimate
    format_ok: Estimate
    actions: Estimate
    invalid: int

    def passes(self, k: int) -> Estimate:
        """Pass@k over the seeds that have k valid samples; the interval is that of drawing other seeds."""
        return mean_share([pass_at_k(c, n, k) for c, n in self.wins if n >= k])


def summarise(trajectories: Sequence[Trajectory]) -> AgentScores:
    """Group by prompt; Invalid samples are counted and left out."""
    valid = [t for t in trajectories if not isinstance(t.reward, Invalid)]
    prompts = sorted({t.prompt_id for t in valid})
    by_prompt = {p: [bool(t.info["success"]) for t in valid if t.prompt_id == p] for p in prompts}

    def over(name: str, average: Callable[[Sequence[float]], Estimate] = mean) -> Estimate:
        groups = [[float(t.info[name]) for t in valid if t.prompt_id == p] for p in prompts]
        return average([sum(g) / len(g) for g in groups])

    return AgentScores(
        [(sum(by_prompt[p]), len(by_prompt[p])) for p in prompts],
        prompts,
        over("action_is_effective", mean_share),
        over("response_tokens"),
        over("format_ok", mean_share),
        over("num_actions"),
        len(trajectories) - len(valid),
    )


def difference(after: AgentScores, before: AgentScores, k: int = 1) -> Estimate:
    """The change of Pass@k, paired by seed, over the seeds that have k valid samples of both."""
    one, other = (dict(zip(scores.seeds, scores.wins, strict=True)) for scores in (after, before))
    pairs = [(wins, other[seed]) for seed, wins in one.items() if seed in other]
    return mean_change([pass_at_k(*a, k) - pass_at_k(*b, k) for a, b in pairs if min(a[1], b[1]) >= k])


def state_perplexity(
    score: Scorer,
    instances: Sequence[Instance],
    tokenizer: Tokenizer,
    settings: AgentSettings,
    *,
    coordinates: bool,
    alone: bool,
) -> float:
    """exp of the mean negative log-probability of the first state's tokens, as it stands in the first prompt, or
    `alone`: after no prompt at all but one token. NaN where the world has no coordinates to show."""
    mode = "text_with_coordinates" if coordinates else "text"
    shown = AgentSettings(fmt=settings.fmt, coordinates=coordinates, prompt=settings.prompt)
    rows, spans = [], []
    for instance in instances:
        if mode not in instance.task.make().render_modes:
            return math.nan
        episode = AgentEpisode(instance.task, instance.seed, 0, 0, tokenizer, chat_of(tokenizer), shown)
        context = episode.context()
        assert context is not None
        state = tokenizer.encode(episode.states[0])
        if alone:
            begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
            context, at = (begin, *state), 1
        else:
            at = _find(context, state, tokenizer, episode.states[0])
        rows.append(TrainSequence(np.asarray(context, np.int64)))
        spans.append((max(at, 1), at + len(state)))
    batches = pack(rows, budget=max(8192, max(len(r.ids) for r in rows)))
    logprobs = unpack(batches, score(batches))
    total = [logprobs[i][a:b] for i, (a, b) in enumerate(spans)]
    return math.exp(-float(np.concatenate(total).mean()))


def _find(context: Sequence[int], state: Sequence[int], tokenizer: Tokenizer, text: str) -> int:
    """Where the state's ids stand in the context: the last place from which they decode to its text."""
    for at in range(len(context) - 1, -1, -1):
        if tokenizer.decode(list(context[at : at + len(state)])).strip() == text.strip():
            return at
    # pieces of a learnt tokenizer may join the state's edges with their surroundings: take the shortest window that
    # holds it
    for size in range(len(state) + 1, len(state) + 5):
        for at in range(len(context) - size, -1, -1):
            if text.strip() in tokenizer.decode(list(context[at : at + size])):
                return at
    raise ValueError("the state was not found in its own prompt")


def baseline_rows(
    task: Task, seeds: Sequence[int], k: int, rollouts: int = 100
) -> list[tuple[str, str, Estimate, Estimate]]:
    """(name, kind, Pass@1, Pass@k) of the random policy and of the ceiling where one is known."""
    passes = random_policy(task, seeds, rollouts, (1, k))
    rows = [(f"random policy, {rollouts} rollouts a seed", "baseline", passes[1], passes[k])]
    best = ceiling(task, seeds)
    if best is not None:
        top = Estimate(best, best, best, len(seeds))
        rows.append((f"ceiling within {task.max_actions} actions", "ceiling", top, top))
    return rows
