"""Web pages as an environment: precision, recall and F1 of the items that are said to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ...data.trajectory import Invalid
from ..evaluation import TEST, Evaluation, percent, points, verdict
from ..language import Domain, Question, RewardKind, read_pair
from ..language_tasks import Line, QuestionTasks
from ..statistics import Estimate
from . import evaluate as pages
from .data import load_transitions, page_pair
from .prompt import PageTransition, bare_page_prompt, page_prompt


class WebPageTasks(QuestionTasks):
    """Questions about web pages."""

    domain: ClassVar[Domain] = "web-page"
    columns: ClassVar[list[str]] = pages.COLUMNS
    reward: RewardKind = "f1"

    @property
    def style(self) -> Callable[[PageTransition], str]:
        """How the data stage writes questions."""
        return page_prompt if self.made.settings["prompt"] == "full" else bare_page_prompt

    def example(self) -> Question:
        return read_pair(page_pair(load_transitions(self.made.settings["transitions"])[0], self.style, "train"))

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
