"""What the five sites share: routes, pages, accounts, and a database that is reset by copying its image."""

from __future__ import annotations

import functools
import random
import re
import sqlite3
from html import escape
from typing import Any, ClassVar

from ..http import Request, Response

STYLE = (
    "body{font:15px sans-serif;margin:12px}td,th{padding:2px 8px;text-align:left}form{margin:4px 0}nav "
    "a{margin-right:10px}"
)
USER = "sam"
PASSWORD = "harbour-7"  # of a made-up person on made-up sites


def link(href: str, text: str) -> str:
    """A link."""
    return f'<a href="{escape(href)}">{escape(text)}</a>'


def field(name: str, hint: str, value: str = "", kind: str = "text") -> str:
    """A text field that says what it is for."""
    return f'<input type="{kind}" name="{name}" placeholder="{escape(hint)}" value="{escape(value)}">'


def area(name: str, hint: str, value: str = "") -> str:
    """A field for several lines."""
    return f'<textarea name="{name}" placeholder="{escape(hint)}">{escape(value)}</textarea>'


def choice(name: str, options: list[tuple[str, str]], chosen: str = "", hint: str = "") -> str:
    """A drop-down list of (value, text)."""
    rows = "".join(
        f'<option value="{escape(v)}"{" selected" if v == chosen else ""}>{escape(t)}</option>' for v, t in options
    )
    return f'<select name="{name}" title="{escape(hint or name)}">{rows}</select>'


def form(action: str, inner: str, button: str, method: str = "post", css: str = "") -> str:
    """A form with one button."""
    class_ = f' class="{css}"' if css else ""
    # autocomplete off: a browser that goes back shows the form as the site wrote it
    top = f'<form action="{escape(action)}" method="{method}" autocomplete="off"{class_}>'
    return f'{top}{inner}<button type="submit">{escape(button)}</button></form>'


def table(rows: list[list[str]], head: list[str] | None = None, name: str = "") -> str:
    """A table of cells that are HTML already."""
    top = f"<thead><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    id_ = f' id="{name}"' if name else ""
    return f"<table{id_}>{top}<tbody>{body}</tbody></table>"


def money(cents: int) -> str:
    """A price."""
    return f"${cents // 100}.{cents % 100:02d}"


class Site:
    """One site: a schema, its content, and the pages. Subclasses list their routes and write their handlers."""

    key: ClassVar[str]  # the name in WebArena's task files
    title: ClassVar[str]
    schema: ClassVar[str]
    menu: ClassVar[tuple[tuple[str, str], ...]]
    routes: ClassVar[tuple[tuple[str, str, str], ...]]  # method, pattern of the path, name of the handler
    needs_login: ClassVar[bool] = True

    def __init__(self, image: bytes) -> None:
        self.image = image
        self._compiled = [(m, re.compile(p), getattr(self, h)) for m, p, h in self.routes]
        self.db: sqlite3.Connection | None = None
        self.shown = image  # what `db` was copied from
        self.reset()

    @property
    def host(self) -> str:
        """The name the site answers to, in both backends."""
        return f"{self.key.replace('_', '-')}.test"

    @property
    def base(self) -> str:
        """The address that stands for the site's placeholder in a task file."""
        return f"http://{self.host}"

    @property
    def session(self) -> dict[str, str]:
        """The cookie of somebody who is logged in."""
        return {"name": "session", "value": f"{self.key}-{USER}-open", "domain": self.host, "path": "/"}

    def reset(self) -> None:
        """The content as it was built, by a copy of the database image; a site that was not written to stays as it
        is.
        """
        if self.db is not None and self.db.total_changes == 0 and self.image is self.shown:
            return
        if self.db is not None:
            self.db.close()
        self.db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        if self.image:
            self.db.deserialize(self.image)
        self.shown = self.image

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """The rows of a query."""
        assert self.db is not None
        return self.db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        """The first row of a query, or None."""
        assert self.db is not None
        return self.db.execute(sql, values).fetchone()

    def run(self, sql: str, *values: Any) -> int:
        """Change the database; the id of the new row."""
        assert self.db is not None
        return self.db.execute(sql, values).lastrowid or 0

    def fill(self, coin: random.Random) -> None:
        """Write the content."""
        raise NotImplementedError

    def handle(self, request: Request) -> Response:
        """The answer to a request."""
        if request.path == "/login" and self.needs_login:
            return self.login(request)
        if self.needs_login and request.cookies.get("session") != self.session["value"]:
            return Response(status=303, location="/login")
        for method, pattern, handler in self._compiled:
            found = pattern.fullmatch(request.path)
            if found and method == request.method:
                return handler(request, *found.groups())
        return self.missing("There is no such page.")

    def login(self, request: Request) -> Response:
        if request.method == "POST":
            if request.form.get("username") == USER and request.form.get("password") == PASSWORD:
                return Response(status=303, location="/", cookies={"session": self.session["value"]})
            return self.page("Log in", f"<p>Wrong name or password.</p>{self._login_form()}", 401)
        return self.page("Log in", self._login_form())

    def _login_form(self) -> str:
        return form("/login", field("username", "User name") + field("password", "Password", kind="password"), "Log in")

    def missing(self, text: str) -> Response:
        """A page that says that something is not there."""
        return self.page("Not found", f"<p>{escape(text)}</p>", 404)

    def redirect(self, where: str) -> Response:
        """Go on elsewhere after a change, so that going back does not repeat it."""
        return Response(status=303, location=where)

    def page(self, heading: str, body: str, status: int = 200) -> Response:
        """A page with the site's menu."""
        menu = "".join(link(href, text) for href, text in self.menu)
        return Response(
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(heading)} - '
            f"{escape(self.title)}</title>"
            f"<style>{STYLE}</style></head><body><nav>{menu}</nav><main><h1>{escape(heading)}</h1>{body}</main></body>"
            "</html>",
            status,
        )


@functools.lru_cache(maxsize=256)
def image_of(kind: type[Site], seed: int) -> bytes:
    """The database of a site as bytes, built once for every seed."""
    made = kind(b"")
    assert made.db is not None
    made.db.executescript(f"BEGIN;{kind.schema}")
    made.fill(random.Random(f"{kind.key} {seed}"))
    made.db.commit()
    return made.db.serialize()
