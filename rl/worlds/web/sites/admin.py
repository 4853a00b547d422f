"""The store's back office: products, orders, customers, reviews and a sales report."""

from __future__ import annotations

import random
from html import escape

from ..http import Request, Response
from .base import Site, area, choice, field, form, link, money, table
from .words import COLOURS, GOODS, PEOPLE

STATES = ["pending", "processing", "shipped", "complete", "cancelled"]


class Admin(Site):
    key, title = "shopping_admin", "Back Office"
    menu = (
        ("/", "Dashboard"),
        ("/products", "Products"),
        ("/orders", "Orders"),
        ("/customers", "Customers"),
        ("/reviews", "Reviews"),
        ("/report", "Report"),
    )
    schema = """
        CREATE TABLE products(id INTEGER PRIMARY KEY, sku TEXT, name TEXT, price INTEGER, stock INTEGER,
            enabled INTEGER);
        CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT, email TEXT, city TEXT);
        CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, month INTEGER, total INTEGER, status TEXT,
            note TEXT DEFAULT '');
        CREATE TABLE reviews(id INTEGER PRIMARY KEY, product INTEGER, author TEXT, stars INTEGER, status TEXT);
    """
    routes = (
        ("GET", "/", "home"),
        ("GET", "/products", "products"),
        ("GET", r"/products/(\d{1,6})", "product"),
        ("POST", r"/products/(\d{1,6})", "save_product"),
        ("GET", "/orders", "orders"),
        ("GET", r"/orders/(\d{1,6})", "order"),
        ("POST", r"/orders/(\d{1,6})", "save_order"),
        ("GET", "/customers", "customers"),
        ("GET", r"/customers/(\d{1,6})", "customer"),
        ("GET", "/reviews", "reviews"),
        ("GET", r"/reviews/(\d{1,6})", "review"),
        ("POST", r"/reviews/(\d{1,6})", "save_review"),
        ("GET", "/report", "report"),
    )

    def fill(self, coin: random.Random) -> None:
        for number, good in enumerate((g for goods in GOODS.values() for g in goods[:5]), 1):
            sku = f"HG-{number:02d}{coin.randint(10, 99)}"
            name = f"{coin.choice(COLOURS).title()} {good}"
            self.run(
                "INSERT INTO products VALUES(?,?,?,?,?,?)",
                number,
                sku,
                name,
                coin.randrange(500, 9000, 50),
                coin.randint(0, 90),
                1,
            )
        for number, (first, last) in enumerate(PEOPLE, 1):
            city = coin.choice(("Aldport", "Brenwick", "Dunmere"))
            self.run(
                "INSERT INTO customers VALUES(?,?,?,?)",
                number,
                f"{first} {last}",
                f"{first}.{last}{coin.randint(1, 99)}@mail.test".lower(),
                city,
            )
        for number in range(301, 341):
            month, total, status = coin.randint(1, 6), coin.randrange(1000, 30000, 50), coin.choice(STATES)
            self.run(
                "INSERT INTO orders(id, customer, month, total, status) VALUES(?,?,?,?,?)",
                number,
                coin.randint(1, len(PEOPLE)),
                month,
                total,
                status,
            )
        for number in range(1, 25):
            status = coin.choice(("pending", "pending", "approved"))
            self.run(
                "INSERT INTO reviews VALUES(?,?,?,?,?)",
                number,
                coin.randint(1, 25),
                coin.choice(PEOPLE)[0],
                coin.randint(1, 5),
                status,
            )

    def home(self, request: Request) -> Response:
        counts = [(s, self.one("SELECT COUNT(*) FROM orders WHERE status=?", s)[0]) for s in STATES]
        return self.page("Dashboard", table([[s.title(), str(n)] for s, n in counts], ["Orders", "Count"]))

    def products(self, request: Request) -> Response:
        words = request.query.get("q", "")
        rows = self.rows(
            "SELECT id, sku, name FROM products WHERE name LIKE ? OR sku LIKE ? ORDER BY name LIMIT 10",
            f"%{words}%",
            f"%{words}%",
        )
        again = form("/products", field("q", "Name or SKU", words), "Search", "get")
        return self.page(
            "Products", again + table([[link(f"/products/{n}", name), sku] for n, sku, name in rows], ["Name", "SKU"])
        )

    def product(self, request: Request, number: str) -> Response:
        row = self.one("SELECT sku, name, price, stock, enabled FROM products WHERE id=?", number)
        if row is None:
            return self.missing("There is no such product.")
        sku, name, price, stock, enabled = row
        tick = f'<label><input type="checkbox" name="enabled" value="1"{" checked" if enabled else ""}> Enabled</label>'
        fields = (
            f"<p>SKU {sku}</p>"
            + field("name", "Name", name)
            + field("price", "Price", f"{price // 100}.{price % 100:02d}")
            + field("stock", "Stock", str(stock))
            + tick
        )
        return self.page(name, form(f"/products/{number}", fields, "Save product"))

    def save_product(self, request: Request, number: str) -> Response:
        form = request.form
        try:
            price, stock = round(float(form["price"]) * 100), int(form["stock"])
        except (KeyError, ValueError, OverflowError):
            return self.page(
                "Not saved", f"<p>Price and stock must be numbers.</p>{link(f'/products/{number}', 'Back')}", 400
            )
        if not form.get("name", "").strip() or not 0 <= price < 10**9 or not 0 <= stock < 10**9:
            return self.page(
                "Not saved",
                f"<p>A product has a name, and no negative numbers.</p>{link(f'/products/{number}', 'Back')}",
                400,
            )
        self.run(
            "UPDATE products SET name=?, price=?, stock=?, enabled=? WHERE id=?",
            form["name"].strip()[:100],
            price,
            stock,
            int("enabled" in form),
            number,
        )
        return self.redirect(f"/products/{number}")

    def orders(self, request: Request) -> Response:
        status, words = request.query.get("status", ""), request.query.get("q", "")
        rows = self.rows(
            "SELECT o.id, c.name, o.total, o.status FROM orders o JOIN customers c ON c.id=o.customer "
            "WHERE (?='' OR o.status=?) AND (c.name LIKE ? OR o.id LIKE ?) ORDER BY o.id DESC",
            status, status, f"%{words}%", f"%{words}%",
        )  # fmt: skip
        fields = field("q", "Order number or customer", words) + choice(
            "status", [("", "any status"), *((s, s) for s in STATES)], status, "Status"
        )
        lines = [[link(f"/orders/{n}", f"Order {n}"), escape(name), money(total), s] for n, name, total, s in rows[:10]]
        return self.page(
            "Orders",
            form("/orders", fields, "Filter", "get")
            + f"<p>{len(rows)} orders</p>"
            + table(lines, ["Order", "Customer", "Total", "Status"]),
        )

    def order(self, request: Request, number: str) -> Response:
        row = self.one(
            (
                "SELECT c.id, c.name, o.month, o.total, o.status, o.note FROM orders o JOIN customers c ON "
                "c.id=o.customer WHERE o.id=?"
            ),
            number,
        )
        if row is None:
            return self.missing("There is no such order.")
        who, name, month, total, status, note = row
        facts = table(
            [
                ["Customer", link(f"/customers/{who}", name)],
                ["Date", f"2026-{month:02d}-15"],
                ["Total", money(total)],
                ["Status", f'<span id="order_status">{status}</span>'],
                ["Note", f'<span id="note">{escape(note)}</span>'],
            ]
        )
        fields = choice("status", [(s, s) for s in STATES], status, "Status") + area(
            "note", "Note for the customer", note
        )
        return self.page(f"Order {number}", facts + form(f"/orders/{number}", fields, "Update order"))

    def save_order(self, request: Request, number: str) -> Response:
        status = request.form.get("status", "")
        if status not in STATES:
            return self.missing("There is no such status.")
        self.run(
            "UPDATE orders SET status=?, note=? WHERE id=?", status, request.form.get("note", "").strip()[:500], number
        )
        return self.redirect(f"/orders/{number}")

    def customers(self, request: Request) -> Response:
        words = request.query.get("q", "")
        rows = self.rows(
            "SELECT id, name, city FROM customers WHERE name LIKE ? OR email LIKE ? ORDER BY name LIMIT 10",
            f"%{words}%",
            f"%{words}%",
        )
        again = form("/customers", field("q", "Name or e-mail", words), "Search", "get")
        return self.page(
            "Customers",
            again + table([[link(f"/customers/{n}", name), city] for n, name, city in rows], ["Name", "City"]),
        )

    def customer(self, request: Request, number: str) -> Response:
        row = self.one("SELECT name, email, city FROM customers WHERE id=?", number)
        if row is None:
            return self.missing("There is no such customer.")
        orders = self.rows("SELECT id, total, status FROM orders WHERE customer=? ORDER BY id", number)
        facts = table([["E-mail", escape(row[1])], ["City", row[2]]])
        lines = [[link(f"/orders/{n}", f"Order {n}"), money(total), s] for n, total, s in orders]
        return self.page(row[0], facts + f"<h2>{len(orders)} orders</h2>" + table(lines))

    def reviews(self, request: Request) -> Response:
        status = request.query.get("status", "pending")
        rows = self.rows(
            (
                "SELECT r.id, p.name, r.author, r.stars FROM reviews r JOIN products p ON p.id=r.product WHERE "
                "r.status=? ORDER BY r.id"
            ),
            status,
        )
        again = form(
            "/reviews",
            choice(
                "status", [("pending", "pending"), ("approved", "approved"), ("rejected", "rejected")], status, "Status"
            ),
            "Filter",
            "get",
        )
        lines = [
            [link(f"/reviews/{n}", f"Review {n}"), escape(name), author, f"{stars} stars"]
            for n, name, author, stars in rows
        ]
        return self.page(
            "Reviews", again + f"<p>{len(rows)} reviews</p>" + table(lines, ["Review", "Product", "Author", "Stars"])
        )

    def review(self, request: Request, number: str) -> Response:
        row = self.one(
            "SELECT p.name, r.author, r.stars, r.status FROM reviews r JOIN products p ON p.id=r.product WHERE r.id=?",
            number,
        )
        if row is None:
            return self.missing("There is no such review.")
        facts = table(
            [
                ["Product", escape(row[0])],
                ["Author", row[1]],
                ["Stars", str(row[2])],
                ["Status", f'<span id="status">{row[3]}</span>'],
            ]
        )
        buttons = (
            '<button name="status" value="approved">Approve</button><button name="status" '
            'value="rejected">Reject</button>'
        )
        return self.page(
            f"Review {number}",
            facts + f'<form action="/reviews/{number}" method="post" autocomplete="off">{buttons}</form>',
        )

    def save_review(self, request: Request, number: str) -> Response:
        status = request.form.get("status", "")
        if status not in ("approved", "rejected"):
            return self.missing("A review is approved or rejected.")
        self.run("UPDATE reviews SET status=? WHERE id=?", status, number)
        return self.redirect(f"/reviews/{number}")

    def report(self, request: Request) -> Response:
        months = [(str(m), f"2026-{m:02d}") for m in range(1, 7)]
        first, last = request.query.get("from", "1"), request.query.get("to", "6")
        again = form(
            "/report", choice("from", months, first, "From") + choice("to", months, last, "To"), "Show report", "get"
        )
        if not {first, last} <= {month for month, _ in months} or "from" not in request.query:
            return self.page("Sales report", again)
        count, total = self.one(
            (
                "SELECT COUNT(*), COALESCE(SUM(total), 0) FROM orders WHERE month BETWEEN ? AND ? AND status != "
                "'cancelled'"
            ),
            int(first),
            int(last),
        )
        return self.page(
            "Sales report", again + table([["Orders", str(count)], ["Sales", money(total)]], name="report")
        )
