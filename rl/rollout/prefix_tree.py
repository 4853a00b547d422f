"""Bookkeeping of the page pool: who uses a page, which tokens its keys belong to, and which page is evicted first.

Pages with known tokens form a tree: a page's place says all tokens before it, so a prompt's pages are found by walking
down from the root. A page that nobody uses keeps its content until its room is needed, least recently used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class _Node:
    """Tokens that follow those of the parents, and the page that holds their keys: a whole page of them, or its
    beginning.
    """

    __slots__ = ("children", "page", "parent", "partial", "tokens")

    def __init__(self, page: int, tokens: tuple[int, ...], parent: _Node | None) -> None:
        self.page, self.tokens, self.parent = page, tokens, parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.partial: Counter[int] = Counter()  # lengths of the children that are shorter than a page


class Pages:
    """The pages 1 .. count - 1, `size` positions each; page 0 is where idle rows write."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._users = [0] * count
        self._empty = list(range(count - 1, 0, -1))
        self._idle: dict[int, None] = {}  # known content, no user; in eviction order
        self._root = _Node(0, (), None)
        self._nodes: dict[int, list[_Node]] = {}

    @property
    def free(self) -> int:
        """The number of pages that can be taken."""
        return len(self._empty) + len(self._idle)

    def take(self) -> int | None:
        """A page for one user, or None when all are in use."""
        if not self._empty:
            if not self._idle:
                return None
            self.forget(oldest := next(iter(self._idle)))
            assert self._empty == [oldest]
        page = self._empty.pop()
        self._users[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more user of a page."""
        self._users[page] += 1
        self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One user less of a sequence's pages. Later pages are evicted before the ones they follow."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._nodes:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def find(self, ids: Sequence[int]) -> tuple[list[int], tuple[int, int] | None]:
        """(pages that hold the beginning of `ids`, a page to copy the next tokens from, how many). All get one more
        user.
        """
        node, pages, found = self._root, [], None
        rest = tuple(ids[: self.size])
        while len(rest) == self.size and (child := node.children.get(rest)):
            pages.append(child.page)
            node, start = child, len(pages) * self.size
            rest = tuple(ids[start : start + self.size])
        for length in sorted(node.partial, reverse=True):
            if length <= len(rest) and (child := node.children.get(rest[:length])):
                found = child.page, length
                break
        for page in [*pages, *([found[0]] if found else [])]:
            self.hold(page)
        return pages, found

    def learn(self, pages: Sequence[int], ids: Sequence[int]) -> None:
        """Note that `pages` hold `ids`. Tokens that other pages already hold stay with those."""
        node = self._root
        for number, start in enumerate(range(0, len(ids), self.size)):
            tokens = tuple(ids[start : start + self.size])
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = _Node(pages[number], tokens, node)
                node.partial += Counter([len(tokens)] if len(tokens) < self.size else [])
                self._nodes.setdefault(pages[number], []).append(child)
            node = child

    def forget(self, page: int) -> None:
        """Forget a page's content."""
        for node in self._nodes.pop(page, ()):
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            if len(node.tokens) < self.size:
                parent.partial -= Counter([len(node.tokens)])
        if page in self._idle:
            del self._idle[page]
            self._empty.append(page)

    def forget_all(self) -> None:
        """Forget all content, as after the weights have changed."""
        for page in list(self._nodes):
            self.forget(page)
