"""Whether a task is solved, in the dialects of WebArena and of VAB-WebArena-Lite. The score is a product; 1.0 is success."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from ..base import WorldFault
from .backend import Backend
from .judge import Judge
from .tasks import Evaluation, Target, WebTask

Dialect = Literal["webarena", "lite"]
OR = " |OR| "
_TOKEN = re.compile(r"[A-Za-z0-9]+(?:[.,:'][A-Za-z0-9]+)*|[^\sA-Za-z0-9]|[^\W_]+")


def clean(answer: str, dialect: Dialect) -> str:
    """An answer as it is compared: one pair of quotes dropped, lower case; WebArena strips white space too."""
    told = answer.strip() if dialect == "webarena" else answer
    for quote in ("'", '"'):
        if len(told) >= 2 and told.startswith(quote) and told.endswith(quote):
            told = told[1:-1]
            break
    return told.lower()


def tokens(text: str) -> list[str]:
    """Words, numbers and signs, each a token; a number keeps its point and comma."""
    return _TOKEN.findall(text)


def exact_match(reference: object, answer: str, dialect: Dialect) -> float:
    """Equality after cleaning; the Lite dialect lets a reference be a number."""
    return float(clean(answer, dialect) == clean(str(reference), dialect))


def must_include(reference: str, answer: str, dialect: Dialect, *, alone: bool) -> float:
    """Containment. A short reference must be a token of its own: one letter alone in WebArena, any single token in Lite."""
    told, options = clean(answer, dialect), [reference] if dialect == "webarena" else reference.split(OR)
    for option in options:
        wanted = clean(option, dialect)
        if dialect == "webarena":
            found = wanted in tokens(told) if alone and len(wanted) == 1 else wanted in told
        else:
            single = len(tokens(wanted)) == 1
            found = wanted in {part for token in [*tokens(told), *told.split()] for part in token.split("/")} if single else wanted in told
        if found:
            return 1.0
    return 0.0


def required_value(rule: str, value: str) -> float:
    """A comparison such as `>= 5` or `== 3 |OR| == 4` with a number."""
    try:
        number = float(value.strip().replace(",", "").lstrip("$"))
    except ValueError:
        return 0.0
    for part in rule.split("|OR|"):
        found = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?)\s*", part)
        if found is None:
            raise WorldFault(f"web: required_values {rule!r} is no comparison")
        bound = float(found[2])
        results = {
            ">=": number >= bound,
            "<=": number <= bound,
            "==": number == bound,
            "!=": number != bound,
            ">": number > bound,
            "<": number < bound,
        }
        if results[found[1]]:
            return 1.0
    return 0.0


def _matched(required: Mapping[str, Any], text: str, dialect: Dialect, judge: Judge | None, intent: str, note: str) -> float:
    """The product over the conditions of one answer or one place of a page."""
    score = 1.0
    for kind, wanted in required.items():
        listed = wanted if isinstance(wanted, list) else [wanted]
        match kind:
            case "exact_match":
                score *= exact_match(wanted, text, dialect)
            case "must_include":
                for item in listed:
                    score *= must_include(str(item), text, dialect, alone=len(listed) == 1)
            case "must_exclude":
                for item in listed:
                    score *= 1.0 - must_include(str(item), text, "lite", alone=True)
            case "one_of":
                score *= max((exact_match(item, text, dialect) for item in listed), default=0.0)
            case "required_values":
                for item in listed:
                    score *= required_value(str(item), text)
            case "fuzzy_match":
                score *= _fuzzy(wanted, text, dialect, judge, intent, note)
    return score


def _fuzzy(wanted: Any, text: str, dialect: Dialect, judge: Judge | None, intent: str, note: str) -> float:
    if wanted == "N/A":
        if exact_match("N/A", text, dialect):
            return 1.0
        if judge is None:
            return 0.0  # without a judge only the plain answer counts
        return judge.same_reason(intent, note, text)
    references = [str(w) for w in (wanted if isinstance(wanted, list) else [wanted])]
    if judge is None:
        # Without a judge: every reference must stand in the answer. Stricter than a judge, and said so wherever scores are printed.
        return float(all(clean(r, dialect) in clean(text, dialect) for r in references))
    if dialect == "lite":
        return judge.same_answer(intent, ", ".join(references), text)
    score = 1.0
    for reference in references:
        score *= judge.same_answer(intent, reference, text)
    return score


def string_match(evaluation: Evaluation, answer: str, dialect: Dialect, judge: Judge | None = None, intent: str = "") -> float:
    """The agent's answer against the references."""
    return _matched(evaluation.answers, answer, dialect, judge, intent, evaluation.string_note)


def url_match(evaluation: Evaluation, url: str, dialect: Dialect) -> float:
    """The last address against the references."""
    references = [r.strip() for r in evaluation.url.split("|OR|")]
    if dialect == "lite":
        plain = [r.replace("localhost", "127.0.0.1").rstrip("/") for r in references]
        here = url.replace("localhost", "127.0.0.1").rstrip("/")
        return float(any(r in here for r in plain) if evaluation.url_note == "GOLD in PRED" else here in plain)
    here = url.rstrip("/")
    if evaluation.url_note == "EXACT":
        return float(here in [r.rstrip("/") for r in references])
    parts = [urlsplit(r.rstrip("/")) for r in references]
    bases = [p.netloc + p.path for p in parts]
    wanted: dict[str, set[str]] = {}
    for part in parts:
        for key, values in parse_qs(part.query, keep_blank_values=True).items():
            wanted.setdefault(key, set()).update(values)
    told = urlsplit(here)
    query = parse_qs(told.query, keep_blank_values=True)
    inside = any(base in told.netloc + told.path for base in bases)
    return float(inside and all(values & set(query.get(key, [])) for key, values in wanted.items()))


