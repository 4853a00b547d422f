"""The repository tracker: projects, issues, members and stars."""

from __future__ import annotations

import random
import re
from html import escape

from ..http import Request, Response
from .base import USER, Site, area, choice, field, form, link, table
from .words import BUGS, TOOLS, USERS

LABELS = ["bug", "question", "docs", "speed"]
ROLES = ["Guest", "Reporter", "Developer", "Maintainer"]


class Tracker(Site):
    key, title = "gitlab", "Workbench"
    menu = (("/", "Projects"), ("/assigned", "Assigned to me"), ("/new", "New project"))
    schema = """
        CREATE TABLE projects(id INTEGER PRIMARY KEY, owner TEXT, name TEXT, about TEXT, stars INTEGER,
            starred INTEGER DEFAULT 0, visibility TEXT);
        CREATE TABLE issues(id INTEGER PRIMARY KEY, project INTEGER, number INTEGER, title TEXT, body TEXT, author TEXT,
            assignee TEXT, label TEXT, state TEXT);
        CREATE TABLE notes(id INTEGER PRIMARY KEY, issue INTEGER, author TEXT, text TEXT);
        CREATE TABLE members(project INTEGER, name TEXT, role TEXT, UNIQUE(project, name));
    """
    routes = (
        ("GET", "/", "home"),
        ("GET", "/assigned", "assigned"),
        ("GET", "/new", "new_project"),
        ("POST", "/new", "save_project"),
        ("GET", r"/([a-z_]+)/([\w-]+)", "project"),
        ("POST", r"/([a-z_]+)/([\w-]+)/star", "star"),
        ("GET", r"/([a-z_]+)/([\w-]+)/issues", "issues"),
        ("GET", r"/([a-z_]+)/([\w-]+)/issues/new", "new_issue"),
        ("POST", r"/([a-z_]+)/([\w-]+)/issues/new", "save_issue"),
        ("GET", r"/([a-z_]+)/([\w-]+)/issues/(\d{1,5})", "issue"),
        ("POST", r"/([a-z_]+)/([\w-]+)/issues/(\d{1,5})", "change_issue"),
        ("POST", r"/([a-z_]+)/([\w-]+)/issues/(\d{1,5})/notes", "add_note"),
        ("GET", r"/([a-z_]+)/([\w-]+)/members", "members"),
        ("POST", r"/([a-z_]+)/([\w-]+)/members", "invite"),
    )

    def fill(self, coin: random.Random) -> None:
        stars = coin.sample(range(3, 300), len(TOOLS))
        for number, name in enumerate(TOOLS, 1):
            owner = USER if number <= 4 else coin.choice(USERS)
            self.run(
                "INSERT INTO projects VALUES(?,?,?,?,?,0,?)",
                number,
                owner,
                name,
                f"A small tool called {name}.",
                stars[number - 1],
                coin.choice(("public", "private")),
            )
            team = coin.sample(USERS, 4)
            for who in team[:2]:
                self.run("INSERT INTO members VALUES(?,?,?)", number, who, coin.choice(ROLES))
            for count, title in enumerate(coin.sample(BUGS, coin.randint(3, 7)), 1):
                values = (
                    title,
                    f"Please look into this: {title.lower()}.",
                    coin.choice(team),
                    coin.choice([*team[:3], "nobody"]),
                    coin.choice(LABELS),
                    coin.choice(("open", "open", "closed")),
                )
                self.run(
                    (
                        "INSERT INTO issues(project, number, title, body, author, assignee, label, state) "
                        "VALUES(?,?,?,?,?,?,?,?)"
                    ),
                    number,
                    count,
                    *values,
                )

    def _find(self, owner: str, name: str) -> tuple[int, str, int, int, str] | None:
        return self.one(
            "SELECT id, about, stars, starred, visibility FROM projects WHERE owner=? AND name=?", owner, name
        )

    def home(self, request: Request) -> Response:
        words = request.query.get("q", "")
        rows = self.rows(
            "SELECT owner, name, stars + starred FROM projects WHERE name LIKE ? ORDER BY name", f"%{words}%"
        )
        lines = [[link(f"/{o}/{n}", f"{o}/{n}"), f"{s} stars"] for o, n, s in rows]
        return self.page(
            "Projects", form("/", field("q", "Find a project", words), "Search", "get") + table(lines, name="projects")
        )

    def assigned(self, request: Request) -> Response:
        rows = self.rows(
            "SELECT p.owner, p.name, i.number, i.title FROM issues i JOIN projects p ON p.id=i.project "
            "WHERE i.assignee=? AND i.state='open' ORDER BY i.id",
            USER,
        )
        return self.page(
            "Assigned to me",
            table([[link(f"/{o}/{n}/issues/{k}", title), f"{o}/{n}"] for o, n, k, title in rows], name="assigned"),
        )

    def new_project(self, request: Request) -> Response:
        fields = (
            field("name", "Project name")
            + field("about", "Description")
            + choice("visibility", [("private", "private"), ("public", "public")], hint="Visibility")
        )
        return self.page("New project", form("/new", fields, "Create project"))

    def save_project(self, request: Request) -> Response:
        name, about, visibility = (request.form.get(k, "").strip()[:100] for k in ("name", "about", "visibility"))
        plain = re.fullmatch(r"[\w-]+", name, re.ASCII)
        if not plain or visibility not in ("public", "private") or self._find(USER, name):
            return self.page("Not created", "<p>A project needs a new name of letters and digits.</p>", 400)
        self.run(
            "INSERT INTO projects(owner, name, about, stars, visibility) VALUES(?,?,?,0,?)",
            USER,
            name,
            about,
            visibility,
        )
        return self.redirect(f"/{USER}/{name}")

    def project(self, request: Request, owner: str, name: str) -> Response:
        row = self._find(owner, name)
        if row is None:
            return self.missing("There is no such project.")
        number, about, stars, starred, visibility = row
        here = f"/{owner}/{name}"
        count = self.one("SELECT COUNT(*) FROM issues WHERE project=? AND state='open'", number)[0]
        facts = table(
            [
                ["About", f'<span id="about">{escape(about)}</span>'],
                ["Visibility", f'<span id="visibility">{visibility}</span>'],
                ["Stars", str(stars + starred)],
                ["Open issues", str(count)],
            ]
        )
        links = (
            f"<p>{link(f'{here}/issues', 'Issues')} {link(f'{here}/issues/new', 'New issue')} "
            f"{link(f'{here}/members', 'Members')}</p>"
        )
        return self.page(
            f"{owner}/{name}",
            links
            + facts
            + form(f"{here}/star", "", "Unstar" if starred else "Star", css="starred" if starred else "unstarred"),
        )

    def star(self, request: Request, owner: str, name: str) -> Response:
        self.run("UPDATE projects SET starred=1-starred WHERE owner=? AND name=?", owner, name)
        return self.redirect(f"/{owner}/{name}")

    def issues(self, request: Request, owner: str, name: str) -> Response:
        row = self._find(owner, name)
        if row is None:
            return self.missing("There is no such project.")
        state, label = request.query.get("state", "open"), request.query.get("label", "")
        rows = self.rows(
            "SELECT number, title, label, assignee FROM issues "
            "WHERE project=? AND (?='all' OR state=?) AND (?='' OR label=?) ORDER BY number",
            row[0],
            state,
            state,
            label,
            label,
        )
        fields = choice("state", [("open", "open"), ("closed", "closed"), ("all", "all")], state, "State") + choice(
            "label", [("", "any label"), *((v, v) for v in LABELS)], label, "Label"
        )
        lines = [[link(f"/{owner}/{name}/issues/{n}", title), tag, f"assigned to {who}"] for n, title, tag, who in rows]
        return self.page(
            f"Issues of {owner}/{name}",
            form(f"/{owner}/{name}/issues", fields, "Filter", "get")
            + f"<p>{len(rows)} issues</p>"
            + table(lines, name="issues"),
        )

    def new_issue(self, request: Request, owner: str, name: str) -> Response:
        fields = (
            field("title", "Title")
            + area("body", "Description")
            + choice("label", [(v, v) for v in LABELS], hint="Label")
        )
        return self.page("New issue", form(f"/{owner}/{name}/issues/new", fields, "Create issue"))

    def save_issue(self, request: Request, owner: str, name: str) -> Response:
        row, title, label = (
            self._find(owner, name),
            request.form.get("title", "").strip()[:200],
            request.form.get("label", ""),
        )
        if row is None or not title or label not in LABELS:
            return self.missing("An issue needs a project, a title and a label.")
        number = self.one("SELECT COALESCE(MAX(number), 0) + 1 FROM issues WHERE project=?", row[0])[0]
        values = (row[0], number, title, request.form.get("body", "").strip()[:1000], USER, "nobody", label, "open")
        self.run(
            "INSERT INTO issues(project, number, title, body, author, assignee, label, state) VALUES(?,?,?,?,?,?,?,?)",
            *values,
        )
        return self.redirect(f"/{owner}/{name}/issues/{number}")

    def _issue(self, owner: str, name: str, number: str) -> tuple[int, str, str, str, str, str, str] | None:
        return self.one(
            "SELECT i.id, i.title, i.body, i.author, i.assignee, i.label, i.state FROM issues i JOIN projects p ON "
            "p.id=i.project WHERE p.owner=? AND p.name=? AND i.number=?",
            owner, name, number,
        )  # fmt: skip

    def issue(self, request: Request, owner: str, name: str, number: str) -> Response:
        row = self._issue(owner, name, number)
        if row is None:
            return self.missing("There is no such issue.")
        key, title, body, author, assignee, label, state = row
        here = f"/{owner}/{name}/issues/{number}"
        facts = table(
            [
                ["State", f'<span id="state">{state}</span>'],
                ["Author", author],
                ["Assignee", f'<span class="assignee">{assignee}</span>'],
                ["Label", f'<span class="label">{label}</span>'],
            ]
        )
        team = [
            ("nobody", "nobody"),
            (USER, USER),
            *(
                (m, m)
                for (m,) in self.rows(
                    (
                        "SELECT m.name FROM members m JOIN projects p ON p.id=m.project WHERE p.owner=? AND p.name=? "
                        "ORDER BY m.name"
                    ),
                    owner,
                    name,
                )
            ),
        ]
        notes = "".join(
            f"<li>{escape(a)}: {escape(t)}</li>"
            for a, t in self.rows("SELECT author, text FROM notes WHERE issue=? ORDER BY id", key)
        )
        other, verb = ("open", "Reopen") if state == "closed" else ("closed", "Close")
        parts = [
            f"<p>{link(f'/{owner}/{name}/issues', 'All issues')}</p><p>{escape(body)}</p>{facts}",
            form(here, choice("assignee", team, assignee, "Assignee"), "Assign"),
            (
                f'<form action="{here}" method="post" autocomplete="off"><button name="state" '
                f'value="{other}">{verb} issue</button></form>'
            ),
            f'<ul id="notes-list">{notes}</ul>' if notes else "",
            form(f"{here}/notes", area("text", "Your comment"), "Comment"),
        ]
        return self.page(title, "".join(parts))

    def change_issue(self, request: Request, owner: str, name: str, number: str) -> Response:
        row = self._issue(owner, name, number)
        if row is None:
            return self.missing("There is no such issue.")
        if request.form.get("state") in ("open", "closed"):
            self.run("UPDATE issues SET state=? WHERE id=?", request.form["state"], row[0])
        if request.form.get("assignee"):
            self.run("UPDATE issues SET assignee=? WHERE id=?", request.form["assignee"][:60], row[0])
        return self.redirect(f"/{owner}/{name}/issues/{number}")

    def add_note(self, request: Request, owner: str, name: str, number: str) -> Response:
        row, text = self._issue(owner, name, number), request.form.get("text", "").strip()
        if row is not None and text:
            self.run("INSERT INTO notes(issue, author, text) VALUES(?,?,?)", row[0], USER, text[:1000])
        return self.redirect(f"/{owner}/{name}/issues/{number}")

    def members(self, request: Request, owner: str, name: str) -> Response:
        row = self._find(owner, name)
        if row is None:
            return self.missing("There is no such project.")
        rows = self.rows("SELECT name, role FROM members WHERE project=? ORDER BY name", row[0])
        lines = [[f"@{escape(who)}", f'<span class="role">{role}</span>'] for who, role in rows]
        invite = form(
            f"/{owner}/{name}/members",
            field("name", "User name") + choice("role", [(r, r) for r in ROLES], hint="Role"),
            "Invite",
        )
        return self.page(f"Members of {owner}/{name}", table(lines, name="members") + invite)

    def invite(self, request: Request, owner: str, name: str) -> Response:
        row, who, role = self._find(owner, name), request.form.get("name", "").strip(), request.form.get("role", "")
        if row is None or who not in USERS or role not in ROLES:
            return self.page(
                "Not invited", f"<p>There is no such user.</p>{link(f'/{owner}/{name}/members', 'Back')}", 400
            )
        self.run(
            "INSERT INTO members VALUES(?,?,?) ON CONFLICT(project, name) DO UPDATE SET role=excluded.role",
            row[0],
            who,
            role,
        )
        return self.redirect(f"/{owner}/{name}/members")
