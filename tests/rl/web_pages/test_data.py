"""Recorded transitions: what ships is whole, splits do not leak, the trivial answer's score is known, and a browser
still makes them.
"""

import os
import shutil
from collections import Counter

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.language import read_pair
from terrella.rl.language_tasks import Made
from terrella.rl.rewards.web_page import NOTHING, judge
from terrella.rl.web_pages.config import WebPageEnvironment
from terrella.rl.web_pages.data import load_transitions, page_pair, split_pages
from terrella.rl.web_pages.evaluate import gains, judge_pages, scores
from terrella.rl.web_pages.prompt import PageTransition, bare_page_prompt
from terrella.rl.web_pages.record import APPS, record, tree_of
from terrella.rl.web_pages.tasks import WebPageTasks
from terrella.rl.web_pages.tree import parse_tree, write_tree


def test_shipped_transitions() -> None:
    steps = load_transitions()
    assert len(steps) == 5040 and Counter(s.url for s in steps) == {f"pages/{app}": 840 for app in APPS}
    steps = steps[:1008]
    for step in steps[::10]:
        assert write_tree(parse_tree(step.observation)) == step.observation
        text = step.changes.write()
        assert judge(text, text, "strict").reward == judge(text, text, "faithful").reward == 1.0
    truths = [s.changes.write() for s in steps]
    assert sum(t != NOTHING for t in truths) == 851
    copied = {
        mode: scores(truths, judge_pages(truths, [NOTHING] * len(truths), mode)) for mode in ("faithful", "strict")
    }
    assert copied["faithful"][2].value == pytest.approx(0.425, abs=1e-3)  # paid for saying None on changed pages
    assert copied["strict"][2].value == pytest.approx(157 / 1008) and copied["strict"][3].value == 0.0


def test_gains_are_paired() -> None:
    truths = [s.changes.write() for s in load_transitions()[:40]]
    true, empty = judge_pages(truths, list(truths), "strict"), judge_pages(truths, [NOTHING] * 40, "strict")
    changed = sum(t != NOTHING for t in truths)
    found = gains(truths, true, empty)
    assert (
        [e.n for e in found] == [40, 40, 40, changed, 40] and found[3].value == 1.0 and found[2].value == changed / 40
    )
    assert [e.value for e in gains(truths, empty, true)] == [-e.value for e in found]


def test_split_does_not_leak() -> None:
    split = split_pages(load_transitions(), unseen=["pages/filter"])
    asked = {(s.observation, s.action) for s in split.test}
    assert not asked & {(s.observation, s.action) for s in split.train}
    assert {s.url for s in split.unseen_pages} == {"pages/filter"} and len(split.unseen_pages) == 840
    assert len(split.test) > 800 and {s.url for s in split.test} == {s.url for s in split.train} == {
        f"pages/{a}" for a in APPS
    } - {"pages/filter"}


def test_pairs_are_questions() -> None:
    step = next(s for s in load_transitions() if not s.changes.empty)
    question = read_pair(page_pair(step, bare_page_prompt, "train"))
    assert question.gold and question.answer == step.changes.write() and step.action in question.prompt


def test_a_bad_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_transitions(tmp_path / "none")
    (tmp_path / "bad.jsonl").write_text('{"url": 3}\n')
    with pytest.raises(ConfigError, match="line 1"):
        load_transitions(tmp_path / "bad.jsonl")
    for blob, problem in (
        (b"[1]\n", "line 1: a page transition is a JSON object"),
        (b'\n{"url": "\\ud800"}', "line 2: .*surrogates not allowed"),
        (b"\xff\n", "cannot be read as JSONL"),
        (b"\x1f\x8bxxxx", "cannot be read as JSONL"),
        (b"\n", "no page transitions"),
    ):
        (tmp_path / "bad.jsonl").write_bytes(blob)
        with pytest.raises(ConfigError, match=rf"bad.jsonl: .*{problem}"):
            load_transitions(tmp_path / "bad.jsonl")
    twice = PageTransition("pages/x", "explore", "", "[1] a 'b'\n[1] a 'b'", "click [1]", "[1] a 'b'")
    with pytest.raises(ConfigError, match=r"transitions: 'click \[1\]' on pages/x: .* id 1 appears twice"):
        page_pair(twice, bare_page_prompt, "train")


def test_an_unseen_page_that_is_not_there_is_refused(tmp_path) -> None:
    settings = WebPageEnvironment(kind="web-page", data="data", unseen_pages=["pages/filter", "pages/flter"])
    tasks = WebPageTasks(settings, Made("data", tmp_path, {}, finished=False), ByteTokenizer(), None)
    with pytest.raises(ConfigError, match=r"env.unseen_pages: no transition is of 'pages/flter'; there are pages/todo"):
        tasks.require_source()


def test_browser_trees_lose_what_says_nothing() -> None:
    raw = [
        {"nodeId": "1", "role": {"value": "RootWebArea"}, "name": {"value": "t"}, "childIds": ["2", "5"]},
        {"nodeId": "2", "parentId": "1", "role": {"value": "paragraph"}, "name": {"value": ""}, "childIds": ["3"]},
        {"nodeId": "3", "parentId": "2", "role": {"value": "button"}, "name": {"value": "Buy"}, "childIds": ["4"], "backendDOMNodeId": 9},  # noqa: E501
        {"nodeId": "4", "parentId": "3", "role": {"value": "StaticText"}, "name": {"value": "Buy"}},
        {"nodeId": "5", "parentId": "1", "role": {"value": "textbox"}, "name": {"value": "Name"}, "value": {"value": "Ann"},  # noqa: E501
         "properties": [{"name": "focused", "value": {"value": True}}, {"name": "required", "value": {"value": False}}]},  # noqa: E501
    ]  # fmt: skip
    nodes, inner = tree_of(raw)
    assert write_tree(nodes) == "[1] RootWebArea 't'\n\t[3] button 'Buy'\n\t[5] textbox 'Name Ann' focused: True"
    assert inner[3] == 9


@pytest.mark.integration
def test_recording_in_chromium_gives_what_ships() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        assert "chromium" not in os.environ.get("TERRELLA_REQUIRE", ""), "chromium is required and missing"
        pytest.skip("chromium is not installed; make system-deps")
    made = list(record(2, 3, browser=browser, timeout_s=300))
    shipped = load_transitions()
    assert made[:3] == shipped[:3] and made[3:] == shipped[14:17]
