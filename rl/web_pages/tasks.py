"""Web pages as an environment: precision, recall and F1 of the items that are said to change."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ...core.errors import ConfigError
from ...data.trajectory import Invalid
from ..evaluation import TEST, Evaluation, percent, points, verdict
from ..language import Domain, Question, RewardKind, read_pair
from ..language_data import write_parts
from ..language_tasks import PARTS, Line, QuestionTasks
from ..statistics import Estimate
from ..webrl.config import WebSiteEnvironment
from . import evaluate as pages
from .config import WebPageEnvironment
from .data import load_transitions, page_pair, split_pages
from .prompt import PageTransition, bare_page_prompt, page_prompt

IDS = r"\[\d+\]"  # of the page's items: one piece each, to be copied


class WebPageTasks(QuestionTasks):
    """Questions about web pages."""

    domain: ClassVar[Domain] = "web-page"
    columns: ClassVar[list[str]] = pages.COLUMNS
    reward: RewardKind = "f1"
    settings: WebPageEnvironment

    @property
    def style(self) -> Callable[[PageTransition], str]:
        """How questions are written."""
        return bare_page_prompt if self.settings.prompt == "bare" else page_prompt

    def example(self) -> Question:
        return read_pair(page_pair(self._loaded()[0], self.style, "train"))

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        """Split the recorded transitions, and write the questions."""
        chosen = self.settings
        if chosen.in_shards:
            return super().make(guard)
        steps = self._recorded() if chosen.sites else self._loaded()
        split = split_pages(steps, every=chosen.heldout_every, unseen=chosen.unseen_pages)
        parts = split.train, split.test, split.unseen_pages
        guard()
        changed = write_parts(self.made, parts, lambda step, name: page_pair(step, self.style, name), IDS)
        counts: dict[str, int] = {}
        for name, members in zip(PARTS, parts, strict=True):
            counts |= {f"{name}_rows": len(members), f"{name}_changed": changed[name]}
        return counts | {"pad_prompts_to": self.multiple}

    def _loaded(self) -> list[PageTransition]:
        """Transitions of the file, or those that ship."""
        steps = load_transitions(self.settings.transitions)
        known = dict.fromkeys(step.url for step in steps)
        for url in self.settings.unseen_pages:
            if url not in known:
                some = ", ".join([*known][:6])
                raise ConfigError(f"env.unseen_pages: no transition is of '{url}'; there are {some}")
        return steps

    def _recorded(self) -> list[PageTransition]:
        """Transitions of training tasks on the recipe's web sites: the oracle's actions, and random ones."""
        from ..webrl.sites import make_world, pool_of
        from ..webrl.world_data import site_transitions

        sites, made = self._sites(), self.made
        pool = [task for task in pool_of(sites) if task.steps]
        if not pool:
            raise ConfigError("env.tag: has no task with an oracle to record pages of; choose one of the local sites")
        n = min(made.settings["prompts"], len(pool))
        tasks = random.Random(f"{made.seed} {made.name}").sample(pool, n)
        return list(site_transitions(make_world(sites), make_world(sites), tasks, self.settings.others, made.seed))

    def _sites(self) -> WebSiteEnvironment:
        if not isinstance(self.made.env, WebSiteEnvironment):
            raise ConfigError("env: pages are recorded on the recipe's web sites; give it env: {kind: web-site, ...}")
        if self.made.settings.get("prompts") is None:
            raise ConfigError(f"stages: {self.made.name}.prompts: name it, the number of tasks to record pages of")
        return self.made.env

    def require_source(self) -> None:
        if self.settings.sites:
            self._sites()
        else:
            super().require_source()

    def judge(self, asked: Sequence[Question], answers: Sequence[str | Invalid]) -> list[Any]:
        return pages.judge_pages([question.answer for question in asked], answers, self.settings.mode)

    def estimates(self, asked: Sequence[Question], judged: Sequence[Any]) -> list[Estimate]:
        return pages.scores([question.answer for question in asked], judged)

    def gains(self, asked: Sequence[Question], after: Sequence[Any], before: Sequence[Any]) -> list[Estimate]:
        return pages.gains([question.answer for question in asked], after, before)

    def table_of(self, asked: Sequence[Question], models: Sequence[Line], title: str) -> dict[str, Any]:
        return pages.table([question.answer for question in asked], models, self.settings.mode, title)

    def summary(self, evaluation: Evaluation) -> dict[str, Any]:
        assert evaluation.before and evaluation.after
        asked, judged = evaluation.tasks[TEST], evaluation.firsts(TEST)
        f1 = {name: self.estimates(asked, found)[3] for name, found in judged.items()}
        change = self.gains(asked, judged[evaluation.after], judged[evaluation.before])[3]
        empty = self.estimates(asked, self.judge(asked, [pages.NOTHING] * len(asked)))
        paragraphs = [
            f"Change {points(change)} on the same {change.n} held-out transitions that change the page. "
            "Answering that nothing "
            f"changes gets {percent(empty[3])} on these and {percent(empty[2])} on all."
        ]
        if evaluation.control:
            gap = self.gains(asked, judged[evaluation.after], judged[evaluation.control])[3]
            paragraphs.append(
                f"Control, more imitation for the same gradient tokens: {percent(f1[evaluation.control])} "
                f"(RLVR minus control {points(gap)})."
            )
        words = f"RLVR on a web-page world model, F1 of changed pages ({self.settings.mode} judge): {verdict(change)}"
        headline = f"{words} {percent(f1[evaluation.before])} -> {percent(f1[evaluation.after])}."
        return {"headline": headline, "paragraphs": paragraphs}
