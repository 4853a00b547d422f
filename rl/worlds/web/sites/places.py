"""The place finder: search, what is near, directions, and a list of saved places."""

from __future__ import annotations

import random
from urllib.parse import quote_plus

from ..http import Request, Response
from .base import Site, choice, field, form, link, table
from .words import CITIES, KINDS, STREETS

SPEEDS = {"car": 50, "bicycle": 15, "foot": 5}  # km/h


def distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    """Tenths of a kilometre along the streets of a grid."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def minutes(tenths: int, by: str) -> int:
    """Whole minutes, rounded up."""
    return -(-tenths * 6 // SPEEDS[by])


class Places(Site):
    key, title, needs_login = "map", "Wayfinder", False
    menu = (("/", "Search"), ("/directions", "Directions"), ("/nearby", "Nearby"), ("/saved", "Saved places"))
    schema = """
        CREATE TABLE places(id INTEGER PRIMARY KEY, name TEXT, kind TEXT, city TEXT, address TEXT, phone TEXT,
            hours TEXT, x INTEGER, y INTEGER);
        CREATE TABLE saved(place INTEGER PRIMARY KEY);
    """
    routes = (
        ("GET", "/", "home"),
        ("GET", "/search", "search"),
        ("GET", r"/place/(\d{1,6})", "place"),
        ("POST", r"/place/(\d{1,6})/save", "save"),
        ("GET", "/saved", "saved"),
        ("GET", "/nearby", "nearby"),
        ("GET", "/directions", "directions"),
    )

    def fill(self, coin: random.Random) -> None:
        spots = coin.sample([(x, y) for x in range(60) for y in range(60)], 24)
        number = 0
        for kind, names in KINDS.items():
            for name in names:
                number += 1
                x, y = spots[number - 1]
                address = f"{coin.randint(1, 99)} {coin.choice(STREETS)}"
                hours = f"{coin.randint(7, 10)}:00 to {coin.randint(16, 22)}:00"
                values = (
                    number,
                    name,
                    kind,
                    coin.choice(CITIES),
                    address,
                    f"555-{coin.randint(1000, 9999)}",
                    hours,
                    x,
                    y,
                )
                self.run("INSERT INTO places VALUES(?,?,?,?,?,?,?,?,?)", *values)

    def _list(self, rows: list[tuple[int, str, str]]) -> str:
        return (
            table([[link(f"/place/{n}", name), city] for n, name, city in rows], name="results")
            if rows
            else "<p>Nothing was found.</p>"
        )

    def home(self, request: Request) -> Response:
        kinds = "".join(f"<li>{link(f'/search?q={k}', k.title())}</li>" for k in KINDS)
        return self.page(self.title, form("/search", field("q", "Find a place"), "Go", "get") + f"<ul>{kinds}</ul>")

    def search(self, request: Request) -> Response:
        words = request.query.get("q", "").strip()
        pattern = f"%{words}%"
        rows = (
            self.rows(
                (
                    "SELECT id, name, city FROM places WHERE name LIKE ? OR kind LIKE ? OR city LIKE ? ORDER BY name "
                    "LIMIT 12"
                ),
                pattern,
                pattern,
                pattern,
            )
            if words
            else []
        )
        return self.page("Search", form("/search", field("q", "Find a place", words), "Go", "get") + self._list(rows))

    def place(self, request: Request, number: str) -> Response:
        row = self.one("SELECT name, kind, city, address, phone, hours FROM places WHERE id=?", number)
        if row is None:
            return self.missing("There is no such place.")
        name, kind, city, address, phone, hours = row
        facts = table(
            [["Kind", kind], ["Address", f"{address}, {city}"], ["Phone", phone], ["Open", hours]], name="facts"
        )
        quoted = quote_plus(name)
        links = (
            f"<p>{link(f'/nearby?place={quoted}', 'What is near')} "
            f"{link(f'/directions?route_from={quoted}', 'Directions from here')}</p>"
        )
        return self.page(name, facts + links + form(f"/place/{number}/save", "", "Save place"))

    def save(self, request: Request, number: str) -> Response:
        if self.one("SELECT 1 FROM places WHERE id=?", number) is None:
            return self.missing("There is no such place.")
        self.run("INSERT OR IGNORE INTO saved VALUES(?)", number)
        return self.redirect("/saved")

    def saved(self, request: Request) -> Response:
        rows = self.rows("SELECT p.id, p.name, p.city FROM saved s JOIN places p ON p.id=s.place ORDER BY p.name")
        return self.page(
            "Saved places", f'<div id="saved">{self._list(rows) if rows else "No places are saved."}</div>'
        )

    def _point(self, name: str) -> tuple[int, int] | None:
        return self.one("SELECT x, y FROM places WHERE name=? COLLATE NOCASE", name.strip())

    def nearby(self, request: Request) -> Response:
        place, kind = request.query.get("place", ""), request.query.get("kind", "")
        fields = field("place", "Name of a place", place) + choice(
            "kind", [("", "any kind"), *((k, k) for k in KINDS)], kind, "Kind"
        )
        again, here = form("/nearby", fields, "Show", "get"), self._point(place)
        if here is None:
            return self.page("Nearby", again)
        rows = self.rows(
            "SELECT id, name, x, y FROM places WHERE name != ? COLLATE NOCASE AND (?='' OR kind=?)",
            place.strip(),
            kind,
            kind,
        )
        near = sorted((distance(here, (x, y)), name, n) for n, name, x, y in rows)[:5]
        lines = [[link(f"/place/{n}", name), f"{d // 10}.{d % 10} km"] for d, name, n in near]
        return self.page("Nearby", again + table(lines, ["Place", "Distance"], "near"))

    def directions(self, request: Request) -> Response:
        start, end, by = (
            request.query.get("route_from", ""),
            request.query.get("route_to", ""),
            request.query.get("by", "car"),
        )
        fields = (
            field("route_from", "From", start)
            + field("route_to", "To", end)
            + choice("by", [(b, b) for b in SPEEDS], by, "By")
        )
        again, a, b = form("/directions", fields, "Show route", "get"), self._point(start), self._point(end)
        if a is None or b is None or by not in SPEEDS:
            return self.page("Directions", again)
        tenths = distance(a, b)
        return self.page(
            "Directions",
            again
            + table(
                [["Distance", f"{tenths // 10}.{tenths % 10} km"], ["Time", f"{minutes(tenths, by)} minutes"]],
                name="route",
            ),
        )
