"""Observations: the text form reads back byte for byte, ids are stable, nothing on a page can pass for markup or
leak a password.
"""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.web_pages.tree import parse_tree, write_tree
from terrella.rl.worlds.web.elements import FieldState
from terrella.rl.worlds.web.html_parser import parse_html
from terrella.rl.worlds.web.observe import LONGEST, accessibility_tree, simplified_html
from terrella.tests.rl.worlds.web.markup import BadMarkup, Markup, parse_markup, write_markup

PAGE = """<!DOCTYPE html><html><head><title>A &amp; B</title><style>p{color:red}</style><script>document.write("<p>no</p>")</script></head>
<body><!-- hidden --><nav><a href="/">Home</a> <a href="/x"><b>Cart</b> (2)</a></nav><main><h1>Hi "you" <i>x</i> tail</h1>
<form action="/s"><label for="q">Query</label><input id="q" name="q" placeholder="Search" title="Search">
<select name="z"><option value="1">One<option value="2" selected>Two</select><label><input type="checkbox" checked> Tick</label>
<textarea name="t">
abc</textarea><input type="hidden" name="h" value="1"><input type="password" value="hunter22"><button>Go</button></form>
<div style="display: none"><a href="/secret">Secret</a></div><p aria-hidden="true">ghost</p>
<table><tr><td>1<td>2</tr><tr><td>3<td>4</table></main></body></html>"""  # noqa: E501
EXPECTED = (
    '<html> <body> <nav> <a id="0" data-text="Home"> Home </a> <a data-text="(2)"> <b id="1" '
    'data-text="Cart"> Cart </b> </a> '
    '</nav> <main> <h1 data-text="Hi &quot;you&quot;,tail"> Hi &quot;you&quot; <i data-text="x"> x </i> '
    "</h1> <form> <label "
    'id="2" data-text="Query"> Query </label> <input id="3" title="Search"> </input> <select id="4" data-value="2" '
    'data-text="Two"> <option value="1" data-text="One"> One </option> <option value="2" data-text="Two" '
    'data-status="selected"> '
    'Two </option> </select> <label data-text="Tick"> <input id="5" type="checkbox" data-status="checked"> '
    "</input> </label> "
    '<textarea id="6" data-value="abc"> </textarea> <input id="7" type="password" data-value="********"> '
    '</input> <button id="8" '
    'data-text="Go"> Go </button> </form> <tbody> <tr> <td data-text="1"> 1 </td> <td data-text="2"> 2 </td> '
    "</tr> <tr> <td "
    'data-text="3"> 3 </td> <td data-text="4"> 4 </td> </tr> </tbody> </main> </body> </html>'
)


def observe(text: str) -> str:
    parsed = parse_html(text)
    return simplified_html(parsed.page("http://a.test/", dict(parsed.start)), boxes=False)


def test_a_page_as_simplified_html() -> None:
    assert observe(PAGE) == EXPECTED and observe(PAGE) == EXPECTED
    assert write_markup(parse_markup(EXPECTED)) == EXPECTED
    assert [m.id for m in parse_markup(EXPECTED).walk() if m.id is not None] == list(range(9))


def test_a_page_as_accessibility_tree() -> None:
    parsed = parse_html(PAGE)
    tree = accessibility_tree(parsed.page("", dict(parsed.start)))
    assert write_tree(parse_tree(tree)) == tree
    told = {(n.role, n.name) for n in parse_tree(tree)}
    assert {
        ("RootWebArea", "A & B"),
        ("link", "Cart (2)"),
        ("textbox", "Query"),
        ("combobox", "Two"),
        ("button", "Go"),
    } <= told
    assert "hunter22" not in tree and "Secret" not in tree and "ghost" not in tree


