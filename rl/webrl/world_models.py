"""World models and values for planning on web pages: the true world, one that is often wrong, a language model;
progress on the oracle's way, a critic, a language model's scores."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.rng import fold, uniform
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid
from ..language import prompt_ids, readable
from ..rewards.web_page import read_sections
from ..rollout.sampler import Sampler, SampleRequest, SamplingParams
from ..web_pages.assignment import assign
from ..web_pages.changes import pair_cost
from ..web_pages.prompt import PageTransition
from ..web_pages.tree import BadTree, Node, items_f1, parse_line, parse_tree, write_tree
from ..worlds.base import attempt
from ..worlds.web.actions import WebAction, parse_call
from ..worlds.web.elements import Page
from ..worlds.web.generate import SiteTask
from ..worlds.web.observe import accessibility_nodes
from ..worlds.web.world import WebWorld
from .planning import Candidate, Imagined, PredictedPage, WorldModel, sample_all

SHARP = 8.0  # a page that has half of another's items is hardly like it: pages of one site share their menu


def brackets(action: WebAction, page: Page) -> str:
    """An action on the page as accessibility-tree agents write it; an element that the tree leaves out has no id
    there.
    """
    number = 0
    if action.element is not None and action.element in page.labels:
        wanted = page.labels[action.element]
        nodes, elements = accessibility_nodes(page)
        same = [n for n in nodes if elements[n.id] is wanted]
        number = next((n.id for n in same if n.role != "StaticText"), same[0].id if same else 0)
    match action.kind:
        case "click" | "hover" | "right_click":
            return f"{'hover' if action.kind == 'hover' else 'click'} [{number}]"
        case "type" | "search" | "select":
            return f"type [{number}] [{action.text}] [{int(action.kind == 'search')}]"
        case "press":
            return f"press [{action.text or 'Enter'}]"
        case "scroll_up" | "scroll_down":
            return f"scroll [{action.kind.removeprefix('scroll_')}]"
        case "back" | "forward":
            return f"go_{action.kind}"
        case "switch_tab":
            return f"tab_focus [{action.text}]"
        case "exit":
            return f"stop [{action.text}]"
        case _:
            return action.kind


def apply_changes(tree: str, answer: str) -> str | None:
    """The page after a list of changes: deleted items go, updated ones take the place of the item most like them, new
    ones come last. None where the answer is no list of changes. A list names items as they are afterwards, so where ids
    move the place is a guess."""
    sections = read_sections(answer, "strict")
    if isinstance(sections, str):
        return None
    new, gone, updated = sections[0], Counter(sections[1]), sections[2]
    try:
        fresh, changed = [parse_line(line) for line in new], [parse_line(line) for line in updated]
    except BadTree:
        return None
    kept: list[Node] = []
    for node in parse_tree(tree):
        if gone[node.line]:
            gone[node.line] -= 1
        else:
            kept.append(node)
    for role in {node.role for node in changed}:
        places = [i for i, node in enumerate(kept) if node.role == role]
        matching = [node for node in changed if node.role == role][: len(places)]
        if matching:
            costs = np.array([[pair_cost(kept[i], node) for i in places] for node in matching])
            for node, column in zip(matching, assign(costs), strict=True):
                old = kept[places[column]]
                kept[places[column]] = Node(old.id, node.role, node.name, node.properties, old.depth)
    kept += [Node(n.id, n.role, n.name, n.properties, 1) for n in fresh]
    return write_tree([Node(i, n.role, n.name, n.properties, n.depth if i > 1 else 0) for i, n in enumerate(kept, 1)])


@dataclass
class TrueWorld:
    """The perfect world model: a spare world goes to the episode's state by its snapshot, and acts there."""

    make: Callable[[], WebWorld]
    spare: WebWorld | None = None

    def predict(self, asked: Sequence[tuple[Imagined, Candidate]]) -> list[PredictedPage | Invalid]:
        return [attempt(self._after, state, candidate) for state, candidate in asked]

    def _after(self, state: Imagined, candidate: Candidate) -> PredictedPage:
        if self.spare is None:
            self.spare = self.make()
        world, before = self.spare, state.episode.world.snapshot()
        world.restore({**before, "actions": [*before["actions"], *(c.response for c in state.path)]})
        if not world.done:  # a limit of the episode may end it on the way
            world.step(candidate.response)
        return PredictedPage(world.render("accessibility"), world.html)


@dataclass
class CorruptedWorld:
    """A world model that gives another page with probability `wrong`: one of those that the oracle sees in other tasks
    of the site. The same action in the same state always gives the same page."""

    inner: WorldModel
    elsewhere: Mapping[str, Sequence[PredictedPage]]  # by site
    wrong: float
    seed: int

    def predict(self, asked: Sequence[tuple[Imagined, Candidate]]) -> list[PredictedPage | Invalid]:
        found = self.inner.predict(asked)
        for i, (state, candidate) in enumerate(asked):
            others = self.elsewhere[state.episode.task.task.sites[0]]
            key = "\0".join(
                [state.intent, *state.episode.world.actions, *(c.action for c in state.path), candidate.action]
            )
            number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
            if uniform(self.seed, number) < self.wrong and not isinstance(found[i], Invalid):
                found[i] = others[fold(self.seed, number, 1) % len(others)]
        return found


