"""MiniWoB++: the pages of the PyPI package `miniwob`, read from its files. Its own environment and Selenium are not
used.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from ..base import WorldFault
from .backend import ActionFailed, Limits, Start
from .chromium import ChromiumBackend

VIEWPORT = (500, 320)
_START = """async seed => {
  const until = async (test) => {
    for (let i = 0; i < 400 && !test(); i++) await new Promise(r => setTimeout(r, 10));
    return test();
  };
  const ready = () => typeof core !== 'undefined' && typeof genProblem !== 'undefined' && core.cover_div;
  if (!await until(ready)) return null;
  Math.seedrandom(seed); core.EPISODE_MAX_TIME = 1e7; core.startEpisodeReal();
  if (!await until(() => WOB_TASK_READY !== false)) return null;
  const goal = core.getUtterance();
  return typeof goal === 'string' ? goal : goal.utterance;
}"""
_STATUS = "typeof WOB_DONE_GLOBAL === 'undefined' ? null : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


@functools.cache
def page_folder() -> Path:
    """Where the package keeps its pages; it is found without importing it."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise WorldFault("web: the package miniwob is missing; install the extra `miniwob`")
    return Path(found.submodule_search_locations[0]) / "html"


@functools.cache
def page_names() -> tuple[str, ...]:
    """The names of all task pages."""
    return tuple(sorted(p.stem for p in (page_folder() / "miniwob").glob("*.html")))


class MiniWob:
    """One page at a time in a browser context of its own; a page that stays is only seeded again."""

    def __init__(self, *, browser: str = "", deadline_s: float = 10.0) -> None:
        limits = Limits(files=str(page_folder()), deadline_s=deadline_s, settle_s=0.0)
        skip = "#reward-display, #click-canvas, #sync-task-cover"
        self.backend = ChromiumBackend(limits, browser=browser, skip=skip, probe=_STATUS, live=False)
        self.shown = ""

    def start(self, name: str, seed: int) -> str:
        """Begin the episode of a seed and return what is asked for."""
        if name not in page_names():
            raise WorldFault(
                f"web: MiniWoB++ has no page {name!r}; it has {len(page_names())}, such as "
                f"{', '.join(page_names()[:3])}"
            )
        if name != self.shown or len(self.backend.pages) != 1:
            known, self.shown = self.shown, ""
            url = (page_folder() / "miniwob" / f"{name}.html").as_uri()
            if known and len(self.backend.pages) == 1 and self.backend.connected:
                try:
                    # the pages keep nothing: a context of its own for each would cost a second of processor time
                    self.backend.open(url)
                except ActionFailed as error:
                    raise WorldFault(f"web: cannot open {name}: {error}") from error
            else:
                self.backend.begin(Start((url,), viewport=VIEWPORT))
            self.shown = name
        instruction = self.backend.run(_START, str(seed))
        if instruction is None:
            raise WorldFault(f"web: {name} did not get ready within its time")
        return " ".join(str(instruction).split())

    def status(self) -> tuple[bool, float]:
        """Whether the episode was over at the last look, and the reward without the discount for time."""
        if self.backend.probed is None:
            raise WorldFault("web: the page in front is no page of MiniWoB++")
        done, reward = self.backend.probed
        return bool(done), float(reward)
