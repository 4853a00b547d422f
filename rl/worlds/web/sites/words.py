"""Names and words that the sites' content is made of: those of words.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

_WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
PEOPLE: list[tuple[str, str]] = [(name.split()[0], name.split()[1]) for name in _WORDS["people"]]
USERS = [f"{a.lower()}_{b.lower()}" for a, b in PEOPLE]
GOODS: dict[str, list[str]] = _WORDS["goods"]
TOPICS: dict[str, list[str]] = _WORDS["topics"]
KINDS: dict[str, list[str]] = _WORDS["kinds"]
COLOURS: list[str] = _WORDS["colours"]
MAKERS: list[str] = _WORDS["makers"]
CITIES: list[str] = _WORDS["cities"]
STREETS: list[str] = _WORDS["streets"]
TOOLS: list[str] = _WORDS["tools"]
BUGS: list[str] = _WORDS["bugs"]
