"""Recording page transitions in a real browser: a random policy clicks and types, the accessibility tree is read
before and after.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .prompt import PageTransition
from .tree import Node, write_tree

PAGES = Path(__file__).with_name("pages.html")
APPS = ("todo", "cart", "tabs", "form", "answers", "filter")
CLICKABLE = {"button", "checkbox", "tab", "link", "radio", "menuitem"}
TYPABLE = {"textbox", "searchbox"}
WORDS = ("buy rope", "Ann", "ann@mail.org", "call Tom", "Bob")
_ACTION = re.compile(r"click \[(\d{1,12})\]|type \[(\d{1,12})\] \[(.*)\] \[0\]")
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
            properties = {p["name"]: p["value"].get("value") for p in item.get("properties", [])}
            shown = [
                (key, str(properties[key]))
                for key in _PROPERTIES
                if properties.get(key) not in (None, False, "false", "")
            ]
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


def random_action(nodes: list[Node], coin: random.Random) -> str | None:
    """A click on, or a text for, an item of the page that takes one; None where there is none."""
    usable = [node for node in nodes if _usable(node)]
    if not usable:
        return None
    node, text = coin.choice(usable), coin.choice(WORDS)
    return f"type [{node.id}] [{text}] [0]" if node.role in TYPABLE else f"click [{node.id}]"


def _usable(node: Node) -> bool:
    return node.role in CLICKABLE | TYPABLE and ("disabled", "True") not in node.properties


class LivePage:
    """One of our small pages in a browser. Its items have ids of ours, in the order of their first appearance."""

    def __init__(self, page: Any) -> None:
        self.page, self.wire = page, page.context.new_cdp_session(page)
        self.wire.send("Accessibility.enable")
        self.ids: dict[int, int] = {}
        self.inner: dict[int, int] = {}
        self.nodes: list[Node] = []

    def open(self, app: str, seed: int) -> list[Node]:
        """The page of an app and a seed, as it begins."""
        self.page.goto("about:blank")  # another fragment alone would not load the page again
        self.page.goto(f"{PAGES.as_uri()}#{app}-{seed}")
        self.ids = {}
        return self.look()

    def look(self) -> list[Node]:
        """The page as it is now."""
        nodes, inner = tree_of(self.wire.send("Accessibility.getFullAXTree")["nodes"])
        for node in nodes:
            self.ids.setdefault(node.id, len(self.ids) + 1)
        self.nodes = [Node(self.ids[n.id], n.role, n.name, n.properties, n.depth) for n in nodes]
        self.inner = {self.ids[k]: v for k, v in inner.items()}
        return self.nodes

    def act(self, action: str) -> bool:
        """Click or type; whether the page has an item that takes this action. If not, nothing happens."""
        read = _ACTION.fullmatch(action)
        if read is None:
            return False
        typing = read[2] is not None
        wanted, roles = int(read[2] or read[1]), TYPABLE if typing else CLICKABLE | TYPABLE
        if not any(node.id == wanted and node.role in roles and _usable(node) for node in self.nodes):
            return False
        item = self.wire.send("DOM.resolveNode", {"backendNodeId": self.inner[wanted]})["object"]["objectId"]
        call = {
            "objectId": item,
            "functionDeclaration": _TYPE if typing else _CLICK,
            "arguments": [{"value": read[3]}] if typing else [],
        }
        self.wire.send("Runtime.callFunctionOn", call)
        return True


def record(
    episodes: int, steps: int, *, browser: str | None = None, timeout_s: float = 30.0
) -> Iterator[PageTransition]:
    """Transitions of our small pages in real Chromium; `browser` is its path where Playwright did not install one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        chromium = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"], timeout=timeout_s * 1000)
        try:
            page = chromium.new_page()
            page.set_default_timeout(timeout_s * 1000)
            live = LivePage(page)
            for episode in range(episodes):
                yield from _episode(live, APPS[episode % len(APPS)], episode, steps)
        finally:
            chromium.close()


def _episode(live: LivePage, app: str, seed: int, steps: int) -> Iterator[PageTransition]:
    coin, before, previous = random.Random(f"{app} {seed}"), live.open(app, seed), ""
    for _ in range(steps):
        action = random_action(before, coin)
        if action is None:
            return
        live.act(action)
        after = live.look()
        yield PageTransition(f"pages/{app}", "explore", previous, write_tree(before), action, write_tree(after))
        before, previous = after, action
