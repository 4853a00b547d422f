"""Web pages as a model imagines them beside the true ones: what changes is applied, drift is reported, a snapshot keeps
both.
"""

import json
import os
import random
import shutil

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.exchange.imagined import ComparedWorld
from terrella.rl.exchange.named_worlds import NamedWorld, Play, find_world
from terrella.rl.rewards.web_page import NOTHING
from terrella.rl.web_pages.changes import page_changes
from terrella.rl.web_pages.data import load_transitions
from terrella.rl.web_pages.prompt import PageTransition
from terrella.rl.web_pages.tree import parse_tree, write_tree
from terrella.rl.web_pages.world import ImaginedPage, page_after
from terrella.rl.worlds.base import Snapshot, StepResult, World, WorldFault

STEPS = 14  # of a recorded episode


class RecordedPage(World):
    """A recorded episode as the true world: it can only be walked as it was."""

    name = "recorded-page"

    def __init__(self, episode: list[PageTransition]) -> None:
        self.episode, self.at = episode, 0

    def reset(self, seed: int, sample: int = 0) -> str:
        self.at = 0
        return self.render()

    def step(self, action: int | str) -> StepResult:
        assert action == self.episode[self.at].action
        self.at += 1
        return StepResult(self.render(), 0.0, False, {})

    def render(self, mode: str = "text") -> str:
        return self.episode[self.at - 1].next_observation if self.at else self.episode[0].observation

    def snapshot(self) -> Snapshot:
        return {"at": self.at}

    def restore(self, snapshot: Snapshot) -> None:
        self.at = snapshot["at"]


def imagined(episode: list[PageTransition], predict) -> Play:
    true = RecordedPage(episode)
    return Play(
        NamedWorld("imagined", lambda: ComparedWorld(ImaginedPage(true, episode[0].url, predict), true), "", 50)
    )


def test_true_changes_stay_exact_and_copies_drift() -> None:
    steps = load_transitions()
    drifted = 0
    for start in range(0, 6 * STEPS, STEPS):  # one episode of each page
        episode = steps[start : start + STEPS]
        at = iter(episode)

        def right(step: PageTransition, at=at) -> str:
            return page_changes(step.observation, next(at).next_observation).write()

        play, copying = imagined(episode, right), imagined(episode, lambda step: NOTHING)
        assert play.reset(0).text == copying.reset(0).text == episode[0].observation
        for number, step in enumerate(episode, 1):
            seen, copied = play.step(step.action), copying.step(step.action)
            assert seen.info["exact"] == seen.info["items_f1"] == 1.0 and seen.info["exact_steps"] == number
            assert copied.text == episode[0].observation
            assert (copied.info["items_f1"] == 1.0) == (copied.info["exact"] == 1.0)
        drifted += copying.last.info["exact_steps"] < STEPS
    assert drifted == 6


def test_a_snapshot_goes_back_and_a_broken_answer_changes_nothing() -> None:
    episode = load_transitions()[:STEPS]
    answers = {step.action: step.changes.write() for step in episode[:3]}
    play = imagined(episode, lambda step: answers[step.action])
    play.reset(0)
    play.step(episode[0].action)
    kept = json.loads(json.dumps(play.snapshot()))
    after = [play.step(step.action) for step in episode[1:3]]
    play.restore(kept)
    assert [play.step(step.action) for step in episode[1:3]] == after
    broken, failing = (
        imagined(episode, lambda step: "New items:\nno item"),
        imagined(episode, lambda _: Invalid("gone")),
    )
    start = broken.reset(0).text
    assert broken.step(episode[0].action).text == start and broken.last.info["readable"] == 0.0
    failing.reset(0)
    with pytest.raises(WorldFault, match="gone"):
        failing.step(episode[0].action)


def test_changes_make_a_page_that_can_be_read_again() -> None:
    page = parse_tree("[1] RootWebArea 'p'\n\t[2] list 'l'\n\t\t[3] button 'Go'\n\t\t[4] link 'x'")
    answer = (
        "New items:\n[9] StaticText 'new'\n[3] button 'taken'\n\nDeleted items:\n[2] list 'l'\n\n"
        "Updated items:\n[4] link 'y' focused: True"
    )
    made = page_after(page, answer)
    assert made is not None and parse_tree(write_tree(made)) == made
    shown = "[1] RootWebArea 'p'\n\t[3] button 'Go'\n\t[4] link 'y' focused: True\n\t[9] StaticText 'new'"
    assert write_tree(made) == shown
    everything = "\n".join(node.line for node in page)
    assert page_after(page, f"New items:\nNone\n\nDeleted items:\n{everything}\n\nUpdated items:\nNone") is None


@pytest.mark.integration
def test_the_true_page_is_the_recorded_one_and_goes_back() -> None:
    if shutil.which("chromium") is None and shutil.which("chromium-browser") is None:
        assert "chromium" not in os.environ.get("TERRELLA_REQUIRE", ""), "chromium is required and missing"
        pytest.skip("chromium is not installed; make system-deps")
    episode = load_transitions()[:STEPS]
    play = Play(find_world("web-page/todo"))
    try:
        assert play.reset(0).text == episode[0].observation
        for step in episode[:4]:
            assert play.step(step.action).text == step.next_observation
        kept = json.loads(json.dumps(play.snapshot()))
        unknown, after = play.step("click [1]"), play.step(episode[4].action)
        assert unknown.text == episode[3].next_observation and unknown.info["action_is_valid"] == 0.0
        play.restore(kept)
        assert play.step(episode[4].action).text == after.text
        assert play.step(play.random_action(random.Random(0))).info["action_is_valid"] == 1.0
    finally:
        play.world.close()