@dataclass
class LanguageWorld:
    """A language model that was trained on page changes, behind a sampler. An answer that is no list of changes
    counts as no change.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    prompt: Callable[[PageTransition], str]
    params: SamplingParams
    seed: int
    multiple: int = 1  # prompts are padded to this, as in training
    unreadable: int = 0
    # actions as the tree's ids name them, by episode and turn
    written: dict[tuple[int, int, int, str], str] = field(default_factory=dict)

    def predict(self, asked: Sequence[tuple[Imagined, Candidate]]) -> list[PredictedPage | Invalid]:
        requests = []
        for k, (state, candidate) in enumerate(asked):
            world, name = state.episode.world, (state.episode.prompt_id, state.episode.sample_index)
            turn = len(world.actions)
            before = self.written.get((*name, turn - 1, world.actions[-1]), "") if turn else ""
            action = self.written[*name, turn, candidate.response] = brackets(
                parse_call(candidate.response), world.page
            )
            text = self.prompt(PageTransition(world.page.url, state.intent, before, state.page.tree, action, ""))
            key = (self.seed, *name, fold(turn, k) >> 1)
            requests.append(SampleRequest(prompt_ids(self.tokenizer, text, self.multiple), key, self.params))
        found: list[PredictedPage | Invalid] = []
        for (state, _), answer in zip(asked, sample_all(self.sampler, requests), strict=True):
            if isinstance(answer, Invalid):
                found.append(answer)
                continue
            ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.tokenizer.stop_ids else answer.ids
            tree = apply_changes(state.page.tree, readable(self.tokenizer, ids))
            self.unreadable += tree is None
            found.append(PredictedPage(state.page.tree if tree is None else tree))
        return found


def oracle_pages(world: WebWorld, task: SiteTask) -> list[PredictedPage]:
    """The pages that the oracle sees, from the start to the one where it ends."""
    world.open_task(task.task, task.steps)
    found = []
    while not world.done:
        found.append(PredictedPage(world.render("accessibility"), world.html))
        world.step(world.demonstrate())
    return found


@dataclass
class Progress:
    """How far the expected page is on the oracle's way: (place + 1) / (pages + 1), less for a page that is only alike;
    an exit is worth 1 on the last page and 0 elsewhere. It reads the expected page alone, so it is as good as the world
    model."""

    ways: Mapping[str, Sequence[PredictedPage]]  # of the oracle, by task id
    known: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)

    def __call__(self, states: Sequence[Imagined]) -> list[float]:
        return [self._worth(state) for state in states]

    def _worth(self, state: Imagined) -> float:
        task = state.episode.task.task.task_id
        key = (task, state.page.tree)
        way = self.ways[task]
        if key not in self.known:
            marks = [
                ((i + 1) / (len(way) + 1) * items_f1(page.tree, state.page.tree) ** SHARP, i)
                for i, page in enumerate(way)
            ]
            self.known[key] = max(marks)
        worth, place = self.known[key]
        if state.over:
            return float(place == len(way) - 1 and worth == len(way) / (len(way) + 1))
        return worth


@dataclass
class CriticValue:
    """A critic's value of the state that would follow: the next round's prompt with the expected page."""

    score: Callable[[list[tuple[int, ...]]], list[float]]

    def __call__(self, states: Sequence[Imagined]) -> list[float]:
        prompts = []
        for state in states:
            episode = state.episode
            answers = [ids for _, ids, _, _, _ in episode.rounds] + [c.ids for c in state.path]
            assert state.page.html is not None
            prompts.append(episode.prompter.round(state.intent, answers, state.page.html)[0])
        return self.score(prompts)


ASK = """You value the state of a web agent. You see its task, what it has done, the page it is on, \
the action it considers, and the page
that is expected after it. How near to done is the task then? Give the reason in one sentence, \
then end with [Score] and a number between 0
and 1.

OBJECTIVE: {intent}
PREVIOUS ACTIONS: {before}
CURRENT OBSERVATION:
{page}
CURRENT ACTION: {action}
NEXT STATE PREDICTION:
{expected}
"""
_SCORE = re.compile(r"\[Score\]:?\s*(\d(?:\.\d+)?)")


@dataclass
class SampledValue:
    """A language model's scores: the mean of those that can be read, of `budget` answers; 0 where none can."""

    sampler: Sampler
    tokenizer: Tokenizer
    params: SamplingParams
    seed: int
    budget: int = 20
    unreadable: int = 0

    def __call__(self, states: Sequence[Imagined]) -> list[float]:
        requests = []
        for number, state in enumerate(states):
            done = [*state.episode.world.actions, *(c.action for c in state.path[:-1])]
            text = ASK.format(
                intent=state.intent,
                before="; ".join(done) or "None",
                page=state.pages[-2].tree,
                action=state.path[-1].action,
                expected=state.page.tree,
            )
            ids = prompt_ids(self.tokenizer, text)
            for k in range(self.budget):
                key = (self.seed, state.episode.prompt_id, state.episode.sample_index, fold(len(done), number, k) >> 1)
                requests.append(SampleRequest(ids, key, self.params))
        answers = sample_all(self.sampler, requests)
        worths = []
        for number, state in enumerate(states):
            votes = answers[number * self.budget : (number + 1) * self.budget]
            fault = next((a for a in votes if isinstance(a, Invalid)), None)
            if fault is not None:
                state.episode.fault = fault
            scores = [
                s
                for a in votes
                if not isinstance(a, Invalid) and (s := read_score(readable(self.tokenizer, a.ids))) is not None
            ]
            self.unreadable += self.budget - len(scores)
            worths.append(sum(scores) / len(scores) if scores else 0.0)
        return worths


def read_score(text: str) -> float | None:
    """The last score of an answer, where it lies between 0 and 1."""
    found = _SCORE.findall(text)
    return float(found[-1]) if found and 0 <= float(found[-1]) <= 1 else None
