"""The local sites and their tasks: the oracle solves all of them, doing nothing solves none, and nothing depends on
order or process.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web import reset
from terrella.rl.worlds.web.generate import make_site_tasks
from terrella.rl.worlds.web.http import make_request
from terrella.rl.worlds.web.sites import SITES, SiteSet
from terrella.rl.worlds.web.tasks import Evaluation, WebTask, parse_task
from terrella.rl.worlds.web.world import WebWorld
from terrella.tests.rl.worlds.web.markup import parse_markup, write_markup


def solve(world: WebWorld, seed: int) -> float:
    world.reset(seed)
    while not world.done:
        result = world.step(world.demonstrate())
        assert write_markup(parse_markup(world.html)) == world.html
        assert result.info["action_is_valid"] and not world.error
    return result.reward


def test_the_oracle_solves_every_task() -> None:
    world = WebWorld(split="all")
    assert len(world.tasks) == 996
    assert [s for s in range(len(world.tasks)) if solve(world, s) != 1.0] == []


def test_doing_nothing_solves_no_task() -> None:
    world = WebWorld(split="all")
    for seed in range(0, len(world.tasks), 3):
        world.reset(seed)
        assert world.step('exit(message="")').reward == 0.0, world.task


def test_tasks_of_other_content_and_one_site_are_solved_too() -> None:
    for settings in ({"content": 5, "instances": 2}, {"sites": ("gitlab",), "instances": 3, "split": "test"}):
        world = WebWorld(**{"split": "all", **settings})
        assert len(world.tasks) > 5 and all(solve(world, s) == 1.0 for s in range(len(world.tasks)))


def test_one_world_holds_tasks_on_several_contents() -> None:
    world = WebWorld(split="all", sites=("shopping",), contents=3, instances=400)
    contents = {t.task.raw.get("content", 0) for t in world.tasks}
    intents, ids = {t.task.intent for t in world.tasks}, {t.task.task_id for t in world.tasks}
    assert contents == {0, 1, 2} and len(intents) == len(ids) == len(world.tasks) > 2 * len(
        make_site_tasks(0, ("shopping",), 400)
    )
    assert all(solve(world, s) == 1.0 for s in range(0, len(world.tasks), 9))
    kept = next(t for t in world.tasks if t.task.raw.get("content") == 2)
    record = json.loads(json.dumps(dict(kept.task.raw)))  # as a stage keeps it
    world.open_task(record, kept.steps)
    while not world.done:
        result = world.step(world.demonstrate())
    assert result.reward == 1.0
    again = WebWorld(sites=("shopping",))
    again.restore(world.snapshot())
    assert again.score == 1.0 and again.html == world.html


def test_training_tasks_fall_into_validation_and_the_rest() -> None:
    parts = {
        split: {t.task.intent for t in WebWorld(split=split, sites=("shopping", "map"), contents=3).tasks}
        for split in ("train", "fit", "validation", "test", "all")
    }
    assert parts["fit"] | parts["validation"] == parts["train"] and not parts["fit"] & parts["validation"]
    assert not parts["train"] & parts["test"] and parts["train"] | parts["test"] == parts["all"]
    assert 0.15 < len(parts["validation"]) / len(parts["train"]) < 0.25
    with pytest.raises(ValueError, match="split: validation is of the local sites; miniwob has train, test, all"):
        WebWorld(source="miniwob", backend="chromium", split="validation")


def test_tasks_are_in_the_public_format_and_split_by_instance() -> None:
    tasks = make_site_tasks(0)
    assert {k for t in tasks for k in t.task.evaluation.types} == {"string_match", "url_match", "program_html"}
    assert {s for t in tasks for s in t.task.sites} == set(SITES)
    assert len({t.task.task_id for t in tasks}) == len({t.task.intent for t in tasks}) == len(tasks)
    train, test = ({t.task.intent for t in tasks if t.split == s} for s in ("train", "test"))
    assert not train & test and 0.15 < len(test) / len(tasks) < 0.25
    assert len({t.task.template_id for t in tasks if t.split == "test"}) > 45
    for record in json.loads(json.dumps([dict(t.task.raw) for t in tasks])):
        parse_task(record)
        assert "{{" not in record["intent"]
        assert set(record) >= {
            "sites",
            "task_id",
            "require_login",
            "storage_state",
            "start_url",
            "intent_template",
            "instantiation_dict",
            "eval",
        }
    make_site_tasks.cache_clear()
    assert make_site_tasks(0) == tasks


def test_reset_brings_the_content_back_and_worlds_do_not_share_it() -> None:
    one, two = SiteSet(0), SiteSet(0)
    cookie = {"session": one.sites["shopping"].session["value"]}

    def cart(sites: SiteSet) -> str:
        return sites.fetch(make_request("GET", "http://shopping.test/cart", "", cookie)).body

    empty = cart(one)
    one.fetch(make_request("POST", "http://shopping.test/product/3/cart", "quantity=2", cookie))
    assert cart(one) != empty and cart(two) == empty
    one.reset(0)
    assert cart(one) == empty


def test_pages_hold_no_script_and_need_a_login() -> None:
    sites = SiteSet(0)
    for site in sites.sites.values():
        page = sites.fetch(make_request("GET", f"{site.base}/", "", {"session": site.session["value"]}))
        assert page.status == 200 and not re.search(r"<script|onclick|javascript:", page.body)
        closed = sites.fetch(make_request("GET", f"{site.base}/", "", {}))
        assert closed.location == ("/login" if site.needs_login else "")
    wrong = sites.fetch(make_request("POST", "http://reddit.test/login", "username=sam&password=x"))
    assert wrong.status == 401 and not wrong.cookies
    assert sites.fetch(make_request("GET", "http://else.test/")).status == 404


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("http://shopping-admin.test/products/1", "name=x&price=1e999&stock=1"),
        ("http://shopping-admin.test/products/1", "name=x&price=nan&stock=1"),
        ("http://gitlab.test/new", "name=%E6%95%B0&visibility=public"),  # no header can lead to its page
    ],
)
def test_what_a_site_cannot_keep_is_a_page_that_says_so(url: str, form: str) -> None:
    sites = SiteSet(0)
    cookies = {"session": sites.by_host[url.split("/")[2]].session["value"]}
    assert sites.fetch(make_request("POST", url, form, cookies)).status == 400


@pytest.mark.parametrize(
    "text",
    ["'; DROP TABLE posts; --", "<script>alert(1)</script>", '"><img src=x>', "a" * 5000, "%00\r\nSet-Cookie: x=1"],
)
def test_hostile_input_stays_text(text: str) -> None:
    world = WebWorld(split="all", sites=("reddit",))
    seed = next(s for s, t in enumerate(world.tasks) if t.task.template_id == 205)
    world.reset(seed)
    for _ in range(3):
        world.step(world.demonstrate())
    field = next(n for n, e in world.page.labels.items() if e.attributes.get("placeholder") == "Your comment")
    world.step(f'do(action="Type", argument={text!r}, element="{field}")')
    send = next(n for n, e in world.page.labels.items() if e.text == "Send comment")
    result = world.step(f'do(action="Click", element="{send}")')
    assert result.info["action_is_valid"]
    assert not any(m.tag in ("script", "img") for m in parse_markup(world.html).walk())
    assert world.own_sites and world.own_sites.sites["reddit"].one("SELECT COUNT(*) FROM posts")[0] == 24


def test_sites_elsewhere_are_reset_and_shared_by_few(tmp_path: Path) -> None:
    log = tmp_path / "log"
    note = ("sh", "-c", f'echo "$TERRELLA_SITES $TERRELLA_TASK" >> {log}')
    for task in ("1", "2"):
        reset.reset_episode(note, ("map", "reddit"), task, 60.0)  # nobody acted after the first
    reset.acted_on(note, ("reddit",))
    reset.reset_episode(note, ("map",), "3", 60.0)
    reset.reset_episode(note, ("reddit",), "4", 60.0)
    assert log.read_text().splitlines() == ["map,reddit 1", "reddit 4"]
    with pytest.raises(WorldFault, match=r"ended with 3: broken \(reset_command\)"):
        reset.reset_episode(
            (sys.executable, "-c", "import sys; print('broken', file=sys.stderr); sys.exit(3)"), ("map",), "1", 60.0
        )
    with pytest.raises(WorldFault, match="reset_deadline_s"):
        reset.run_reset((sys.executable, "-c", "import time; time.sleep(60)"), (), "", 0.2)

    def task(number: int, sites: tuple[str, ...], state: str = "") -> WebTask:
        return WebTask(str(number), sites, "", (), Evaluation(()), require_login=bool(state), storage_state=state)

    tasks = [
        task(0, ("map",)),
        task(1, ("map", "reddit")),
        task(2, ("reddit",)),
        task(3, ("shop",), "a"),
        task(4, ("gitlab",), "a"),
    ]

    def made(*limits: int) -> list[list[str]]:
        return [[t.task_id for t in part] for part in reset.parts(tasks, lambda t: t, reset.Shares(*limits))]

    assert made(3, 0, 0) == [["0", "1", "2"], ["3", "4"]]
    assert made(9, 1, 0) == [["0", "2", "3", "4"], ["1"]]
    assert made(9, 1, 1) == [["0", "2", "3"], ["1", "4"]] and made(2, 1, 0) == [["0", "2"], ["1", "3"], ["4"]]
    with pytest.raises(ValueError, match="at_once_per_site: must be 1"):
        WebWorld(source="file", backend="chromium", tasks_file="x", reset_command=("true",))
    with pytest.raises(ValueError, match="hosts: 'http://tiles'"):
        WebWorld(source="file", backend="chromium", tasks_file="x", hosts=("http://tiles",))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="tasks_file"):
        WebWorld(source="file", backend="chromium")
    with pytest.raises(ValueError, match="backend: dom"):
        WebWorld(source="miniwob")
    with pytest.raises(ValueError, match="none of"):
        WebWorld(sites=("wikipedia",))
    with pytest.raises(ValueError, match="limits at least 1"):
        WebWorld(instances=0)
    world = WebWorld()
    world.reset(0)
    world.steps = []
    with pytest.raises(WorldFault, match="no script"):
        world.demonstrate()
