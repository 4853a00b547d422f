"""The page model as a browser: forms, links, history, tabs, cookies, and what it refuses."""

import pytest

from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web.actions import WebAction
from terrella.rl.worlds.web.backend import ActionFailed, Limits, Start
from terrella.rl.worlds.web.dom import DomBackend
from terrella.rl.worlds.web.elements import Element
from terrella.rl.worlds.web.http import Request, Response
from terrella.rl.worlds.web.locators import NoLocator, evaluate_locator, select

FORM = """<form action="/echo" method="{method}"><input name="a" value="1"><input name="b" maxlength="3">
<label for="c">Tick</label><input type="checkbox" id="c" name="c">
<input type="radio" name="r" value="x" checked><input type="radio" name="r" value="y">
<select name="s"><option value="1">One</option><option value="2">Two</option></select><textarea name="t">line</textarea>
<input name="off" value="no" disabled><input type="hidden" name="h" value="~*">
<button name="go" value="first">First</button><button name="go" value="second">Second</button><input type="reset" value="Reset"></form>
<a href="/next?x=1#part">Next</a> <a href="/next" target="_blank">Tab</a> 
<a href="http://evil.test/">Out</a> <a href="/loop">Loop</a> <a href="mailto:x">Mail</a>"""  # noqa: E501


class Server:
    def __init__(self) -> None:
        self.seen: list[Request] = []

    def fetch(self, request: Request) -> Response:
        self.seen.append(request)
        if request.path == "/form":
            return Response(FORM.format(method=request.query.get("method", "get")), cookies={"seen": "yes"})
        if request.path == "/loop":
            return Response(status=302, location="/loop")
        if request.path == "/out":
            return Response(status=302, location="http://evil.test/")
        return Response(
            f"<title>t</title><p>{request.method} {request.path} {sorted((request.form or request.query).items())}</p>"
        )


@pytest.fixture
def site() -> tuple[Server, DomBackend]:
    server = Server()
    backend = DomBackend(server.fetch, Limits(hosts=frozenset({"a.test"})))
    backend.begin(Start(("http://a.test/form",)))
    return server, backend


def find(backend: DomBackend, **told: str) -> Element:
    for element in backend.look().labels.values():
        if all(
            (element.text if k == "text" else element.tag if k == "tag" else element.attributes.get(k)) == v
            for k, v in told.items()
        ):
            return element
    raise AssertionError(told)


def test_a_form_sends_what_a_browser_would(site) -> None:
    server, backend = site
    backend.open("http://a.test/form?method=post")
    backend.act(WebAction("type", 0, "abcdef"), find(backend, name="b"))
    backend.act(WebAction("click", 0), find(backend, tag="label"))
    backend.act(WebAction("click", 0), find(backend, name="r", value="y"))
    backend.act(WebAction("select", 0, "two"), find(backend, name="s"))
    backend.act(WebAction("type", 0, "p\nq"), find(backend, tag="textarea"))
    backend.act(WebAction("click", 0), find(backend, text="Second"))
    sent = server.seen[-1]
    assert sent.method == "POST" and sent.cookies == {"seen": "yes"}
    assert sent.form == {"a": "1", "b": "abc", "c": "on", "r": "y", "s": "2", "t": "p\r\nq", "h": "~*", "go": "second"}


def test_enter_submits_with_the_first_button_and_get_forms_make_an_address(site) -> None:
    _, backend = site
    backend.act(WebAction("search", 0, "x y"), find(backend, name="b"))
    assert backend.url == "http://a.test/echo?a=1&b=x+y&r=x&s=1&t=line&h=%7E*&go=first"
    backend.act(WebAction("back"), None)
    assert backend.url == "http://a.test/form" and 'data-value="x y"' not in backend.html()
    backend.act(WebAction("type", 0, "zz"), find(backend, name="b"))
    backend.act(WebAction("click", 0), find(backend, value="Reset"))
    assert backend.locate("document.querySelector('[name=\"b\"]').value") == ""
    backend.act(WebAction("type", 0, "more"), find(backend, tag="textarea"))
    backend.act(WebAction("press", text="Enter"), None)
    assert backend.url.endswith("/form") and backend.locate("document.querySelector('textarea').value") == "more\n"


