"""Planning with a world model: in every state actions are sampled, the commonest are imagined, the pages they lead to
are valued, and the first action of the best plan is taken. All live episodes go through the samplers together.

World models predict the page as an accessibility tree; the true world also gives the simplified HTML, which a deeper
plan's actor reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from ...core.rng import fold
from ...data.trajectory import Invalid
from ..language import readable
from ..rollout.concurrent import run_all
from ..rollout.sampler import Sample, Sampler, SampleRequest, SamplingParams
from ..web_pages.tree import items_f1
from ..worlds.web.actions import parse_call
from .episode import WebEpisode
from .plan_config import PlanArm

RETRIES = 2  # of a request that the sampler could not answer
WORKERS, STEP_S = 4, 120.0


@dataclass(frozen=True)
class Candidate:
    """An action that was sampled: its canonical text, what the model wrote for it first, and how often it came."""

    action: str
    response: str
    ids: tuple[int, ...]
    count: int

    @property
    def over(self) -> bool:
        return self.action.startswith("exit(")


@dataclass(frozen=True)
class PredictedPage:
    """A page that is expected after an action. `html` is None where the world model tells the tree alone."""

    tree: str
    html: str | None = None


@dataclass(frozen=True)
class Imagined:
    """A state in thought: the episode it starts from, the actions taken in thought, and the page that is expected."""

    episode: WebEpisode
    path: tuple[Candidate, ...]
    pages: tuple[PredictedPage, ...]  # the true one first, then one for every action

    @property
    def page(self) -> PredictedPage:
        return self.pages[-1]

    @property
    def intent(self) -> str:
        assert self.episode.world.task is not None
        return self.episode.world.task.intent

    @property
    def over(self) -> bool:
        """An exit was taken; `page` is the one it was decided on."""
        return bool(self.path) and self.path[-1].over


class WorldModel(Protocol):
    """Predicts the page after an action, for many states at once. A fault of the machinery is Invalid."""

    def predict(self, asked: Sequence[tuple[Imagined, Candidate]]) -> list[PredictedPage | Invalid]: ...


Value = Callable[[Sequence[Imagined]], list[float]]  # how good it is to be there; higher is better


@dataclass
class Tally:
    """What the planner did: decisions, how many did not follow the commonest action, pages imagined, and how many
    were exact.
    """

    decisions: int = 0
    overruled: int = 0
    imagined: int = 0
    checked: int = 0
    exact: int = 0

    def add(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def commonest(responses: Sequence[tuple[str, tuple[int, ...]]], most: int) -> list[Candidate]:
    """The `most` commonest actions, by their parsed form; of equally common ones the one that came first. Texts without
    an action do not count; where none has one, the first text stands for itself."""
    candidates: dict[str, Candidate] = {}
    for response, ids in responses:
        parsed = parse_call(response)
        if parsed.kind != "none":
            known = candidates.get(parsed.call)
            candidates[parsed.call] = (
                replace(known, count=known.count + 1) if known else Candidate(parsed.call, response, ids, 1)
            )
    if not candidates:
        return [Candidate("", responses[0][0], responses[0][1], 0)]
    return sorted(candidates.values(), key=lambda c: -c.count)[:most]


@dataclass
class Planner:
    """One arm. `params` are those of the actor's sampling."""

    arm: PlanArm
    sampler: Sampler
    params: SamplingParams
    seed: int
    world: WorldModel | None = None
    value: Value | None = None
    tally: Tally = field(default_factory=Tally)

    def play(self, episodes: Sequence[WebEpisode]) -> None:
        """All episodes to their end, in step; what went wrong is the episode's `fault`."""
        for turn in count():  # a world ends after its max_steps
            live = [e for e in episodes if e.context() is not None]
            if not live:
                return
            chosen = self._decide(live, turn)
            acting = [(e, *chosen[e.prompt_id, e.sample_index]) for e in live if e.fault is None]
            calls = [(lambda e=e, c=c: e.act(c.ids, c.response)) for e, c, _ in acting]
            for (episode, _, page), done in zip(
                acting, run_all(calls, workers=WORKERS, deadline_s=STEP_S, what="world step"), strict=True
            ):
                if isinstance(done, Invalid):
                    episode.fault = done
                elif page is not None and episode.fault is None and not episode.world.done:
                    self.tally.checked += 1
                    self.tally.exact += items_f1(page.tree, episode.world.render("accessibility")) == 1.0

    def _decide(
        self, live: Sequence[WebEpisode], turn: int
    ) -> dict[tuple[int, int], tuple[Candidate, PredictedPage | None]]:
        """The action of every episode, and the page that was expected of it where one was."""
        roots = [Imagined(e, (), (PredictedPage(e.world.render("accessibility"), e.world.html),)) for e in live]
        proposed = self._propose(roots, turn, 0)
        chosen: dict[tuple[int, int], tuple[Candidate, PredictedPage | None]] = {}
        open_: list[tuple[Imagined, list[Candidate]]] = []
        for root, candidates in zip(roots, proposed, strict=True):
            if not candidates:  # the sampler failed
                continue
            self.tally.decisions += 1
            chosen[_name(root)] = (candidates[0], None)
            stops = [c for c in candidates if c.over] if self.arm.stop == "at_once" and self.world is not None else []
            if stops:
                chosen[_name(root)] = (stops[0], None)
            elif self.world is not None and candidates[0].action:
                open_.append((root, candidates))
        if open_:
            for root, best in zip((r for r, _ in open_), self._look_ahead(open_, turn), strict=True):
                if best is not None:
                    chosen[_name(root)] = best
        for root, candidates in zip(roots, proposed, strict=True):
            self.tally.overruled += bool(candidates) and chosen[_name(root)][0] is not candidates[0]
        return chosen

    def _look_ahead(
        self, open_: Sequence[tuple[Imagined, list[Candidate]]], turn: int
    ) -> list[tuple[Candidate, PredictedPage | None] | None]:
        """For every root the first action of the best plan: the highest value of any state on it, then the sooner,
        then the commoner.
        """
        assert self.world is not None and self.value is not None
        best: dict[tuple[int, int], tuple[tuple[float, int, int], Candidate, PredictedPage]] = {}
        frontier = list(open_)
        for depth in range(1, self.arm.horizon + 1):
            reached = self._expand(frontier)
            for state, worth in zip(reached, self.value(reached) if reached else [], strict=True):
                first, name = state.path[0], _name(state)
                rank = (worth, -depth, first.count)
                if name not in best or rank > best[name][0]:
                    best[name] = (rank, first, state.pages[1])
            if depth < self.arm.horizon:
                onward = [s for s in reached if not s.over and s.episode.fault is None]
                frontier = [
                    (s, c) for s, c in zip(onward, self._propose(onward, turn, depth), strict=True) if c and c[0].action
                ]
        ahead: list[tuple[Candidate, PredictedPage | None] | None] = []
        for root, _ in open_:
            chosen = best.get(_name(root))
            ahead.append((chosen[1], None if chosen[1].over else chosen[2]) if chosen else None)
        return ahead

    def _expand(self, frontier: Sequence[tuple[Imagined, list[Candidate]]]) -> list[Imagined]:
        """Every state after each of its candidates, in one call of the world model. An exit leads nowhere: its page
        stays.
        """
        assert self.world is not None
        asked = [(state, c) for state, candidates in frontier for c in candidates if not c.over]
        pages = iter(self.world.predict(asked) if asked else [])
        self.tally.imagined += len(asked)
        reached = []
        for state, candidates in frontier:
            for c in candidates:
                page = state.page if c.over else next(pages)
                if isinstance(page, Invalid):
                    state.episode.fault = page
                else:
                    reached.append(Imagined(state.episode, (*state.path, c), (*state.pages, page)))
        return [s for s in reached if s.episode.fault is None]

    def _propose(self, states: Sequence[Imagined], turn: int, depth: int) -> list[list[Candidate]]:
        """The commonest actions in every state, all sampled in one call; none where the sampler failed, which is the
        episode's fault.
        """
        prompts = []
        for state in states:
            episode = state.episode
            if depth == 0:
                prompts.append(episode.asked)
            else:
                answers = [ids for _, ids, _, _, _ in episode.rounds] + [c.ids for c in state.path]
                prompts.append(episode.prompter.round(state.intent, answers, state.page.html or "")[0])
        places: dict[tuple[int, int], int] = {}
        requests, owners = [], []
        for number, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
            branch = places[_name(state)] = places.get(_name(state), -1) + 1
            for k in range(self.arm.samples):
                key = (self.seed, *_name(state), fold(turn, depth, branch, k) >> 1)
                requests.append(SampleRequest(prompt, key, self.params))
                owners.append(number)
        drawn: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in states]
        for number, answer in zip(owners, sample_all(self.sampler, requests), strict=True):
            if isinstance(answer, Invalid):
                states[number].episode.fault = answer
            else:
                prompter = states[number].episode.prompter
                drawn[number].append((readable(prompter.tokenizer, prompter.action(answer.ids)), answer.ids))
        return [
            commonest(d, self.arm.branching) if d and s.episode.fault is None else []
            for d, s in zip(drawn, states, strict=True)
        ]


def sample_all(sampler: Sampler, requests: list[SampleRequest]) -> list[Sample | Invalid]:
    """Every request answered, those that failed asked again within the budget."""
    answers = sampler.generate(requests) if requests else []
    for _ in range(RETRIES):
        failed = [i for i, a in enumerate(answers) if isinstance(a, Invalid)]
        if not failed:
            break
        for i, answer in zip(failed, sampler.generate([requests[i] for i in failed]), strict=True):
            answers[i] = answer
    return answers


def _name(state: Imagined) -> tuple[int, int]:
    return state.episode.prompt_id, state.episode.sample_index
