"""Whether a task is solved, in the dialects of WebArena and of VAB-WebArena-Lite. The score is a product; 1.0 is
success.
"""

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
from .words import words

Dialect = Literal["webarena", "lite"]
OR = " |OR| "


def clean(answer: str, dialect: Dialect) -> str:
    """An answer as it is compared: one pair of quotes dropped, lower case; WebArena strips white space too."""
    text = answer.strip() if dialect == "webarena" else answer
    for quote in ("'", '"'):
        if text.startswith(quote) and text.endswith(quote):
            text = text[1:-1]
            break
    return text.lower()


def exact_match(reference: object, answer: str, dialect: Dialect) -> float:
    """Equality after cleaning; the Lite dialect lets a reference be a number."""
    return float(clean(answer, dialect) == clean(str(reference), dialect))


def must_include(reference: str, answer: str, dialect: Dialect, *, alone: bool = False) -> float:
    """Containment, where a short reference must be a word of its own: in WebArena one letter that is the only reference
    (`alone`), in Lite whatever is one word. Lite also takes a part of a word with slashes."""
    wanted, given = clean(reference, dialect), clean(answer, dialect)
    if dialect == "webarena":
        return float(wanted in (words(given) if alone and len(wanted) == 1 else given))
    if len(words(wanted)) != 1:
        return float(wanted in given)
    return float(any(wanted == word or wanted in word.split("/") for word in words(given)))


def must_exclude(reference: str, answer: str) -> float:
    """Absence, as a word of its own where the reference is one. Only Lite has it, and splits no word at slashes here:
    "dog/cat" does not hold "cat"."""
    wanted, given = clean(reference, "lite"), clean(answer, "lite")
    return float(wanted not in (words(given) if len(words(wanted)) == 1 else given))


