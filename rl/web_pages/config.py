"""Settings of web pages as an environment. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..language_config import QuestionSettings


@dataclass(frozen=True, kw_only=True)
class WebPageEnvironment(QuestionSettings):
    """A world model of web pages: page and action in, the list of changes out, rewarded by the F1 of its items."""

    kind: Literal["web-page"]
    transitions: str | None = None  # a JSONL file of recorded transitions; without one those that ship are taken
    unseen_pages: list[str] = field(default_factory=list)  # urls never trained on, evaluated on their own
    # record transitions on the recipe's web sites instead, in as many training tasks as the collect stage has prompts
    sites: bool = False
    others: int = 3  # on sites: random actions tried in every state, beside the oracle's
    heldout_every: int = 5  # every so many-th episode is held out
    tasks: ClassVar[str] = "web_pages.tasks:WebPageTasks"
    making: ClassVar[tuple[str, ...]] = (
        *QuestionSettings.making,
        *("transitions", "unseen_pages", "sites", "others", "heldout_every"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heldout_every < 2:
            raise ValueError("heldout_every: at least 2, or nothing is left to train on")
        if self.in_shards + self.sites + (self.transitions is not None) > 1 or self.others < 0:
            raise ValueError("transitions: give one of transitions, sites and shards at most; others is 0 or more")
