"""Recording page transitions in a real browser: a random policy clicks and types, the accessibility tree is read
before and after.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from .prompt import PageTransition
from .tree import Node, write_tree

APPS = ("todo", "cart", "tabs", "form", "answers", "filter")
CLICKABLE = {"button", "checkbox", "tab", "link", "radio", "menuitem"}
TYPABLE = {"textbox", "searchbox"}
WORDS = ("buy rope", "Ann", "ann@mail.org", "call Tom", "Bob")
_SKIPPED = {"none", "generic", "InlineTextBox", "LineBreak", "ListMarker", "LayoutTable"}
_PROPERTIES = ("focused", "disabled", "required", "checked", "expanded", "selected", "invalid", "level")
_CLICK = "function() { this.click(); }"
_TYPE = "function(text) { this.focus(); this.value = text; this.dispatchEvent(new Event('input', {bubbles: true})); }"


def tree_of(raw: list[dict[str, Any]]) -> tuple[list[Node], dict[int, int]]:
    """The nodes of a browser's accessibility tree without those that say nothing, and the document's node of each
    id.
    """
    by_id = {n["nodeId"]: n for n in raw}
    nodes: list[Node] = []
    inner: dict[int, int] = {}
    root = next(n for n in raw if "parentId" not in n)
    waiting = [(root, 0, "")]
    while waiting:
        item, depth, above = waiting.pop()
        role = item.get("role", {}).get("value", "none")
        name = str(item.get("name", {}).get("value", "")).strip()
        silent = not name and role not in CLICKABLE | TYPABLE
        echo = role == "StaticText" and name in above  # a button's own label, said again
        kept = not (item.get("ignored") or role in _SKIPPED or silent or echo)
        value = str(item.get("value", {}).get("value", "")).strip()
        if kept:
            told = {p["name"]: p["value"].get("value") for p in item.get("properties", [])}
            shown = [(key, str(told[key])) for key in _PROPERTIES if told.get(key) not in (None, False, "false", "")]
            inner[int(item["nodeId"])] = item.get("backendDOMNodeId", 0)
            nodes.append(
                Node(
                    int(item["nodeId"]),
                    role,
                    f"{name} {value}".strip() if role in TYPABLE else name,
                    tuple(shown),
                    depth,
                )
            )
        children = [by_id[c] for c in item.get("childIds", []) if c in by_id]
        waiting.extend((child, depth + kept, f"{name} {value}" if kept else above) for child in reversed(children))
    return nodes, inner


def record(
    episodes: int, steps: int, *, browser: str | None = None, first_seed: int = 0, timeout_s: float = 30.0
) -> Iterator[PageTransition]:
    """Transitions of our small pages in real Chromium; `browser` is its path where Playwright did not install one."""
    from playwright.sync_api import sync_playwright

    with resources.as_file(resources.files("terrella.rl.web_pages") / "pages.html") as file, sync_playwright() as tool:
        chromium = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"], timeout=timeout_s * 1000)
        try:
            page = chromium.new_page()
            page.set_default_timeout(timeout_s * 1000)
            wire = page.context.new_cdp_session(page)
            wire.send("Accessibility.enable")
            for episode in range(episodes):
                app, seed = APPS[episode % len(APPS)], first_seed + episode
                page.goto("about:blank")  # another fragment alone would not load the page again
                page.goto(f"{Path(file).as_uri()}#{app}-{seed}")
                yield from _episode(wire, app, seed, steps)
        finally:
            chromium.close()


def _episode(wire: Any, app: str, seed: int, steps: int) -> Iterator[PageTransition]:
    coin = random.Random(f"{app} {seed}")
    ids: dict[int, int] = {}  # the browser's id -> ours, in the order of their first appearance

    def look() -> tuple[list[Node], dict[int, int]]:
        nodes, inner = tree_of(wire.send("Accessibility.getFullAXTree")["nodes"])
        for node in nodes:
            ids.setdefault(node.id, len(ids) + 1)
        mine = [Node(ids[n.id], n.role, n.name, n.properties, n.depth) for n in nodes]
        return mine, {ids[k]: v for k, v in inner.items()}

    before, inner = look()
    previous = ""
    for _ in range(steps):
        usable = [n for n in before if n.role in CLICKABLE | TYPABLE and ("disabled", "True") not in n.properties]
        if not usable:
            return
        node = coin.choice(usable)
        text = coin.choice(WORDS)
        typing = node.role in TYPABLE
        action = f"type [{node.id}] [{text}] [0]" if typing else f"click [{node.id}]"
        found = wire.send("DOM.resolveNode", {"backendNodeId": inner[node.id]})["object"]["objectId"]
        call = {
            "objectId": found,
            "functionDeclaration": _TYPE if typing else _CLICK,
            "arguments": [{"value": text}] if typing else [],
        }
        wire.send("Runtime.callFunctionOn", call)
        after, inner = look()
        yield PageTransition(f"pages/{app}", "explore", previous, write_tree(before), action, write_tree(after))
        before, previous = after, action