def required_value(rule: str, value: str) -> float:
    """A comparison such as `>= 5` or `== 3 |OR| == 4` with a whole number; as in Lite, `<` and `>` let equal numbers
    pass.
    """
    comparisons = [re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(-?\d+(?:\.\d+)?)\s*", part) for part in rule.split(OR)]
    if None in comparisons:
        raise WorldFault(f"web: required_values {rule!r} is no comparison")
    try:
        number = int(value.strip().replace(",", ""))
    except ValueError:
        return 0.0
    bounds = [(found[1][0], float(found[2])) for found in comparisons if found]
    passes = {"<": lambda by: by < 1e-8, ">": lambda by: by > -1e-8, "=": lambda by: abs(by) <= 1e-8}
    return float(any(passes[sign](number - bound) for sign, bound in bounds))


def _matched(
    required: Mapping[str, Any], text: str, dialect: Dialect, judge: Judge | None, intent: str, note: str, page: bool
) -> float:
    """The product over the conditions of one answer, or of one place of a page."""
    score = 1.0
    for kind, wanted in required.items():
        listed = wanted if isinstance(wanted, list) else [wanted]
        match kind:
            case "exact_match":
                score *= exact_match(wanted, text, dialect)
            case "must_include":
                for item in listed:
                    options = str(item).split(OR) if dialect == "lite" or page else [str(item)]
                    score *= max(
                        must_include(option, text, dialect, alone=len(listed) == 1 and not page) for option in options
                    )
            case "must_exclude":
                for item in listed:
                    score *= must_exclude(str(item), text)
            case "one_of":
                score *= max((float(clean(str(item), dialect) in text) for item in listed), default=0.0)
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
        # Without a judge: every reference must stand in the answer. Stricter than a judge, and said so wherever scores
        # are printed.
        return float(all(clean(r, dialect) in clean(text, dialect) for r in references))
    if dialect == "lite":
        return judge.same_answer(intent, ", ".join(references), text)
    score = 1.0
    for reference in references:
        score *= judge.same_answer(intent, reference, text)
    return score


def string_match(
    evaluation: Evaluation, answer: str, dialect: Dialect, judge: Judge | None = None, intent: str = ""
) -> float:
    """The agent's answer against the references. Both dialects clean the answer here, and again where it is
    compared.
    """
    return _matched(
        evaluation.answers, clean(answer, dialect), dialect, judge, intent, evaluation.string_note, page=False
    )


def url_match(evaluation: Evaluation, url: str, dialect: Dialect) -> float:
    """The last address against the references."""
    references = evaluation.url.split(OR)
    if dialect == "lite":
        plain = [r.replace("localhost", "127.0.0.1").removesuffix("/") for r in references]
        here = url.replace("localhost", "127.0.0.1").removesuffix("/")
        return float(any(r in here for r in plain) if evaluation.url_note == "GOLD in PRED" else here in plain)
    if evaluation.url_note == "EXACT":
        return float(url.rstrip("/") in [r.rstrip("/") for r in references])
    here, query = _parts(url)
    parts = [_parts(r) for r in references]
    wanted: dict[str, set[str]] = {}
    for _, required in parts:
        for key, values in required.items():
            wanted.setdefault(key, set()).update(values)
    return float(
        any(base in here for base, _ in parts)
        and all(values & set(query.get(key, [])) for key, values in wanted.items())
    )


def _parts(url: str) -> tuple[str, dict[str, list[str]]]:
    """Host and path, and the query, whose empty values do not count."""
    parts = urlsplit(url.rstrip("/"))
    return (parts.netloc + parts.path).rstrip("/"), parse_qs(parts.query)


_FUNCTION = re.compile(r"func:(\w+)\((.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"""\s*(?:__page__|'([^']*)'|"([^"]*)")\s*(?:,|$)""")
Helper = Callable[[Backend, list[str]], str]


def _post_url(backend: Backend, arguments: list[str]) -> str:
    """The address of a forum post from that of any page below it."""
    parts = urlsplit(arguments[0])
    path = parts.path.split("/")
    is_post = len(path) >= 4 and path[1] == "f" and path[3].isdigit()
    return f"{parts.scheme}://{parts.netloc}/{'/'.join(path[1:4])}/" if is_post else arguments[0]


def _member_role(backend: Backend, arguments: list[str]) -> str:
    """The role of a member in the table of a project's members."""
    text = backend.locate("document.querySelector('table').outerText") or ""
    found = re.search(
        rf"@{re.escape(arguments[-1])}\b(.{{0,400}}?)\b(Guest|Reporter|Developer|Maintainer|Owner)\b", text, re.DOTALL
    )
    return found[2] if found else ""


def _latest_order(backend: Backend, arguments: list[str]) -> str:
    """The address of the newest order, from the list of orders of the shop in front."""
    parts = urlsplit(backend.url)
    if not parts.netloc:  # an empty tab is no shop
        return backend.url
    local = parts.hostname == "shopping.test"
    backend.open(f"{parts.scheme}://{parts.netloc}{'/orders' if local else '/sales/order/history/'}")
    if local:
        return f"{parts.scheme}://{parts.netloc}" + (
            backend.locate("document.querySelector('#orders a').getAttribute('href')") or "/orders"
        )
    return backend.locate("document.querySelector('.order .action.view').getAttribute('href')") or backend.url


def _no_service(name: str) -> Helper:
    def helper(backend: Backend, arguments: list[str]) -> str:
        raise WorldFault(
            f"web: {name} asks a shop's administration service, which only a real WebArena shop has; give a helper "
            "for it"
        )

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
        text = _content(target, backend, last)
        if text is None:
            return 0.0
        if dialect == "webarena":
            text = html.unescape(text)
        score *= _matched(target.required, text, dialect, judge, task.intent, task.evaluation.string_note, page=True)
    return score


def _content(target: Target, backend: Backend, last: str) -> str | None:
    url = call_helper(target.url, backend, last) if target.url.startswith("func:") else target.url
    if url != "last":
        backend.open(url)
    locator = target.locator.strip()
    if not locator:
        return backend.html()
    if locator.startswith("func:"):
        return call_helper(locator, backend, last)
    if locator.startswith("lambda:"):  # Lite's own kind: what it does not find makes the score 0
        return backend.locate(locator.removeprefix("lambda:").strip(), target.prepare) or None
    if not locator.startswith(("document", "[...document")):
        raise WorldFault(f"web: the locator {locator[:80]!r} is of no known kind")
    return backend.locate(locator, target.prepare) or ""


def evaluate(
    task: WebTask, answer: str, backend: Backend, dialect: Dialect = "webarena", judge: Judge | None = None
) -> float:
    """The score of a finished episode: the product over the kinds of evaluation the task asks for, 0 where no answer
    can be right.
    """
    if not task.evaluation.checkable:
        return 0.0
    score = 1.0
    for kind in task.evaluation.types:
        if kind == "string_match":
            score *= string_match(task.evaluation, answer, dialect, judge, task.intent)
        elif kind == "url_match":
            score *= url_match(task.evaluation, backend.url, dialect)
        else:
            score *= program_html(task, backend, dialect, judge)
    return score
