"""Web worlds in real Chromium: parity with the page model, MiniWoB++, deadlines, the limits on where a page may go,
pictures.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import random
import shutil
import threading
import time

import pytest

from terrella.rl.web_pages.record import tree_of
from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web.actions import WebAction
from terrella.rl.worlds.web.backend import ActionFailed, Limits, Start
from terrella.rl.worlds.web.observe import accessibility_nodes, simplified_html
from terrella.rl.worlds.web.world import WebWorld
from terrella.tests.rl.worlds.web.markup import parse_markup, write_markup
from terrella.tests.sampling import few

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0  # of a busy machine, where the deadline is not what a test is about


def missing(reason: str) -> None:
    if "chromium" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and TERRELLA_REQUIRE names chromium")
    pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def browser() -> None:
    if shutil.which("chromium") is None:
        missing("chromium is not installed (make system-deps)")
    if importlib.util.find_spec("playwright") is None:
        missing("the Python package playwright is not installed")


@pytest.fixture
def chromium():
    from terrella.rl.worlds.web.chromium import ChromiumBackend

    opened = []

    def open_(limits: Limits, **settings):
        opened.append(ChromiumBackend(limits, **settings))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def open_world():
    """Worlds that end with the test, also a failed one: a browser left open would keep the next test from starting
    its own.
    """
    opened = []

    def open_(**settings) -> WebWorld:
        opened.append(WebWorld(backend="chromium", **{"deadline_s": PATIENCE_S, **settings}))
        return opened[-1]

    yield open_
    for world in opened:
        world.close()


TALL = (1280, 4000)  # everything is in the viewport, as the page model has none


@pytest.mark.parametrize("templates", [12, pytest.param(51, marks=pytest.mark.full)])
def test_the_page_model_is_held_to_chromium_on_the_local_sites(open_world, templates: int) -> None:
    """Same ids, tags, text and score for the same script. Left out: boxes and the viewport (with its scrolling)."""
    real = open_world(split="all", boxes=False, viewport=TALL)
    model = WebWorld(backend="dom", split="all", boxes=False)
    first_seeds = {task.task.template_id: seed for seed, task in reversed(list(enumerate(real.tasks)))}
    assert len(first_seeds) == 51
    for seed in few(list(first_seeds.values()), templates):
        task = real.tasks[seed]
        assert real.reset(seed) == model.reset(seed)
        while not model.done:
            action = model.demonstrate()
            ours, theirs = model.step(action), real.step(action)
            assert real.html == model.html, (task.task.intent, action)
            assert ours == theirs and real.error == model.error, (task.task.intent, action)
        assert real.score == model.score == 1.0 and real.backend.url == model.backend.url


def test_odd_actions_have_the_same_effect_in_both(open_world) -> None:
    real = open_world(split="all", boxes=False, viewport=TALL, sites=("map", "shopping"))
    model = WebWorld(backend="dom", split="all", boxes=False, sites=("map", "shopping"))
    seed = next(s for s, t in enumerate(real.tasks) if t.task.template_id == 601)
    assert real.reset(seed) == model.reset(seed)
    actions = """do(action="Search", argument="hotel", element="4")