def test_history_and_tabs(site) -> None:
    _, backend = site
    with pytest.raises(ActionFailed, match="no page to go back"):
        backend.act(WebAction("back"), None)
    backend.act(WebAction("click", 0), find(backend, text="Next"))
    assert backend.url == "http://a.test/next?x=1#part"
    backend.act(WebAction("back"), None)
    backend.act(WebAction("forward"), None)
    assert backend.url == "http://a.test/next?x=1#part"
    backend.act(WebAction("back"), None)
    backend.act(WebAction("click", 0), find(backend, text="Tab"))
    assert len(backend.tabs) == 2 and backend.front == 1 and backend.url == "http://a.test/next"
    backend.act(WebAction("switch_tab", text="0"), None)
    assert backend.url == "http://a.test/form"
    backend.act(WebAction("close_tab"), None)
    for action in (WebAction("close_tab"), WebAction("switch_tab", text="4")):
        with pytest.raises(ActionFailed):
            backend.act(action, None)
    backend.act(WebAction("new_tab"), None)
    assert backend.url == "about:blank"
    backend.act(WebAction("goto", text="http://a.test/form"), None)


def test_what_is_refused(site) -> None:
    server, backend = site
    count = len(server.seen)
    for text in ("Out", "Loop", "Mail"):
        with pytest.raises(ActionFailed):
            backend.act(WebAction("click", 0), find(backend, text=text))
    for url in (
        "http://evil.test/",
        "file:///etc/passwd",
        "http://a.test@evil.test/",
        "javascript:alert(1)",
        "http://u:p@a.test/",
    ):
        with pytest.raises(ActionFailed, match="allowed hosts"):
            backend.act(WebAction("goto", text=url), None)
    with pytest.raises(ActionFailed, match="takes no text"):
        backend.act(WebAction("type", 0, "x"), find(backend, text="Next"))
    with pytest.raises(ActionFailed, match="drop-down"):
        backend.act(WebAction("select", 0, "x"), find(backend, name="b"))
    with pytest.raises(ActionFailed, match="disabled"):
        backend.act(WebAction("type", 0, "x"), find(backend, name="off"))
    with pytest.raises(ActionFailed):
        backend.open("http://a.test/out")
    assert all(r.host == "a.test" for r in server.seen[count:])
    with pytest.raises(WorldFault):
        backend.begin(Start(("http://evil.test/",)))


def test_the_request_filter_of_a_browser_matches_what_may_not_be_opened() -> None:
    limits = Limits(hosts=frozenset({"a.test", "b.test:8080"}), files="/pages")
    allowed = ["http://a.test/", "https://a.test/x", "http://b.test:8080/", "file:///pages/x.html", "about:blank"]
    refused = [
        "http://evil.test/",
        "http://a.test.evil.test/",
        "http://b.test:80/",
        "file:///etc/passwd",
        "ftp://a.test/",
        "file:///pagesx/y",
    ]
    for url in allowed:
        assert limits.allows(url) and not limits.pattern().match(url)
    for url in refused:
        assert not limits.allows(url) and limits.pattern().match(url), url


def test_locators_and_selectors(site) -> None:
    _, backend = site
    backend.act(WebAction("select", 0, "two"), find(backend, name="s"))
    cases = {
        "document.querySelector('[name=\"a\"').value": "1",  # the public task files leave the bracket open
        "document.querySelector('form').getAttribute('method')": "get",
        "document.querySelector('#c').checked.toString()": "false",
        "document.querySelector('select').selectedIndex": "1",
        "document.querySelector('select').value": "2",
        "document.querySelectorAll('a')[1].outerText": "Tab",
        "document.querySelectorAll('form > button').length": "2",
        "document.querySelector('form').querySelector('button').outerText": "First",
        "document.querySelector('form').lastElementChild.value": "Reset",
        "document.querySelector('.none').outerText": None,
        "document.querySelectorAll('a')[9].outerText": None,
    }
    for expression, wanted in cases.items():
        assert backend.locate(expression) == wanted, expression
    for script in (
        "alert(1)",
        "document.body.innerHTML = 'x'",
        "[...document.querySelectorAll('a')].map(e => e.href)",
        "document.querySelector('a')",
    ):
        with pytest.raises(NoLocator):
            evaluate_locator(backend.look(), script)
    root = backend.look().root
    assert [e.attributes["value"] for e in select(root, 'input[type="radio"], input[type^="res"]')] == [
        "x",
        "y",
        "Reset",
    ]
    assert len(select(root, "body form option:nth-child(2)")) == 1
