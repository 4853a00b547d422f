"""Task templates of the forum, the store's back office and the repository tracker."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .sites.admin import STATES
from .sites.base import USER, Site, money
from .sites.tracker import LABELS, ROLES
from .sites.words import TOPICS, USERS
from .templates import Check, Instance, Step, template, text_at, value_at

Sites = dict[str, Site]


def _posts(sites: Sites) -> list[tuple[int, str, str, str, int, int]]:
    return sites["reddit"].rows(
        "SELECT p.id, p.forum, p.author, p.title, p.votes, (SELECT COUNT(*) FROM comments c WHERE c.post=p.id) FROM "
        "posts p ORDER BY p.id"
    )


def _read(forum: str, title: str) -> list[Step]:
    return [("click", "Forums"), ("click", forum), ("click", title)]


@template(201, "reddit", 'Who wrote the post "{{title}}" in the forum {{forum}}?')
def author(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, forum, who, title, *_ in _posts(sites):
        yield Instance(
            {"title": title, "forum": forum}, Check().says(exact_match=who).done, [*_read(forum, title), ("exit", who)]
        )


@template(202, "reddit", 'How many comments has the post "{{title}}" in the forum {{forum}}? Answer with the number.')
def comments(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, forum, _, title, _, count in _posts(sites):
        yield Instance(
            {"title": title, "forum": forum},
            Check().says(must_include=[str(count)]).done,
            [*_read(forum, title), ("exit", str(count))],
        )


def _voting(sites: Sites, state: str, button: str) -> Iterator[Instance]:
    for number, forum, _, title, *_ in _posts(sites):
        locator = "document.querySelector('div.submission__vote').querySelector('form').getAttribute('class')"
        check = Check().page(f"__REDDIT__/f/{forum}/{number}", locator, must_include=[state])
        yield Instance(
            {"title": title, "forum": forum}, check.done, [*_read(forum, title), ("click", button), ("exit", "")]
        )


@template(203, "reddit", 'Vote for the post "{{title}}" in the forum {{forum}}.')
def upvote(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    yield from _voting(sites, "vote-up", "Upvote")


@template(204, "reddit", 'Vote against the post "{{title}}" in the forum {{forum}}.')
def downvote(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    yield from _voting(sites, "vote-down", "Downvote")


@template(205, "reddit", 'Comment "{{text}}" on the post "{{title}}" in the forum {{forum}}.')
def comment(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, forum, _, title, *_ in _posts(sites):
        text = coin.choice(("I agree", "Please tell more", "That is new to me", "Let us meet and try it"))
        check = Check().page(f"__REDDIT__/f/{forum}/{number}", text_at("#comments"), must_include=[text, USER])
        steps: list[Step] = [
            *_read(forum, title),
            ("type", "Your comment", text),
            ("click", "Send comment"),
            ("exit", ""),
        ]
        yield Instance({"text": text, "title": title, "forum": forum}, check.done, steps)


@template(206, "reddit", 'Write a post in the forum {{forum}} with the title "{{title}}" and the text "{{text}}".')
def write(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for forum in TOPICS:
        for title in ("A question for all", "Looking for advice", "What I learned today", "Meeting on Sunday"):
            text = coin.choice(("I am new here.", "Thank you in advance.", "Tell me what you know."))
            url = "func:reddit_get_post_url('__last_url__')"
            check = Check().at(f"__REDDIT__/f/{forum}/").page(url, text_at("h1"), exact_match=title)
            check.page(url, text_at(".submission__inner"), must_include=[text])
            steps: list[Step] = [
                ("click", "Submit"),
                ("select", "Forum", forum),
                ("type", "Title", title),
                ("type", "Text", text),
                ("click", "Create post"),
                ("exit", ""),
            ]
            yield Instance({"forum": forum, "title": title, "text": text}, check.done, steps)


@template(207, "reddit", "Subscribe to the forum {{forum}}.")
def subscribe(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for forum in TOPICS:
        check = Check().page(
            f"__REDDIT__/f/{forum}", "document.querySelector('form.subscribed').className", exact_match="subscribed"
        )
        yield Instance(
            {"forum": forum}, check.done, [("click", "Forums"), ("click", forum), ("click", "Subscribe"), ("exit", "")]
        )


@template(208, "reddit", "Show the posts of the forum {{forum}}, those with the {{order}} first.")
def sorted_forum(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for forum in TOPICS:
        for order, option, value in (("most votes", "Most votes", "top"), ("most comments", "Most comments", "talk")):
            steps: list[Step] = [
                ("click", "Forums"),
                ("click", forum),
                ("select", "Sort by", option),
                ("click", "Sort"),
                ("exit", ""),
            ]
            yield Instance(
                {"forum": forum, "order": order}, Check().at(f"__REDDIT__/f/{forum}?sort={value}").done, steps
            )


@template(209, "reddit", "Which post of the forum {{forum}} has the most votes? Answer with its title.")
def top(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for forum in TOPICS:
        title = max((row for row in _posts(sites) if row[1] == forum), key=lambda row: row[4])[3]
        yield Instance(
            {"forum": forum},
            Check().says(exact_match=title).done,
            [("click", "Forums"), ("click", forum), ("exit", title)],
        )


@template(210, "reddit", 'Set my biography to "{{text}}".')
def biography(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for city in ("Aldport", "Brenwick", "Dunmere", "Eastvale", "Fernhill"):
        for work in ("baker", "gardener", "teacher"):
            text = f"I am a {work} in {city}"
            check = Check().page(f"__REDDIT__/user/{USER}", text_at(".bio"), exact_match=text)
            steps: list[Step] = [
                ("click", "My page"),
                ("click", "Edit biography"),
                ("type", "About you", text),
                ("click", "Save"),
                ("exit", ""),
            ]
            yield Instance({"text": text}, check.done, steps)


def _goods(sites: Sites) -> list[tuple[int, str, str]]:
    return sites["shopping_admin"].rows("SELECT id, sku, name FROM products ORDER BY id")


def _edit(sku: str, name: str) -> list[Step]:
    return [("click", "Products"), ("search", "Name or SKU", sku), ("click", name)]


@template(301, "shopping_admin", "What is the e-mail address of the customer {{customer}}?")
def email(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for name, mail in sites["shopping_admin"].rows("SELECT name, email FROM customers ORDER BY id"):
        steps: list[Step] = [
            ("click", "Customers"),
            ("search", "Name or e-mail", name),
            ("click", name),
            ("exit", mail),
        ]
        yield Instance({"customer": name}, Check().says(exact_match=mail).done, steps)


def _saving(sites: Sites, coin: random.Random, field: str, hint: str, low: int, high: int) -> Iterator[Instance]:
    for number, sku, name in _goods(sites):
        value = str(coin.randint(low, high)) + (".25" if field == "price" else "")  # no product has it already
        check = Check().page(f"__SHOPPING_ADMIN__/products/{number}", value_at(f'[name="{field}"]'), exact_match=value)
        steps: list[Step] = [*_edit(sku, name), ("type", hint, value), ("click", "Save product"), ("exit", "")]
        yield Instance({"sku": sku, field: value}, check.done, steps)


@template(302, "shopping_admin", "Set the price of the product {{sku}} to {{price}}.")
def set_price(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    yield from _saving(sites, coin, "price", "Price", 5, 99)


@template(303, "shopping_admin", "Set the stock of the product {{sku}} to {{stock}}.")
def set_stock(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    yield from _saving(sites, coin, "stock", "Stock", 100, 999)


@template(304, "shopping_admin", "Disable the product {{sku}}.")
def disable(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, sku, name in _goods(sites):
        locator = "document.querySelector('[name=\"enabled\"]').checked.toString()"
        check = Check().page(f"__SHOPPING_ADMIN__/products/{number}", locator, exact_match="false")
        yield Instance(
            {"sku": sku}, check.done, [*_edit(sku, name), ("tick", "enabled"), ("click", "Save product"), ("exit", "")]
        )


def _order(number: int) -> list[Step]:
    return [("click", "Orders"), ("search", "Order number or customer", str(number)), ("click", f"Order {number}")]


@template(305, "shopping_admin", "Change the status of order {{order}} to {{status}}.")
def set_status(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, old in sites["shopping_admin"].rows("SELECT id, status FROM orders ORDER BY id"):
        new = coin.choice([s for s in STATES if s != old])
        check = Check().page(f"__SHOPPING_ADMIN__/orders/{number}", text_at("#order_status"), exact_match=new)
        steps: list[Step] = [*_order(number), ("select", "Status", new), ("click", "Update order"), ("exit", "")]
        yield Instance({"order": str(number), "status": new}, check.done, steps)


@template(306, "shopping_admin", "{{verb}} the review number {{review}}.")
def decide(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for (number,) in sites["shopping_admin"].rows("SELECT id FROM reviews WHERE status='pending' ORDER BY id"):
        verb, state = coin.choice((("Approve", "approved"), ("Reject", "rejected")))
        check = Check().page(f"__SHOPPING_ADMIN__/reviews/{number}", text_at("#status"), exact_match=state)
        steps: list[Step] = [("click", "Reviews"), ("click", f"Review {number}"), ("click", verb), ("exit", "")]
        yield Instance({"verb": verb, "review": str(number)}, check.done, steps)


def _months(sites: Sites) -> Iterator[tuple[int, int, list[Step]]]:
    for first in range(1, 7):
        for last in range(first, 7):
            steps: list[Step] = [
                ("click", "Report"),
                ("select", "From", f"2026-{first:02d}"),
                ("select", "To", f"2026-{last:02d}"),
                ("click", "Show report"),
            ]
            yield first, last, steps


@template(307, "shopping_admin", "What were the sales from 2026-{{from}} to 2026-{{to}}?")
def sales(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for first, last, steps in _months(sites):
        query = "SELECT COALESCE(SUM(total), 0) FROM orders WHERE month BETWEEN ? AND ? AND status != 'cancelled'"
        answer = money(sites["shopping_admin"].one(query, first, last)[0])
        check = Check().says(must_include=[answer.lstrip("$")])
        yield Instance({"from": f"{first:02d}", "to": f"{last:02d}"}, check.done, [*steps, ("exit", answer)])


@template(308, "shopping_admin", "How many orders are {{status}}? Answer with the number.")
def count_orders(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for status in STATES:
        answer = str(sites["shopping_admin"].one("SELECT COUNT(*) FROM orders WHERE status=?", status)[0])
        yield Instance(
            {"status": status}, Check().says(exact_match=answer).done, [("click", "Dashboard"), ("exit", answer)]
        )


@template(309, "shopping_admin", "Show the sales report from 2026-{{from}} to 2026-{{to}}.")
def show_report(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for first, last, steps in _months(sites):
        check = Check().at(f"__SHOPPING_ADMIN__/report?from={first}&to={last}")
        yield Instance({"from": f"{first:02d}", "to": f"{last:02d}"}, check.done, [*steps, ("exit", "")])


@template(310, "shopping_admin", 'Write the note "{{text}}" on order {{order}}.')
def note(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for (number,) in sites["shopping_admin"].rows("SELECT id FROM orders ORDER BY id"):
        text = coin.choice(("Call before delivery", "Packed as a gift", "Paid in cash", "Two parcels"))
        check = Check().page(f"__SHOPPING_ADMIN__/orders/{number}", text_at("#note"), must_include=[text])
        steps: list[Step] = [
            *_order(number),
            ("type", "Note for the customer", text),
            ("click", "Update order"),
            ("exit", ""),
        ]
        yield Instance({"text": text, "order": str(number)}, check.done, steps)


def _issues(sites: Sites) -> list[tuple[str, str, int, str, str, str]]:
    return sites["gitlab"].rows(
        "SELECT p.owner, p.name, i.number, i.title, i.assignee, i.state FROM issues i JOIN projects p ON "
        "p.id=i.project ORDER BY i.id"
    )


def _projects(sites: Sites) -> list[tuple[int, str, str]]:
    return sites["gitlab"].rows("SELECT id, owner, name FROM projects ORDER BY id")


def _issue(owner: str, name: str, title: str, state: str) -> list[Step]:
    shown: list[Step] = [] if state == "open" else [("select", "State", "all"), ("click", "Filter")]
    return [("click", f"{owner}/{name}"), ("click", "Issues"), *shown, ("click", title)]


@template(401, "gitlab", 'Who is assigned to the issue "{{title}}" of {{project}}?')
def assignee(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for owner, name, _, title, who, state in _issues(sites):
        values = {"title": title, "project": f"{owner}/{name}"}
        yield Instance(values, Check().says(exact_match=who).done, [*_issue(owner, name, title, state), ("exit", who)])


@template(402, "gitlab", "How many open issues has {{project}}? Answer with the number.")
def open_issues(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, owner, name in _projects(sites):
        answer = str(sites["gitlab"].one("SELECT COUNT(*) FROM issues WHERE project=? AND state='open'", number)[0])
        yield Instance(
            {"project": f"{owner}/{name}"},
            Check().says(exact_match=answer).done,
            [("click", f"{owner}/{name}"), ("exit", answer)],
        )


@template(403, "gitlab", 'Create an issue in {{project}} with the title "{{title}}" and the label {{label}}.')
def new_issue(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, owner, name in _projects(sites):
        for title in ("Add a search field", "Write more tests", "Support dark mode"):
            label = coin.choice(LABELS)
            check = Check().at(f"__GITLAB__/{owner}/{name}/issues/").page("last", text_at("h1"), exact_match=title)
            check.page("last", text_at(".label"), exact_match=label)
            steps: list[Step] = [
                ("click", f"{owner}/{name}"),
                ("click", "New issue"),
                ("type", "Title", title),
                ("select", "Label", label),
                ("click", "Create issue"),
                ("exit", ""),
            ]
            yield Instance({"project": f"{owner}/{name}", "title": title, "label": label}, check.done, steps)


@template(404, "gitlab", 'Close the issue "{{title}}" of {{project}}.')
def close(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for owner, name, number, title, _, state in _issues(sites):
        if state == "open":
            check = Check().page(f"__GITLAB__/{owner}/{name}/issues/{number}", text_at("#state"), exact_match="closed")
            steps: list[Step] = [*_issue(owner, name, title, state), ("click", "Close issue"), ("exit", "")]
            yield Instance({"title": title, "project": f"{owner}/{name}"}, check.done, steps)


@template(405, "gitlab", 'Assign the issue "{{title}}" of {{project}} to me.')
def assign(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for owner, name, number, title, _, state in _issues(sites):
        check = Check().page(f"__GITLAB__/{owner}/{name}/issues/{number}", text_at(".assignee"), exact_match=USER)
        steps: list[Step] = [
            *_issue(owner, name, title, state),
            ("select", "Assignee", USER),
            ("click", "Assign"),
            ("exit", ""),
        ]
        yield Instance({"title": title, "project": f"{owner}/{name}"}, check.done, steps)


@template(406, "gitlab", "Invite {{user}} to {{project}} as {{role}}.")
def invite(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, owner, name in _projects(sites):
        inside = {who for (who,) in sites["gitlab"].rows("SELECT name FROM members WHERE project=?", number)}
        for user in coin.sample([u for u in USERS if u not in inside], 3):
            role = coin.choice(ROLES)
            locator = f"func:gitlab_get_project_memeber_role(__page__, '{user}')"
            check = Check().page(f"__GITLAB__/{owner}/{name}/members", locator, must_include=[role])
            steps: list[Step] = [
                ("click", f"{owner}/{name}"),
                ("click", "Members"),
                ("type", "User name", user),
                ("select", "Role", role),
                ("click", "Invite"),
                ("exit", ""),
            ]
            yield Instance({"user": user, "project": f"{owner}/{name}", "role": role}, check.done, steps)


@template(407, "gitlab", "Star the project {{project}}.")
def star(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, owner, name in _projects(sites):
        check = Check().page(
            f"__GITLAB__/{owner}/{name}", "document.querySelector('main form').className", exact_match="starred"
        )
        yield Instance(
            {"project": f"{owner}/{name}"}, check.done, [("click", f"{owner}/{name}"), ("click", "Star"), ("exit", "")]
        )


@template(408, "gitlab", "Show the {{state}} issues of {{project}} with the label {{label}}.")
def labelled(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, owner, name in _projects(sites):
        state, label = coin.choice(("open", "closed")), coin.choice(LABELS)
        check = Check().at(f"__GITLAB__/{owner}/{name}/issues?state={state}&label={label}")
        steps: list[Step] = [
            ("click", f"{owner}/{name}"),
            ("click", "Issues"),
            ("select", "State", state),
            ("select", "Label", label),
            ("click", "Filter"),
            ("exit", ""),
        ]
        yield Instance({"state": state, "project": f"{owner}/{name}", "label": label}, check.done, steps)


@template(409, "gitlab", 'Comment "{{text}}" on the issue "{{title}}" of {{project}}.')
def note_issue(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for owner, name, number, title, _, state in _issues(sites):
        text = coin.choice(("I will look into it", "Cannot reproduce this", "Fixed in the next release"))
        check = Check().page(f"__GITLAB__/{owner}/{name}/issues/{number}", text_at("#notes-list"), must_include=[text])
        steps: list[Step] = [
            *_issue(owner, name, title, state),
            ("type", "Your comment", text),
            ("click", "Comment"),
            ("exit", ""),
        ]
        yield Instance({"text": text, "title": title, "project": f"{owner}/{name}"}, check.done, steps)


@template(410, "gitlab", "Create a {{visibility}} project called {{name}}.")
def new_project(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for name in ("kelp", "lumen", "mosaic", "nectar", "orbit", "prism", "quartz", "ripple", "sextant", "tundra"):
        visibility = coin.choice(("public", "private"))
        check = (
            Check()
            .at(f"__GITLAB__/{USER}/{name}", "EXACT")
            .page(f"__GITLAB__/{USER}/{name}", text_at("#visibility"), exact_match=visibility)
        )
        steps: list[Step] = [
            ("click", "New project"),
            ("type", "Project name", name),
            ("select", "Visibility", visibility),
            ("click", "Create project"),
            ("exit", ""),
        ]
        yield Instance({"visibility": visibility, "name": name}, check.done, steps)