go_backward()
go_forward()
go_backward()
do(action="Go Backward")
do(action="Type", argument="x", element="0")
do(action="Click", element="99")
do(action="Type", argument="a\\nb", element="4")
do(action="Press Enter")
do(action="Switch Tab", argument="1")
do(action="Switch Tab", argument="7")
do(action="Hover", element="1")
do(action="Click", element="4")
do(action="Select Dropdown Option", argument="1", element="4")
nonsense
exit()"""
    for action in actions.splitlines():
        ours, theirs = model.step(action), real.step(action)
        assert real.html == model.html and ours.info == theirs.info and real.backend.url == model.backend.url, action


def test_history_of_tabs_is_the_same_in_both(open_world) -> None:
    worlds = [open_world(sites=("map",)), WebWorld(backend="dom", sites=("map",))]
    for world in worlds:
        world.reset(0)
    backends = [world.backend for world in worlds]
    for backend in backends:
        backend.begin(Start(("http://map.test/",)))
    # the blank page under a start is none of its history
    steps = ["back", "goto http://map.test/saved", "back", "forward", "forward"]
    # that of a new tab is
    steps += ["new_tab", "back", "goto http://map.test/", "back", "forward", "close_tab", "back"]
    for step in steps:
        kind, _, text = step.partition(" ")
        refused = []
        for backend in backends:
            try:
                backend.act(WebAction(kind, text=text), None)
            except ActionFailed as error:
                refused.append(str(error))
        assert len(refused) in (0, 2) and len(set(refused)) < 2, (step, refused)
        assert backends[0].url == backends[1].url, step
    assert backends[0].url == "http://map.test/"


def test_names_and_roles_agree_with_the_browsers_own_accessibility_tree(open_world) -> None:
    world = open_world(split="all", viewport=TALL)
    roles = {"link", "button", "heading", "combobox", "checkbox", "searchbox", "textbox"}
    for number in (203, 302, 104, 403):
        world.reset(next(s for s, t in enumerate(world.tasks) if t.task.template_id == number))
        for _ in range(3):
            world.step(world.demonstrate())
        page = world.backend.page
        wire = page.context.new_cdp_session(page)
        theirs, _ = tree_of(wire.send("Accessibility.getFullAXTree")["nodes"])
        ours, _ = accessibility_nodes(world.page)
        told = [[(n.role, n.name) for n in nodes if n.role in roles - {"combobox"}] for nodes in (ours, theirs)]
        assert told[0] == told[1] and len(told[0]) > 5


def test_boxes_and_scrolling_follow_the_viewport(open_world) -> None:
    world = open_world(split="all", viewport=(800, 200), sites=("reddit",))
    world.reset(0)
    assert "data-bbox" in world.html and write_markup(parse_markup(world.html)) == world.html
    before = world.html
    result = world.step('do(action="Scroll Down")')
    assert world.html != before and result.info["action_is_effective"]
    world.step('do(action="Scroll Up")')
    assert world.html == before


class Pages(http.server.BaseHTTPRequestHandler):
    """Pages that misbehave. Every name of the test resolves here, so a leak would be seen."""

    seen: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.headers['Host']}{self.path}")  # type: ignore[attr-defined]
        if self.path == "/forever":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body><a href='/x'>First part</a>")
            self.wfile.flush()
            time.sleep(300)
            return
        if self.path == "/silent":
            time.sleep(300)
            return
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.2:{self.server.server_port}/stolen")  # type: ignore[attr-defined]
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = {
            "/big": "<p>some text <a href='/a'>link</a></p>" * 135_000,
            "/busy": "<p>busy</p><script>while (true) {}</script>",
            "/lures": "<a href='http://127.0.0.2:{port}/stolen'>Out</a><img src='http://127.0.0.2:{port}/pixel'><a "
            "href='/away'>Away</a>"
            "<a href='/file'>File</a><a "
            "href='file:///etc/passwd'>Passwd</a><script>fetch('http://127.0.0.2:{port}/script')</script>",
            "/where": "<p id='at'>nowhere</p><script>navigator.geolocation.getCurrentPosition(p => "
            "{{ document.getElementById('at').textContent = p.coords.latitude + ' ' + p.coords.longitude }})</script>",
        }.get(self.path, f"<p>{self.path} {self.headers.get('Cookie', '')}</p>")
        blob = (body if self.path in ("/big", "/busy") else body.format(port=self.server.server_port)).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.path == "/file":
            self.send_header("Content-Disposition", "attachment; filename=x.bin")
        self.send_header("Content-Length", str(len(blob)))
        self.end_headers()
        self.wfile.write(blob)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages():
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Pages)
    server.daemon_threads = True
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def find(backend, text: str):
    return next(e for e in backend.look().labels.values() if e.text == text)


def test_endless_silent_and_busy_pages_end_within_the_deadline(pages, chromium) -> None:
    base, deadline = f"http://127.0.0.1:{pages.server_port}", 20.0
    backend = chromium(Limits(hosts=frozenset({f"127.0.0.1:{pages.server_port}"}), deadline_s=deadline))
    backend.begin(Start((f"{base}/x",)))
    began = time.monotonic()
    backend.open(f"{base}/forever")
    page = backend.look()
    assert page.truncated and "First part" in simplified_html(page) and time.monotonic() - began < 2 * deadline
    began = time.monotonic()
    with pytest.raises(ActionFailed):
        backend.open(f"{base}/silent")
    assert time.monotonic() - began < 2 * deadline
    began = time.monotonic()
    with pytest.raises((ActionFailed, WorldFault), match=r"deadline|did not open"):
        backend.open(f"{base}/busy")
        backend.look()
    assert time.monotonic() - began < 3 * deadline


def test_a_page_of_five_megabytes_is_read_within_the_deadline(pages, chromium) -> None:
    """Its 270,000 elements take seconds of layout, more on a busy machine; the default deadline would make it a
    fault there.
    """
    base, deadline = f"http://127.0.0.1:{pages.server_port}", 300.0
    backend = chromium(Limits(hosts=frozenset({f"127.0.0.1:{pages.server_port}"}), deadline_s=deadline))
    backend.begin(Start((f"{base}/x",)))
    began = time.monotonic()
    backend.open(f"{base}/big")
    text = simplified_html(backend.look())
    assert text.count("<a id=") >= 10 and len(text) < 100_000 and time.monotonic() - began < deadline


def test_a_page_cannot_lead_away_nor_leave_a_file(pages, chromium) -> None:
    base = f"http://127.0.0.1:{pages.server_port}"
    backend = chromium(Limits(hosts=frozenset({f"127.0.0.1:{pages.server_port}"}), deadline_s=PATIENCE_S))
    backend.begin(Start((f"{base}/lures",)))
    for text in ("Out", "Away", "Passwd", "File"):
        try:
            backend.act(WebAction("click", 0), find(backend, text))
        except ActionFailed:
            pass
        assert "root:" not in backend.html()
        backend.open(f"{base}/lures")
    with pytest.raises(ActionFailed, match="allowed hosts"):
        backend.act(WebAction("goto", text=f"http://127.0.0.2:{pages.server_port}/stolen"), None)
    assert not [s for s in pages.seen if s.startswith("127.0.0.2")]
    assert [s for s in pages.seen if s.endswith("/away")]


def test_cookies_tabs_and_the_place_of_a_start(pages, chromium) -> None:
    base = f"http://127.0.0.1:{pages.server_port}"
    backend = chromium(Limits(hosts=frozenset({f"127.0.0.1:{pages.server_port}"}), deadline_s=PATIENCE_S))
    cookie = {"name": "session", "value": "abc", "domain": "127.0.0.1", "path": "/"}
    backend.begin(Start((f"{base}/where", f"{base}/two"), (cookie,), (), (52.5, 13.25)))
    end = time.monotonic() + PATIENCE_S
    while (told := backend.locate("document.querySelector('#at').textContent")) == "nowhere" and time.monotonic() < end:
        time.sleep(0.05)
    assert told == "52.5 13.25"
    backend.act(WebAction("switch_tab", text="1"), None)
    assert "session=abc" in backend.html() and len(backend.pages) == 2
    assert backend.locate("document.querySelector('.none').outerText") is None
    assert backend.locate("[...document.querySelectorAll('p')].map(e => e.tagName).join(' ')") == "P"


def test_a_task_file_on_sites_elsewhere(pages, tmp_path, open_world) -> None:
    record = {
        "task_id": 4, "sites": ["reddit"], "intent": "Open two", "start_url": "__REDDIT__/one", "require_login": True,
        "storage_state": "./.auth/reddit_state.json",
        "eval": {"eval_types": ["url_match", "program_html"], "reference_url": "__REDDIT__/two", "reference_answers": None,  # noqa: E501
                 "program_html": [{"url": "last", "locator": "document.querySelector('p').outerText",
                                   "required_contents": {"must_include": ["k=v"]}}]},
    }  # fmt: skip
    (tmp_path / "tasks.json").write_text(json.dumps([record]))
    cookie = {"name": "k", "value": "v", "domain": "127.0.0.1", "path": "/"}
    (tmp_path / "reddit_state.json").write_text(json.dumps({"cookies": [cookie], "origins": []}))
    base = f"http://127.0.0.1:{pages.server_port}"
    world = open_world(
        source="file", observation="accessibility", tasks_file=str(tmp_path / "tasks.json"), auth_folder=str(tmp_path),
        addresses={"__REDDIT__": base},
    )  # fmt: skip
    world.reset(0)
    world.step(f"```goto [{base}/two]```")
    assert world.step("```stop []```").reward == 1.0


def test_pages_elsewhere_load_from_further_hosts_and_sites_are_reset_after_use(pages, tmp_path, open_world) -> None:
    judged = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "x"}}
    record = {"task_id": 4, "sites": ["map"], "intent": "Look", "start_url": "__MAP__/lures", "eval": judged}
    (tmp_path / "tasks.json").write_text(json.dumps([record]))
    world = open_world(
        source="file", tasks_file=str(tmp_path / "tasks.json"), addresses={"__MAP__": f"http://127.0.0.1:{pages.server_port}"},
        hosts=(f"127.0.0.2:{pages.server_port}",), at_once_per_site=1,
        reset_command=("sh", "-c", f'echo "$TERRELLA_SITES $TERRELLA_TASK" >> {tmp_path}/resets'),
    )  # fmt: skip
    world.reset(0)
    world.reset(0)  # nobody has acted
    assert f"127.0.0.2:{pages.server_port}/pixel" in pages.seen
    assert (tmp_path / "resets").read_text() == "map 4\n"
    assert world.step('exit(message="x")').reward == 1.0
    world.reset(0)
    assert (tmp_path / "resets").read_text() == "map 4\n" * 2


@pytest.fixture(scope="module")
def miniwob():
    if importlib.util.find_spec("miniwob") is None:
        missing("the Python package miniwob is not installed")
    from terrella.rl.worlds.web.miniwob import MiniWob

    pages = MiniWob(deadline_s=PATIENCE_S)
    yield pages
    pages.backend.close()


@pytest.mark.parametrize("pages", [30, pytest.param(130, marks=pytest.mark.full)])
def test_miniwob_pages_load_and_reset_by_seed(miniwob, pages: int) -> None:
    from terrella.rl.worlds.web.miniwob import page_names

    assert len(page_names()) == 130
    faults = []
    for name in few(page_names(), pages):
        first = miniwob.start(name, 7)
        seen = simplified_html(miniwob.backend.look())
        other = miniwob.start(name, 8)
        again = miniwob.start(name, 7)
        text = simplified_html(miniwob.backend.look())
        if (
            not first
            or first != again
            or write_markup(parse_markup(seen)) != seen
            or (first == other and seen == text and not seen)
        ):
            faults.append(name)
    assert faults == []


def test_scripted_oracles_solve_miniwob_pages(open_world) -> None:
    from terrella.rl.worlds.web.miniwob_oracles import ORACLES

    names, failed = tuple(ORACLES), []
    world = open_world(source="miniwob", pages=names, max_steps=15)
    for number, name in enumerate(names):
        for seed in (number, number + len(names)):  # the page of a seed is seed modulo the number of pages
            world.reset(seed)
            while not world.done:
                world.step(world.demonstrate())
            if not world.score:
                failed.append((name, seed, world.task.intent))
    assert len(names) >= 25 and failed == []


def test_miniwob_tasks_are_played_from_several_threads(miniwob) -> None:
    from terrella.data.tokenizers import ByteTokenizer
    from terrella.rl.rollout.concurrent import run_all
    from terrella.rl.webrl.episode import WebEpisode, demonstrate
    from terrella.rl.webrl.prompts import Prompter
    from terrella.rl.worlds.web.hosted import HostedWorld
    from terrella.rl.worlds.web.tasks import parse_task

    told = {
        "source": "miniwob",
        "backend": "chromium",
        "pages": ("click-button", "enter-text"),
        "instances": 2,
        "split": "test",
    }
    worlds = [HostedWorld(**told, deadline_s=PATIENCE_S) for _ in range(2)]
    known = worlds[0].tasks
    assert len(known) == 4 and parse_task(dict(known[0].task.raw)) == known[0].task

    def player(number: int):
        def play():
            found = []
            for place in (number, number + 2):
                episode = WebEpisode(worlds[number], known[place], place, 0, Prompter(ByteTokenizer(), 20000))
                demonstrate(episode, 0.0, random.Random(0))
                found.append(episode.trajectory(str(place)))
            return found

        return play

    try:
        for _ in range(2):  # other threads than before
            parts = run_all([player(0), player(1)], workers=2, deadline_s=900, what="episode")
            trajectories = [t for part in parts for t in part]
            assert all(t.success and t.intent and t.intent != t.task_id for t in trajectories)
        held = worlds[0].snapshot()
        worlds[1].restore(held)
        assert worlds[1].task.intent == worlds[0].task.intent and worlds[1].html == worlds[0].html
    finally:
        for world in worlds:
            world.close()
