"""What a task template is: a sentence, its instances on a site, how each is judged, and the script that solves it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .sites.base import Site

# (what, target, text): click text | type hint text | search hint text | select title option | tab n | exit answer
Step = tuple[str, ...]


@dataclass(frozen=True)
class Instance:
    """One way to fill a template in."""

    values: dict[str, str]
    evaluation: dict[str, Any]
    steps: list[Step]


Maker = Callable[[dict[str, Site], random.Random], Iterator[Instance]]


@dataclass(frozen=True)
class Template:
    """A sentence with {{names}}, the sites it needs, and where it starts."""

    id: int
    sites: tuple[str, ...]
    text: str
    make: Maker
    start: str = ""  # the first site's placeholder where it is empty


TEMPLATES: dict[int, Template] = {}


def template(number: int, sites: str, text: str, start: str = "") -> Callable[[Maker], Maker]:
    """Register a template under a number that never changes."""

    def register(make: Maker) -> Maker:
        if number in TEMPLATES:
            raise ValueError(f"template {number} is there twice")
        TEMPLATES[number] = Template(number, tuple(sites.split()), text, make, start)
        return make

    return register


@dataclass
class Check:
    """Builds the `eval` record of a task file."""

    types: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(
        default_factory=lambda: {"reference_answers": None, "reference_url": "", "program_html": []}
    )

    def _add(self, kind: str) -> None:
        if kind not in self.types:
            self.types.append(kind)

    def says(self, **answers: Any) -> Check:
        """The answer: exact_match=..., must_include=[...], fuzzy_match=..."""
        self._add("string_match")
        self.record["reference_answers"] = answers
        return self

    def at(self, url: str, note: str = "GOLD in PRED") -> Check:
        """The last address."""
        self._add("url_match")
        self.record["reference_url"], self.record["url_note"] = url, note
        return self

    def page(self, url: str, locator: str, **required: Any) -> Check:
        """What a place of a page says afterwards."""
        self._add("program_html")
        self.record["program_html"].append({"url": url, "locator": locator, "required_contents": required})
        return self

    @property
    def done(self) -> dict[str, Any]:
        return {"eval_types": self.types, **self.record}


def text_at(selector: str) -> str:
    """The locator of an element's text."""
    return f"document.querySelector('{selector}').outerText"


def value_at(selector: str) -> str:
    """The locator of a field's value."""
    return f"document.querySelector('{selector}').value"
