"""The shop: a catalogue, a cart, orders, a wish list, reviews and an account."""

from __future__ import annotations

import random
from html import escape

from ..http import Request, Response
from .base import USER, Site, choice, field, form, link, money, table
from .words import COLOURS, GOODS, MAKERS, USERS

SORTS = [("name", "Name"), ("price", "Price, lowest first"), ("rating", "Rating, highest first")]
ORDERS = {"name": "name", "price": "price, name", "rating": "rating DESC, name"}


class Shop(Site):
    key, title = "shopping", "Harbour Goods"
    menu = (
        ("/", "Shop"),
        ("/cart", "Cart"),
        ("/wishlist", "Wish list"),
        ("/orders", "Orders"),
        ("/account", "Account"),
    )
    schema = """
        CREATE TABLE products(id INTEGER PRIMARY KEY, name TEXT, category TEXT, colour TEXT, price INTEGER,
            rating REAL, stock INTEGER);
        CREATE TABLE reviews(id INTEGER PRIMARY KEY, product INTEGER, author TEXT, stars INTEGER, text TEXT);
        CREATE TABLE cart(product INTEGER PRIMARY KEY, quantity INTEGER);
        CREATE TABLE wishes(product INTEGER PRIMARY KEY);
        CREATE TABLE orders(id INTEGER PRIMARY KEY, placed TEXT, status TEXT);
        CREATE TABLE items(number INTEGER, product INTEGER, quantity INTEGER, price INTEGER);
        CREATE TABLE account(id INTEGER PRIMARY KEY, street TEXT, city TEXT, phone TEXT);
    """
    routes = (
        ("GET", "/", "home"),
        ("GET", "/search", "search"),
        ("GET", r"/category/([a-z]+)", "category"),
        ("GET", r"/product/(\d{1,6})", "product"),
        ("POST", r"/product/(\d{1,6})/cart", "add"),
        ("POST", r"/product/(\d{1,6})/wish", "wish"),
        ("POST", r"/product/(\d{1,6})/review", "review"),
        ("GET", "/cart", "cart"),
        ("POST", r"/cart/(\d{1,6})/remove", "remove"),
        ("POST", "/checkout", "checkout"),
        ("GET", "/orders", "orders"),
        ("GET", r"/orders/(\d{1,6})", "order"),
        ("GET", "/wishlist", "wishlist"),
        ("GET", "/account", "account"),
        ("POST", "/account", "save_account"),
    )

    def fill(self, coin: random.Random) -> None:
        number = 0
        for category, goods in GOODS.items():
            prices = coin.sample(range(400, 9900, 5), len(goods))  # no two in a category are the same
            for good, price in zip(goods, prices, strict=True):
                number += 1
                colour = coin.choice(COLOURS)
                name = f"{coin.choice(MAKERS)} {colour} {good}"
                rating, stock = coin.randint(20, 50) / 10, coin.randint(0, 40)
                self.run(
                    "INSERT INTO products VALUES(?,?,?,?,?,?,?)", number, name, category, colour, price, rating, stock
                )
                for author in coin.sample(USERS, coin.randint(0, 4)):
                    stars = coin.randint(1, 5)
                    text = ("Broke at once.", "Not what I hoped for.", "Does its work.", "Good value.", "I love it!")[
                        stars - 1
                    ]
                    self.run(
                        "INSERT INTO reviews(product, author, stars, text) VALUES(?,?,?,?)", number, author, stars, text
                    )
        for order in range(1001, 1007):
            self.run(
                "INSERT INTO orders VALUES(?,?,?)",
                order,
                f"2026-0{order - 1000}-1{coin.randint(0, 9)}",
                coin.choice(("shipped", "complete", "cancelled")),
            )
            for product in sorted(coin.sample(range(1, number + 1), coin.randint(1, 3))):
                price = self.one("SELECT price FROM products WHERE id=?", product)[0]
                self.run("INSERT INTO items VALUES(?,?,?,?)", order, product, coin.randint(1, 3), price)
        self.run("INSERT INTO account VALUES(1, '12 Dock Street', 'Aldport', '555-0101')")

    def _list(self, rows: list[tuple[int, str, int]]) -> str:
        return table([[link(f"/product/{n}", name), money(price)] for n, name, price in rows], name="results")

    def home(self, request: Request) -> Response:
        links = "".join(f"<li>{link(f'/category/{c}', c.title())}</li>" for c in GOODS)
        return self.page(
            self.title, form("/search", field("q", "Search the shop"), "Search", "get") + f"<ul>{links}</ul>"
        )

    def search(self, request: Request) -> Response:
        words = request.query.get("q", "").lower().split()
        found = [
            r
            for r in self.rows("SELECT id, name, price FROM products ORDER BY name")
            if all(w in r[1].lower() for w in words)
        ]
        again = form("/search", field("q", "Search the shop", request.query.get("q", "")), "Search", "get")
        return self.page("Search", again + (self._list(found[:12]) if words and found else "<p>Nothing was found.</p>"))

    def category(self, request: Request, name: str) -> Response:
        if name not in GOODS:
            return self.missing("There is no such category.")
        sort = request.query.get("sort", "name")
        rows = self.rows(
            f"SELECT id, name, price FROM products WHERE category=? ORDER BY {ORDERS.get(sort, 'name')}", name
        )
        return self.page(
            name.title(),
            form(f"/category/{name}", choice("sort", SORTS, sort, "Sort by"), "Sort", "get") + self._list(rows),
        )

    def product(self, request: Request, number: str) -> Response:
        row = self.one("SELECT name, category, price, rating, stock FROM products WHERE id=?", number)
        if row is None:
            return self.missing("There is no such product.")
        name, category, price, rating, stock = row
        facts = table(
            [
                ["Price", money(price)],
                ["Rating", f"{rating} of 5"],
                ["In stock", str(stock)],
                ["Category", link(f"/category/{category}", category.title())],
            ],
            name="facts",
        )
        rows = self.rows("SELECT author, stars, text FROM reviews WHERE product=? ORDER BY id", number)
        reviews = "".join(f"<li>{escape(a)}: {s} stars. {escape(t)}</li>" for a, s, t in rows)
        parts = [
            facts,
            form(
                f"/product/{number}/cart",
                choice("quantity", [(str(n), str(n)) for n in range(1, 6)], hint="Quantity"),
                "Add to cart",
            ),
            form(f"/product/{number}/wish", "", "Add to wish list"),
            f'<h2>Reviews</h2><ul id="reviews">{reviews}</ul>' if rows else "<p>No reviews yet.</p>",
            form(
                f"/product/{number}/review",
                choice("stars", [(str(n), f"{n} stars") for n in range(5, 0, -1)], hint="Stars")
                + field("text", "Your review"),
                "Send review",
            ),
        ]
        return self.page(name, "".join(parts))

    def add(self, request: Request, number: str) -> Response:
        quantity = request.form.get("quantity", "1")
        if self.one("SELECT 1 FROM products WHERE id=?", number) is None or quantity not in ("1", "2", "3", "4", "5"):
            return self.missing("This cannot be put into the cart.")
        self.run(
            "INSERT INTO cart VALUES(?,?) ON CONFLICT(product) DO UPDATE SET quantity=quantity+excluded.quantity",
            number,
            int(quantity),
        )
        return self.redirect("/cart")

    def cart(self, request: Request) -> Response:
        rows = self.rows(
            "SELECT p.id, p.name, c.quantity, p.price FROM cart c JOIN products p ON p.id=c.product ORDER BY p.name"
        )
        if not rows:
            return self.page("Cart", '<p id="cart">Your cart is empty.</p>')
        lines = [
            [link(f"/product/{n}", name), f"{q} x {money(price)}", form(f"/cart/{n}/remove", "", "Remove")]
            for n, name, q, price in rows
        ]
        total = sum(q * price for _, _, q, price in rows)
        return self.page(
            "Cart",
            f'<div id="cart">{table(lines)}<p>Total {money(total)}</p></div>{form("/checkout", "", "Place order")}',
        )

    def remove(self, request: Request, number: str) -> Response:
        self.run("DELETE FROM cart WHERE product=?", number)
        return self.redirect("/cart")

    def checkout(self, request: Request) -> Response:
        rows = self.rows(
            "SELECT c.product, c.quantity, p.price FROM cart c JOIN products p ON p.id=c.product ORDER BY c.product"
        )
        if not rows:
            return self.redirect("/cart")
        order = self.run("INSERT INTO orders(placed, status) VALUES('2026-11-01', 'pending')")
        for product, quantity, price in rows:
            self.run("INSERT INTO items VALUES(?,?,?,?)", order, product, quantity, price)
        self.run("DELETE FROM cart")
        return self.redirect(f"/orders/{order}")

    def orders(self, request: Request) -> Response:
        rows = self.rows(
            "SELECT o.id, o.placed, o.status, SUM(i.quantity*i.price) FROM orders o JOIN items i ON i.number=o.id "
            "GROUP BY o.id ORDER BY o.id DESC"
        )
        lines = [
            [link(f"/orders/{n}", f"Order {n}"), placed, status, money(total)] for n, placed, status, total in rows
        ]
        return self.page("Orders", table(lines, ["Number", "Date", "Status", "Total"], "orders"))

    def order(self, request: Request, number: str) -> Response:
        row = self.one("SELECT id, placed, status FROM orders WHERE id=?", int(number))
        if row is None:
            return self.missing("There is no such order.")
        items = self.rows(
            (
                "SELECT p.id, p.name, i.quantity, i.price FROM items i JOIN products p ON p.id=i.product WHERE "
                "number=? ORDER BY p.name"
            ),
            row[0],
        )
        lines = [[link(f"/product/{n}", name), f"{q} x {money(price)}"] for n, name, q, price in items]
        total = money(sum(q * price for _, _, q, price in items))
        return self.page(
            f"Order {row[0]}",
            f'<div id="order"><p>Placed {row[1]}, {row[2]}</p>{table(lines)}<p>Total {total}</p></div>',
        )

    def wish(self, request: Request, number: str) -> Response:
        if self.one("SELECT 1 FROM products WHERE id=?", number) is None:
            return self.missing("There is no such product.")
        self.run("INSERT OR IGNORE INTO wishes VALUES(?)", number)
        return self.redirect("/wishlist")

    def wishlist(self, request: Request) -> Response:
        rows = self.rows("SELECT p.id, p.name, p.price FROM wishes w JOIN products p ON p.id=w.product ORDER BY p.name")
        return self.page(
            "Wish list", f'<div id="wishes">{self._list(rows) if rows else "Your wish list is empty."}</div>'
        )

    def review(self, request: Request, number: str) -> Response:
        stars, text = request.form.get("stars", ""), request.form.get("text", "").strip()
        if stars not in ("1", "2", "3", "4", "5") or not text:
            return self.missing("A review needs stars and a text.")
        self.run(
            "INSERT INTO reviews(product, author, stars, text) VALUES(?,?,?,?)", number, USER, int(stars), text[:300]
        )
        return self.redirect(f"/product/{number}")

    def account(self, request: Request) -> Response:
        street, city, phone = self.one("SELECT street, city, phone FROM account")
        fields = field("street", "Street", street) + field("city", "City", city) + field("phone", "Phone", phone)
        return self.page("Account", form("/account", fields, "Save address"))

    def save_account(self, request: Request) -> Response:
        values = [request.form.get(n, "").strip()[:100] for n in ("street", "city", "phone")]
        self.run("UPDATE account SET street=?, city=?, phone=?", *values)
        return self.redirect("/account")