def test_the_five_stored_pages_read_back_byte_for_byte() -> None:
    folder = os.environ.get("TERRELLA_SHARED_DATA")
    if not folder:
        pytest.skip("TERRELLA_SHARED_DATA is not set: the stored pages are not shipped")
    pages = json.loads((Path(folder) / "webarena/webrl_mit_declared/htmls.json").read_text(encoding="utf-8"))[0]
    assert {name: len(text) for name, text in pages.items()} == {
        "cms": 10727,
        "map": 4129,
        "oss": 6129,
        "reddit": 2490,
        "gitlab": 16177,
    }
    for text in pages.values():
        assert write_markup(parse_markup(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "text", "<a>", "<a> </b>", "<a> </a> <b> </b>", "<a></a>", "<a>  </a>", '<a b="1> </a>', "<a> <b> </a> </b>"],
)
def test_what_is_no_simplified_page_is_refused(text: str) -> None:
    with pytest.raises(BadMarkup):
        parse_markup(text)


@given(st.lists(st.text(alphabet=st.sampled_from("ab <>\"'&=/\n;é"), max_size=30), max_size=6))
@settings(max_examples=150, deadline=None)
def test_no_text_of_a_page_can_pass_for_markup(texts: list[str]) -> None:
    from html import escape

    body = "".join(
        f'<p title="{escape(t)}">{escape(t)}</p><a href="/x">{escape(t)}</a><input value="{escape(t)}">' for t in texts
    )
    text = observe(f"<body>{body}</body>")
    page = parse_markup(text)
    assert write_markup(page) == text and {m.tag for m in page.walk()} <= {"html", "body", "p", "a", "input"}


@given(st.text(alphabet=st.sampled_from("<>/abp \"'=!-"), max_size=120))
@settings(max_examples=200, deadline=None)
def test_broken_html_still_gives_a_page_that_reads_back(text: str) -> None:
    seen = observe(text)
    assert write_markup(parse_markup(seen)) == seen


def test_long_texts_are_cut_and_fields_show_what_they_hold() -> None:
    text = observe(f"<body><p>{'word ' * 400}</p></body>")
    paragraph = next(m for m in parse_markup(text).walk() if m.tag == "p")
    assert len(dict(paragraph.attributes)["data-text"]) <= LONGEST
    parsed = parse_html('<input name="a" value="old">')
    (index,) = parsed.start
    page = parsed.page("", {index: FieldState("new")})
    assert simplified_html(page, boxes=False).count('value="old" data-value="new"') == 1


@pytest.mark.parametrize(("role", "wanted"), [("none presentation", "none"), (" ", "StaticText"), ("3d row", "row")])
def test_a_tree_is_read_back_whatever_the_roles_of_a_page(role: str, wanted: str) -> None:
    page = parse_html(f'<body><div role="{role}" aria-label="x">Hi</div></body>').page("", {})
    assert parse_tree(accessibility_tree(page))[1].role == wanted


def test_markup_of_our_own_reads_back() -> None:
    page = Markup("html", (), [Markup("p", (("title", "a & b"),), ["x y"]), Markup("a", (("id", "4"),))])
    assert parse_markup(write_markup(page)) == page


def test_a_page_of_five_megabytes_and_one_without_closing_quotes_end_in_time() -> None:
    big = "<body>" + '<p class="x">some text <a href="/a">link</a></p>' * 100_000
    assert len(big) > 4_500_000
    began = time.monotonic()
    parsed = parse_html(big, deadline_s=0.3)
    cut = time.monotonic() - began
    began = time.monotonic()
    whole = parse_html(big, deadline_s=600.0)
    assert parsed.truncated and not whole.truncated and cut < time.monotonic() - began
    bad = '<a href="' * 3000
    began = time.process_time()
    parse_html(bad, deadline_s=1.0)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "text",
    [
        "<table>" * 8500,
        "<div><p>" * 7500,
        "<a href=x>" * 6000,
        "<template>" * 6000 + "</b>" * 6000,
        '<a "' * 15000,
        "<!" * 30000,
        "<li><ul>" * 7500 + "</li>" * 7500,
    ],
    ids=["tables", "blocks", "links", "templates", "quotes", "declarations", "lists"],
)
def test_sixty_kilobytes_of_anything_are_parsed_in_time(text: str) -> None:
    begun = time.process_time()
    parsed = parse_html(text, deadline_s=5.0)
    assert time.process_time() - begun < 5.0
    depth = max(sum(1 for _ in element.ancestors()) for element in list(parsed.root.walk())[-50:])
    assert depth <= 520
