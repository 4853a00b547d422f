"""Pages under attack: 25 hostile texts, each parsed and observed within its deadline."""

from __future__ import annotations

import time

import pytest

from terrella.rl.worlds.web.html_parser import parse_html
from terrella.rl.worlds.web.observe import simplified_html

SIZE = 60_000
PARTS = {
    "tables": "<table>",
    "cells": "<table><tr><td>",
    "blocks": "<div><p>",
    "links": "<a href=x>",
    "lists": "<li><ul>",
    "forms": "<form>",
    "templates": "<template>",
    "quotes": '<a "',
    "single quotes": "<a '",
    "declarations": "<!",
    "comments": "<!--",
    "closers": "</div>",
    "entities": "&amp;",
    "long entities": "&" + "a" * 60,
    "numbers": "&#x110000;",
    "options": "<select><option>",
    "labels": "<label for=x>",
    "scripts": "<script>",
    "titles": "<title>",
    "areas": "<textarea>",
    "attributes": "<i " + "a=b " * 50 + ">",
    "hidden": "<p hidden>",
    "nulls": "\0<b\0>",
    "angles": "<",
    "surrogates": "\ud800<p>",
    "mixed": "<table><a href=x><template></a><!--x--><select><li>",
}


def look(text: str) -> None:
    begun = time.process_time()
    parsed = parse_html(text, deadline_s=5.0)
    page = parsed.page("http://a.test/", dict(parsed.start))
    simplified_html(page)
    assert time.process_time() - begun < 10.0


@pytest.mark.parametrize("name", list(PARTS)[::4])
def test_pages(name: str) -> None:
    look((PARTS[name] * (SIZE // len(PARTS[name])))[:SIZE])


@pytest.mark.full
@pytest.mark.parametrize("name", list(PARTS))
def test_all_pages(name: str) -> None:
    look((PARTS[name] * (SIZE // len(PARTS[name])))[:SIZE])
    look((PARTS[name] * (300_000 // len(PARTS[name])))[:300_000])