_FUNCTION = re.compile(r"func:(\w+)\((.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"""\s*(?:__page__|'([^']*)'|"([^"]*)")\s*(?:,|$)""")
Helper = Callable[[Backend, list[str]], str]


def _post_url(backend: Backend, told: list[str]) -> str:
    """The address of a forum post from that of any page below it."""
    parts = urlsplit(told[0])
    path = parts.path.split("/")
    return f"{parts.scheme}://{parts.netloc}/{'/'.join(path[1:4])}/" if len(path) >= 4 and path[1] == "f" and path[3].isdigit() else told[0]


def _member_role(backend: Backend, told: list[str]) -> str:
    """The role of a member in the table of a project's members."""
    text = backend.locate("document.querySelector('table').outerText") or ""
    found = re.search(rf"@{re.escape(told[-1])}\b(.{{0,400}}?)\b(Guest|Reporter|Developer|Maintainer|Owner)\b", text, re.DOTALL)
    return found[2] if found else ""


def _latest_order(backend: Backend, told: list[str]) -> str:
    """The address of the newest order, from the list of orders of the shop in front."""
    parts = urlsplit(backend.url)
    local = parts.hostname == "shopping.test"
    backend.open(f"{parts.scheme}://{parts.netloc}{'/orders' if local else '/sales/order/history/'}")
    if local:
        return f"{parts.scheme}://{parts.netloc}" + (
            backend.locate("document.querySelector('#orders a').getAttribute('href')") or "/orders"
        )
    return backend.locate("document.querySelector('.order .action.view').getAttribute('href')") or backend.url


def _no_service(name: str) -> Helper:
    def helper(backend: Backend, told: list[str]) -> str:
        raise WorldFault(f"web: {name} asks a shop's administration service, which only a real WebArena shop has; give a helper for it")

    return helper


HELPERS: dict[str, Helper] = {
    "reddit_get_post_url": _post_url,
    "gitlab_get_project_memeber_role": _member_role,  # the name as the task files spell it
    "shopping_get_latest_order_url": _latest_order,
    "shopping_get_sku_latest_review_author": _no_service("shopping_get_sku_latest_review_author"),
    "shopping_get_sku_latest_review_rating": _no_service("shopping_get_sku_latest_review_rating"),
}


def call_helper(text: str, backend: Backend, last_url: str) -> str:
    """The value of `func:name(...)`: a name of the registry with plain texts, read by a pattern and never evaluated."""
    name, arguments = parse_helper(text)
    return HELPERS[name](backend, [last_url if a == "__last_url__" else a for a in arguments])


def parse_helper(text: str) -> tuple[str, list[str]]:
    """The name and the texts of a helper call."""
    found = _FUNCTION.fullmatch(text.strip())
    if found is None or found[1] not in HELPERS:
        raise WorldFault(f"web: {text[:80]!r} names no helper; known are {', '.join(sorted(HELPERS))}")
    arguments, at = [], 0
    while at < len(found[2]):
        word = _ARGUMENT.match(found[2], at)
        if word is None:
            raise WorldFault(f"web: the arguments of {text[:80]!r} must be plain texts")
        if word[1] is not None or word[2] is not None:
            arguments.append(word[1] or word[2] or "")
        at = word.end()
    return found[1], arguments


def program_html(task: WebTask, backend: Backend, dialect: Dialect, judge: Judge | None = None) -> float:
    """What the pages say afterwards."""
    last, score = backend.url, 1.0
    for target in task.evaluation.targets:
        text = _content(target, backend, last, dialect)
        if text is None:
            return 0.0
        if dialect == "webarena":
            text = html.unescape(text)
        score *= _contents(target, text, dialect, judge, task)
    return score


def _contents(target: Target, text: str, dialect: Dialect, judge: Judge | None, task: WebTask) -> float:
    """Required contents: unlike in answers, alternatives are allowed in both dialects and there is no rule for short references."""
    score = 1.0
    for kind, wanted in target.required.items():
        listed = wanted if isinstance(wanted, list) else [wanted]
        if kind == "must_include":
            for item in listed:
                score *= max(float(clean(option, dialect) in clean(text, dialect)) for option in str(item).split(OR))
        elif kind == "must_exclude":
            score *= float(not any(clean(str(item), dialect) in clean(text, dialect) for item in listed))
        else:
            score *= _matched({kind: wanted}, text, dialect, judge, task.intent, task.evaluation.string_note)
    return score


def _content(target: Target, backend: Backend, last: str, dialect: Dialect) -> str | None:
    url = call_helper(target.url, backend, last) if target.url.startswith("func:") else target.url
    if url != "last":
        backend.open(url)
    locator = target.locator.strip()
    if not locator:
        return backend.html()
    if locator.startswith("func:"):
        return call_helper(locator, backend, last)
    if locator.startswith("lambda:"):
        locator = locator.removeprefix("lambda:").strip()
    elif not locator.startswith(("document", "[...document")):
        raise WorldFault(f"web: the locator {locator[:80]!r} is of no known kind")
    text = backend.locate(locator, target.prepare)
    return "" if text is None and dialect == "webarena" else text


def evaluate(task: WebTask, answer: str, backend: Backend, dialect: Dialect = "webarena", judge: Judge | None = None) -> float:
    """The score of a finished episode: the product over the kinds of evaluation the task asks for."""
    score = 1.0
    for kind in task.evaluation.types:
        if kind == "string_match":
            score *= string_match(task.evaluation, answer, dialect, judge, task.intent)
        elif kind == "url_match":
            score *= url_match(task.evaluation, backend.url, dialect)
        else:
            score *= program_html(task, backend, dialect, judge)
    return score
