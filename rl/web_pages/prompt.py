"""Transitions of web pages and the question a world model is asked about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .changes import Changes, page_changes

INSTRUCTIONS = """You predict how a web page changes. Given the page as an accessibility tree and an action in it,
tell which items of the page change.

The actions are:
click [id], hover [id]: on an element
type [id] [text] [press_enter]: text into a field; with 1 the Enter key follows
press [keys]: a key or several together
scroll [direction]: up or down
new_tab, tab_focus [index], close_tab: tabs of the browser
goto [url], go_back, go_forward: navigation
stop [answer]: the end of the task

Answer with three sections in this order, a blank line between them, one item a line as \
`[id] role 'content' key: value`:
items that appear, items that are gone, and items that stay with other content (as they are afterwards). \
A section without items holds
the line None. For example:

New items:
[31] StaticText 'Saved'

Deleted items:
None

Updated items:
[12] button 'Save' disabled: True
"""


@dataclass(frozen=True)
class PageTransition:
    """One step in a browser: a page as text, an action, and the page after it."""

    url: str
    objective: str
    previous_action: str
    observation: str
    action: str
    next_observation: str

    @classmethod
    def from_row(cls, row: Any) -> PageTransition:
        if not isinstance(row, dict):
            raise ValueError("a page transition is a JSON object")
        missing = [name for name in cls.__dataclass_fields__ if not isinstance(row.get(name), str)]
        if missing:
            raise ValueError(f"a page transition needs the text {missing[0]!r}")
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    @property
    def changes(self) -> Changes:
        """The true change list."""
        return page_changes(self.observation, self.next_observation)


def page_prompt(step: PageTransition) -> str:
    """The whole question: instructions, then the fields of this step."""
    return f"{INSTRUCTIONS}\n{bare_page_prompt(step)}"


def bare_page_prompt(step: PageTransition) -> str:
    """The fields alone, for small models that learn the format from examples."""
    return (
        f"URL: {step.url}\nOBJECTIVE: {step.objective}\nPREVIOUS ACTION: {step.previous_action or 'None'}\n"
        f"CURRENT OBSERVATION:\n{step.observation}\nCURRENT ACTION: {step.action}\n"
    )
