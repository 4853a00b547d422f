"""Our small web pages as worlds: the true ones in Chromium, and those that a world model imagines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...data.trajectory import Invalid
from ..rewards.web_page import read_sections
from ..worlds.base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from ..worlds.web.backend import Limits
from ..worlds.web.browser import acquire, find_chromium, release
from .changes import pair_cost
from .prompt import PageTransition
from .record import APPS, LivePage, random_action
from .tree import BadTree, Node, parse_line, parse_tree, write_tree

OBJECTIVE = "explore"  # as the transitions were recorded: a page has no goal, so every reward is 0
ACTIONS = "click [id] or type [id] [text] [0]"
LONGEST = 14  # actions of an episode, as they were recorded
Predict = Callable[[PageTransition], "str | Invalid"]  # the page and the action -> the list of changes


@dataclass(frozen=True)
class PageConfig:
    """Which of the pages in pages.html it is."""

    app: str = APPS[0]


class PageWorld(World):
    """A page in Chromium, which starts with the first episode. A snapshot is the actions so far, which are repeated."""

    name = "web-page"
    Config = PageConfig

    def __init__(self, app: str = PageConfig.app, deadline_s: float = 60.0) -> None:
        if app not in APPS:
            raise WorldFault(f"{app!r} is no page; the pages are {', '.join(APPS)}")
        self.app, self.limits = app, Limits(deadline_s=deadline_s)
        self.held: tuple[Any, Any] | None = None  # the thread's browser and its key
        self.live: LivePage | None = None
        self.seed = 0
        self.actions: list[str] = []
        self.nodes: list[Node] = []

    @contextmanager
    def _page(self, what: str) -> Iterator[LivePage]:
        """The page, in a browser that is still there; every call into it ends by the deadline."""
        if self.held is not None and not self.held[1].connected:
            self.close()
        if self.held is None:
            self.held, self.live = acquire(find_chromium(), self.limits, False), None
        browser = self.held[1]
        try:
            with browser.watch(self.limits.deadline_s, browser.kill):
                if self.live is None:
                    self.live = LivePage(browser.browser.new_page())
                yield self.live
        except Exception as error:
            raise WorldFault(f"{self.name} {self.app}: {what} failed in the browser: {str(error)[:300]}") from error

    def reset(self, seed: int, sample: int = 0) -> str:
        with self._page("reset") as live:
            self.nodes = live.open(self.app, seed)
        self.seed, self.actions = seed, []
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.nodes or None)
        before = self.nodes
        with self._page("step") as live:
            known = live.act(str(action))
            self.nodes = live.look()
        self.actions.append(str(action))
        info = {"action_is_valid": float(known), "action_is_effective": float(before != self.nodes)}
        return StepResult(self.render(), 0.0, False, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.nodes or None)
        return write_tree(self.nodes)

    def random_action(self, rng: random.Random) -> str:
        return random_action(self.nodes, rng) or "click [0]"

    def snapshot(self) -> Snapshot:
        check_started(self, self.nodes or None)
        return {"app": self.app, "seed": self.seed, "actions": list(self.actions)}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("app") != self.app:
            raise WorldFault(f"a snapshot of {snapshot.get('app')!r} cannot be restored in {self.app!r}")
        self.reset(int(snapshot["seed"]))
        for action in snapshot["actions"]:
            self.step(str(action))

    def close(self) -> None:
        """Close the page, and the browser with the last of them."""
        held, live, self.held, self.live = self.held, self.live, None, None
        if held is None:
            return
        key, browser = held
        try:
            if live is not None and browser.connected:
                with browser.watch(self.limits.deadline_s, browser.kill):
                    live.page.close()
        finally:
            release(key, browser)


def page_after(nodes: list[Node], answer: str) -> list[Node] | None:
    """The page that a list of changes makes of this one; None where it is no such list.

    The list does not say where a new item is: those are put at the end, right below the root.
    """
    sections = read_sections(answer, "strict")
    if isinstance(sections, str):
        return None
    try:
        new, deleted, updated = ([parse_line(line) for line in part.elements()] for part in sections)
    except BadTree:
        return None
    gone, changed = {node.id for node in deleted}, {node.id: node for node in updated}
    for node in list(changed.values()):  # a browser may number an item anew: then it is the one that is most like it
        if all(old.id != node.id for old in nodes):
            like = [old for old in nodes if old.role == node.role and old.id not in gone and old.id not in changed]
            if like:
                changed[min(like, key=lambda old: pair_cost(old, node)).id] = node
    kept: list[Node] = []
    above: list[tuple[int, bool]] = []  # of the items around this one: the depth, and whether it stays
    for node in nodes:
        while above and above[-1][0] >= node.depth:
            above.pop()
        stays = node.id not in gone
        if stays:
            kept.append(replace(changed.get(node.id, node), depth=sum(there for _, there in above)))
        above.append((node.depth, stays))
    known = {node.id for node in kept}
    for node in new:
        if node.id not in known:
            known.add(node.id)
            kept.append(replace(node, depth=1 if kept else 0))
    return kept or None


class ImaginedPage(World):
    """A page as a world model imagines it: only the start is true. An unreadable answer leaves it as it was."""

    name = "imagined-web-page"
    Config = PageConfig

    def __init__(self, true: World, url: str, predict: Predict) -> None:
        self.true, self.url, self.predict, self.previous = true, url, predict, ""
        self.nodes: list[Node] = []

    def reset(self, seed: int, sample: int = 0) -> str:
        self.nodes, self.previous = parse_tree(self.true.reset(seed, sample)), ""
        return self.render()

    def step(self, action: Action) -> StepResult:
        page = self.render()
        answer = self.predict(PageTransition(self.url, OBJECTIVE, self.previous, page, str(action), page))
        if isinstance(answer, Invalid):
            raise WorldFault(f"the world model gave no answer: {answer.reason}")
        after = page_after(self.nodes, answer)
        changed = after is not None and after != self.nodes
        self.nodes, self.previous = after or self.nodes, str(action)
        info = {"action_is_effective": float(changed), "readable": float(after is not None)}
        return StepResult(self.render(), 0.0, False, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.nodes or None)
        return write_tree(self.nodes)

    def snapshot(self) -> Snapshot:
        return {"url": self.url, "page": self.render(), "previous": self.previous}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("url") != self.url:
            raise WorldFault(f"a snapshot of {snapshot.get('url')!r} cannot be restored in {self.url!r}")
        self.nodes, self.previous = parse_tree(snapshot["page"]), str(snapshot["previous"])
