"""The forum: boards with posts, comments, votes and subscriptions."""

from __future__ import annotations

import random
from html import escape

from ..http import Request, Response
from .base import USER, Site, area, choice, field, form, link, table
from .words import TOPICS, USERS

SORTS = [("new", "Newest"), ("top", "Most votes"), ("talk", "Most comments")]
ORDERS = {"new": "p.id DESC", "top": "votes DESC, p.id", "talk": "comments DESC, p.id"}


class Forum(Site):
    key, title = "reddit", "Common Room"
    menu = (("/", "Posts"), ("/forums", "Forums"), ("/submit", "Submit"), (f"/user/{USER}", "My page"))
    schema = """
        CREATE TABLE posts(id INTEGER PRIMARY KEY, forum TEXT, author TEXT, title TEXT, body TEXT, votes INTEGER,
            my_vote INTEGER DEFAULT 0);
        CREATE TABLE comments(id INTEGER PRIMARY KEY, post INTEGER, author TEXT, text TEXT);
        CREATE TABLE subscriptions(forum TEXT PRIMARY KEY);
        CREATE TABLE people(name TEXT PRIMARY KEY, bio TEXT);
    """
    routes = (
        ("GET", "/", "home"),
        ("GET", "/forums", "forums"),
        ("GET", r"/f/([a-z]+)", "forum"),
        ("POST", r"/f/([a-z]+)/subscribe", "subscribe"),
        ("GET", r"/f/([a-z]+)/(\d{1,6})(?:/.*)?", "post"),
        ("POST", r"/f/([a-z]+)/(\d{1,6})/vote", "vote"),
        ("POST", r"/f/([a-z]+)/(\d{1,6})/comment", "comment"),
        ("GET", "/submit", "submit"),
        ("POST", "/submit", "save_post"),
        ("GET", r"/user/(\w{1,40})", "user"),
        ("GET", "/bio", "bio"),
        ("POST", "/bio", "save_bio"),
    )

    def fill(self, coin: random.Random) -> None:
        for name in [*USERS, USER]:
            self.run("INSERT INTO people VALUES(?,?)", name, "")
        posts = [(forum, topic) for forum, topics in TOPICS.items() for topic in topics]
        coin.shuffle(posts)
        votes = coin.sample(range(1, 200), len(posts))
        for number, (forum, topic) in enumerate(posts, 1):
            author = coin.choice(USERS)
            self.run(
                "INSERT INTO posts(id, forum, author, title, body, votes) VALUES(?,?,?,?,?,?)",
                number,
                forum,
                author,
                topic.capitalize(),
                f"I would like to hear what you think about {topic}.",
                votes[number - 1],
            )
            for who in coin.sample(USERS, coin.randint(0, 5)):
                words = coin.choice(
                    (
                        "Thank you for asking.",
                        "I have tried it and it works.",
                        "Never again!",
                        "It depends on the weather.",
                        "Ask me next year.",
                    )
                )
                self.run("INSERT INTO comments(post, author, text) VALUES(?,?,?)", number, who, words)

    def _list(self, where: str, order: str, *values: str) -> str:
        rows = self.rows(
            "SELECT p.id, p.forum, p.title, p.author, p.votes + p.my_vote AS votes, (SELECT COUNT(*) FROM comments c "
            f"WHERE c.post=p.id) AS comments FROM posts p {where} ORDER BY {order} LIMIT 10",
            *values,
        )
        lines = [
            [link(f"/f/{f}/{n}", title), f"by {escape(a)} in {f}", f"{v} votes", f"{c} comments"]
            for n, f, title, a, v, c in rows
        ]
        return table(lines, name="posts")

    def _sorting(self, where: str, sort: str) -> str:
        return form(where, choice("sort", SORTS, sort, "Sort by"), "Sort", "get")

    def home(self, request: Request) -> Response:
        sort = request.query.get("sort", "new")
        return self.page("All posts", self._sorting("/", sort) + self._list("", ORDERS.get(sort, "p.id DESC")))

    def forums(self, request: Request) -> Response:
        subscribed = {f for (f,) in self.rows("SELECT forum FROM subscriptions")}
        return self.page(
            "Forums",
            "<ul>"
            + "".join(f"<li>{link(f'/f/{f}', f)}{' (subscribed)' if f in subscribed else ''}</li>" for f in TOPICS)
            + "</ul>",
        )

    def forum(self, request: Request, name: str) -> Response:
        if name not in TOPICS:
            return self.missing("There is no such forum.")
        sort = request.query.get("sort", "new")
        joined = self.one("SELECT 1 FROM subscriptions WHERE forum=?", name) is not None
        button = form(
            f"/f/{name}/subscribe", "", "Unsubscribe" if joined else "Subscribe", css="subscribed" if joined else "open"
        )
        return self.page(
            name,
            self._sorting(f"/f/{name}", sort)
            + button
            + self._list("WHERE p.forum=?", ORDERS.get(sort, "p.id DESC"), name),
        )

    def subscribe(self, request: Request, name: str) -> Response:
        if name not in TOPICS:
            return self.missing("There is no such forum.")
        if self.one("SELECT 1 FROM subscriptions WHERE forum=?", name):
            self.run("DELETE FROM subscriptions WHERE forum=?", name)
        else:
            self.run("INSERT INTO subscriptions VALUES(?)", name)
        return self.redirect(f"/f/{name}")

    def post(self, request: Request, name: str, number: str) -> Response:
        row = self.one("SELECT author, title, body, votes, my_vote FROM posts WHERE id=? AND forum=?", number, name)
        if row is None:
            return self.missing("There is no such post.")
        author, title, body, votes, my_vote = row
        state = {1: "vote-up", -1: "vote-down"}.get(my_vote, "vote-none")
        buttons = '<button name="way" value="1">Upvote</button><button name="way" value="-1">Downvote</button>'
        comments = self.rows("SELECT author, text FROM comments WHERE post=? ORDER BY id", number)
        lines = "".join(
            f'<li class="comment">{link(f"/user/{a}", a)} <span>{escape(t)}</span></li>' for a, t in comments
        )
        parts = [
            (
                '<div class="submission__inner"><p>Posted by '
                f"{link(f'/user/{author}', author)}</p><p>{escape(body)}</p></div>"
            ),
            f'<div class="submission__vote"><p>{votes + my_vote} votes</p>'
            f'<form class="{state}" action="/f/{name}/{number}/vote" method="post" '
            f'autocomplete="off">{buttons}</form></div>',
            f'<h2>{len(comments)} comments</h2><ul id="comments">{lines}</ul>',
            form(f"/f/{name}/{number}/comment", area("text", "Your comment"), "Send comment"),
        ]
        return self.page(title, "".join(parts))

    def vote(self, request: Request, name: str, number: str) -> Response:
        way = request.form.get("way")
        if way not in ("1", "-1"):
            return self.missing("A vote goes up or down.")
        change = "UPDATE posts SET my_vote=CASE WHEN my_vote=? THEN 0 ELSE ? END WHERE id=?"
        self.run(change, int(way), int(way), number)
        return self.redirect(f"/f/{name}/{number}")

    def comment(self, request: Request, name: str, number: str) -> Response:
        text = request.form.get("text", "").strip()
        if text:
            self.run("INSERT INTO comments(post, author, text) VALUES(?,?,?)", number, USER, text[:1000])
        return self.redirect(f"/f/{name}/{number}")

    def submit(self, request: Request) -> Response:
        boards = [(f, f) for f in TOPICS]
        fields = (
            choice("forum", boards, request.query.get("forum", ""), "Forum")
            + field("title", "Title")
            + area("body", "Text")
        )
        return self.page("New post", form("/submit", fields, "Create post"))

    def save_post(self, request: Request) -> Response:
        form = {k: request.form.get(k, "").strip()[:1000] for k in ("forum", "title", "body")}
        if form["forum"] not in TOPICS or not form["title"]:
            return self.missing("A post needs a forum and a title.")
        new = self.run(
            "INSERT INTO posts(forum, author, title, body, votes) VALUES(?,?,?,?,0)",
            form["forum"],
            USER,
            form["title"],
            form["body"],
        )
        return self.redirect(f"/f/{form['forum']}/{new}")

    def user(self, request: Request, name: str) -> Response:
        row = self.one("SELECT bio FROM people WHERE name=?", name)
        if row is None:
            return self.missing("There is no such person.")
        edit = link("/bio", "Edit biography") if name == USER else ""
        return self.page(
            name,
            f'<p class="bio">{escape(row[0] or "No biography.")}</p>{edit}'
            f"{self._list('WHERE p.author=?', 'p.id DESC', name)}",
        )

    def bio(self, request: Request) -> Response:
        return self.page(
            "Biography",
            form("/bio", area("bio", "About you", self.one("SELECT bio FROM people WHERE name=?", USER)[0]), "Save"),
        )

    def save_bio(self, request: Request) -> Response:
        self.run("UPDATE people SET bio=? WHERE name=?", request.form.get("bio", "").strip()[:500], USER)
        return self.redirect(f"/user/{USER}")
