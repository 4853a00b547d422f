"""The web World: a task on local sites, on MiniWoB++ pages or on sites elsewhere, in Chromium or in the pure-Python
page model.
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ..base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from .actions import NEEDS_ELEMENT, WebAction, parse_brackets, parse_call
from .backend import ActionFailed, Backend, Limits, Start
from .dom import DomBackend
from .elements import Element, Page
from .evaluators import Dialect, evaluate
from .generate import CONTENT, SiteTask, in_split, make_site_tasks, resolve, script_text
from .http import Slow
from .judge import Judge
from .login import LoginForm, credentials, fill_in, read_state, redact
from .miniwob_tasks import SITE, miniwob_tasks, place_of
from .observe import accessibility_nodes, accessibility_tree, simplified_html
from .reset import acted_on, reset_episode
from .sites import SITES, SiteSet
from .sites.base import PASSWORD, USER
from .tasks import Evaluation, WebTask, load_web_tasks, parse_task
from .templates import Step


@dataclass(frozen=True)
class WebConfig:
    """What is browsed, how it is shown, and the limits of an episode."""

    source: Literal["sites", "miniwob", "file"] = "sites"
    backend: Literal["dom", "chromium"] = "dom"
    observation: Literal["html", "accessibility"] = "html"
    boxes: bool = True  # data-bbox in the HTML, where the backend has a layout
    # of the local sites' tasks; `train` falls into `validation`, a fifth to choose settings on, and `fit`, the rest
    split: Literal["train", "fit", "validation", "test", "all"] = "train"
    sites: tuple[str, ...] = ()  # of the local sites; empty for all
    content: int = 0  # the seed of the local sites' content
    contents: int = 1  # how many seeds from there on: the same sites with other things in them
    instances: int = 24  # at most, of one template
    pages: tuple[str, ...] = ()  # of MiniWoB++; empty for all
    tasks_file: str = ""  # WebArena's format, for source: file
    addresses: dict[str, str] = field(default_factory=dict)  # placeholder -> address of a real site
    # further hosts that pages of a task file may load from, such as a map's tiles: host or host:port
    hosts: tuple[str, ...] = ()
    # brings the sites of a task file back before an episode, where one has acted on them; TERRELLA_SITES and
    # TERRELLA_TASK name them
    reset_command: tuple[str, ...] = ()
    reset_phase_command: tuple[str, ...] = ()  # the same once before a stage plays, with all sites
    reset_deadline_s: float = 600.0  # of either command
    at_once_per_site: int = 0  # episodes of a task file that are open together on one site; 0 for any number
    at_once_per_account: int = 0  # and as one account: a storage state, or a login form
    auth_folder: str = ""  # where the storage states of the task file are
    logins: dict[str, LoginForm] = field(default_factory=dict)  # site -> login form, where there is no storage state
    login: Literal["state", "form"] = "state"  # of the local sites
    # how long the local sites take for an answer, log-normal: its 5th and 95th percentile, such as [50, 300] for what
    # sites elsewhere take; empty for no time
    latency_ms: tuple[float, ...] = ()
    dialect: Dialect = "webarena"
    judge_url: str = ""  # an OpenAI-compatible API; empty for no judge
    judge_model: str = ""
    max_steps: int = 30
    max_parse_failures: int = 5
    max_repeats: int = 5
    viewport: tuple[int, ...] = (1280, 720)
    deadline_s: float = 10.0
    browser: str = ""  # the path of Chromium

    def __post_init__(self) -> None:
        if self.source == "file" and not self.tasks_file:
            raise ValueError("tasks_file: source: file needs one")
        if self.split in ("fit", "validation") and self.source != "sites":
            raise ValueError(f"split: {self.split} is of the local sites; {self.source} has train, test, all")
        if self.backend == "dom" and self.source != "sites":
            raise ValueError("backend: dom has no scripts and no network; it serves source: sites")
        if self.source != "file" and (self.hosts or self.reset_command or self.reset_phase_command):
            raise ValueError(
                "hosts, reset_command, reset_phase_command: they are for source: file; our own sites need none"
            )
        if bad := next((h for h in self.hosts if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", h)), None):
            raise ValueError(f"hosts: {bad!r} is no host or host:port; leave scheme and path out")
        if self.reset_command and self.at_once_per_site != 1:
            raise ValueError(
                "at_once_per_site: must be 1 with reset_command, which would take a site away from other episodes on it"
            )
        if min(self.at_once_per_site, self.at_once_per_account) < 0:
            raise ValueError("at_once_per_site, at_once_per_account: 0 (any number) or above")
        unknown = [s for s in self.sites if s not in SITES]
        if unknown:
            raise ValueError(f"sites: {unknown[0]!r} is none of {', '.join(SITES)}")
        if self.latency_ms and not (len(self.latency_ms) == 2 and 0 < self.latency_ms[0] <= self.latency_ms[1]):
            raise ValueError("latency_ms: two numbers above 0, the lower one first")
        if bool(self.judge_url) != bool(self.judge_model):
            raise ValueError("judge_model: give both judge_url and judge_model, or neither")
        if (
            len(self.viewport) != 2
            or min(self.viewport) < 1
            or min(self.max_steps, self.max_parse_failures, self.max_repeats, self.contents, self.instances) < 1
        ):
            raise ValueError("viewport: two positive numbers; and all limits at least 1")


@functools.lru_cache(maxsize=8)
def _site_tasks(
    content: int, contents: int, sites: tuple[str, ...], instances: int, split: str
) -> tuple[SiteTask, ...]:
    made = [
        t
        for seed in range(content, content + contents)
        for t in make_site_tasks(seed, sites, instances)
        if in_split(t, split)
    ]
    # one sentence is one task: the first content's
    tasks = list({t.task.intent: t for t in reversed(made)}.values())[::-1]
    random.Random("order of the web tasks").shuffle(tasks)  # so that neighbouring seeds are different kinds of tasks
    return tuple(tasks)


class WebWorld(World):
    """One task in a browser. `page` and `html` hold what a trainer needs; `demonstrate` writes the oracle's
    next action.
    """

    name = "web"
    Config = WebConfig
    render_modes = ("text", "html", "accessibility")

    def __init__(self, **settings: Any) -> None:
        self.config = WebConfig(**settings)
        self.backend: Backend | None = None
        self.task: WebTask | None = None
        self.judge = Judge(self.config.judge_url, self.config.judge_model) if self.config.judge_url else None
        self.miniwob: Any = None
        self.own_sites: SiteSet | None = None
        self.secrets: tuple[str, ...] = (PASSWORD,)
        self.slow: Slow | None = None

    @functools.cached_property
    def tasks(self) -> tuple[SiteTask, ...]:
        """The tasks that seeds walk over (local sites and task files), or so many instances of every MiniWoB++ page."""
        config = self.config
        if config.source == "sites":
            return _site_tasks(config.content, config.contents, tuple(config.sites), config.instances, config.split)
        if config.source == "file":
            return tuple(SiteTask(task, "all", ()) for task in load_web_tasks(config.tasks_file, config.addresses))
        return tuple(miniwob_tasks(config.pages or self._all_pages(), config.instances, config.split))

    def _open_backend(self) -> Backend:
        if self.backend is not None:
            return self.backend
        config = self.config
        if config.source == "miniwob":
            from .miniwob import MiniWob

            self.miniwob = MiniWob(browser=config.browser, deadline_s=config.deadline_s)
            self.backend = self.miniwob.backend
        elif config.source == "sites":
            self.own_sites = SiteSet(config.content)
            limits = Limits(hosts=self.own_sites.hosts, deadline_s=config.deadline_s)
            times = config.latency_ms
            self.slow = Slow(self.own_sites.fetch, times[0], times[1]) if times else None
            fetch = self.slow or self.own_sites.fetch
            if config.backend == "dom":
                self.backend = DomBackend(fetch, limits)
            else:
                from .chromium import ChromiumBackend

                self.backend = ChromiumBackend(limits, fetch, browser=config.browser)
        else:
            from .chromium import ChromiumBackend

            hosts = frozenset(
                (*(urlsplit(a).netloc.lower() for a in config.addresses.values()), *(h.lower() for h in config.hosts))
            )
            self.backend = ChromiumBackend(
                Limits(hosts=hosts, deadline_s=config.deadline_s, settle_s=0.5), browser=config.browser
            )
        assert self.backend is not None
        return self.backend

    def reset(self, seed: int, sample: int = 0) -> str:
        """The task of a seed. MiniWoB++: the seed's page, with its instance seeded by the same number."""
        self.origin: dict[str, Any] = {"seed": seed}
        if self.config.source != "miniwob":
            chosen = self.tasks[seed % len(self.tasks)]
            return self._begin(chosen.task, chosen.steps)
        names = self.config.pages or self._all_pages()
        name = names[seed % len(names)]
        return self._begin_page(WebTask(f"{name}.{seed}", (SITE,), "", (), Evaluation(()), template=name), name, seed)

    def _all_pages(self) -> tuple[str, ...]:
        from .miniwob import page_names

        return page_names()

    def _begin_page(self, task: WebTask, name: str, seed: int) -> str:
        """Begin an instance of a MiniWoB++ page; it says itself what is asked for."""
        backend = self._open_backend()
        intent = self.miniwob.start(name, seed)
        return self._ready(replace(task, intent=intent, start_urls=(backend.url,)), ())

    def open_task(self, record: dict[str, Any] | WebTask, steps: tuple[Step, ...] = ()) -> str:
        """Begin a task of the caller's, such as one of a task file or a generated instruction, in place of a seed's."""
        task = record if isinstance(record, WebTask) else parse_task(record)
        self.origin = {"record": json.loads(json.dumps(dict(task.raw)))}
        if self.config.source == "miniwob":
            return self._begin_page(task, *place_of(task))
        return self._begin(task, steps)

    def _begin(self, task: WebTask, steps: tuple[Step, ...]) -> str:
        reset_episode(self.config.reset_command, task.sites, task.task_id, self.config.reset_deadline_s)
        backend = self._open_backend()
        if self.slow is not None:
            self.slow.begin(task.task_id)
        if self.own_sites is not None:
            self.own_sites.reset(int(task.raw.get(CONTENT, self.config.content)))
        width, height = task.viewport or (self.config.viewport[0], self.config.viewport[1])
        cookies, storage, forms = self._identity(task)
        start = Start(task.start_urls, cookies, storage, task.geolocation, (width, height))
        if forms:
            backend.begin(replace(start, urls=(forms[0][0].url,)))
            for form, user, password in forms:
                self.secrets = tuple(dict.fromkeys((*self.secrets, password)))
                fill_in(backend, form, user, password)
            self._open_all(backend, task)
        else:
            backend.begin(start)
        return self._ready(task, steps)

    def _open_all(self, backend: Backend, task: WebTask) -> None:
        try:
            backend.open(task.start_urls[0])
            for url in task.start_urls[1:]:
                backend.act(WebAction("new_tab"), None)
                backend.open(url)
            if len(task.start_urls) > 1:
                backend.act(WebAction("switch_tab", text="0"), None)
        except ActionFailed as error:
            raise WorldFault(f"web: cannot open the start of task {task.task_id}: {error}") from error

    def _identity(
        self, task: WebTask
    ) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...], list[tuple[LoginForm, str, str]]]:
        """Cookies, local storage and login forms of the sites that the task needs."""
        if self.own_sites is not None:
            known = [
                s for s in self.own_sites.sites.values() if s.key in task.sites and s.needs_login and task.require_login
            ]
            if self.config.login == "form":
                return (), (), [(LoginForm(f"{s.base}/login"), USER, PASSWORD) for s in known]
            return tuple(s.session for s in known), (), []
        if not task.require_login:
            return (), (), []
        path = Path(self.config.auth_folder or ".") / Path(task.storage_state).name
        forms = [self.config.logins[s] for s in task.sites if s in self.config.logins]
        if task.storage_state and (path.is_file() or not forms):
            cookies, storage = read_state(path)
            return cookies, storage, []
        return (), (), [(form, *credentials(form)) for form in forms]

    def _ready(self, task: WebTask, steps: tuple[Step, ...]) -> str:
        self.task, self.steps = task, list(steps)
        self.actions: list[str] = []
        self.done, self.score, self.answer, self.error = False, -0.1, "", ""
        self.failures = self.repeats = 0
        self.demonstrated = 0
        self._look()
        return self.render()

    def _look(self) -> None:
        """Read the page once; `html` and `observation` hold it as text, without credentials."""
        assert self.backend is not None
        self.page: Page = self.backend.look()
        self.elements: dict[int, Element] = self.page.labels
        self.html = redact(
            simplified_html(self.page, boxes=self.config.boxes and self.backend.has_layout), self.secrets
        )
        self.observation = self.html
        if self.config.observation == "accessibility":
            self.elements = accessibility_nodes(self.page)[1]
            self.observation = redact(accessibility_tree(self.page), self.secrets)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.task)
        assert self.task is not None
        if mode == "html":
            return self.html
        if mode == "accessibility":
            return redact(accessibility_tree(self.page), self.secrets)
        return f"{self.task.intent}\n{self.observation}"

    def parse(self, text: str) -> WebAction:
        """The action of a response, in the grammar of the observation."""
        return parse_call(text) if self.config.observation == "html" else parse_brackets(text)

    def step(self, action: Action) -> StepResult:
        """Carry out what the agent wrote. An exit, the limits on steps, parse failures and repeats end the episode
        and score it.
        """
        check_started(self, self.task)
        assert self.task is not None and self.backend is not None
        if self.done:
            raise WorldFault("web: the episode is over; call reset(seed)")
        acted_on(self.config.reset_command, self.task.sites)
        response = str(action)
        before, url = self.observation, self.backend.url
        parsed = self.parse(response)
        self.failures = self.failures + 1 if parsed.kind == "none" else 0
        self.repeats = self.repeats + 1 if self.actions and self.actions[-1] == response else 1
        self.actions.append(response)
        self.error = parsed.error
        element = self.elements.get(parsed.element) if parsed.element is not None else None
        valid = self._execute(parsed, element) if parsed.kind not in ("none", "exit") else parsed.kind == "exit"
        stop = self._early_stop()
        if self.miniwob is not None:
            self._miniwob_end(parsed, stop)
        elif parsed.kind == "exit" or stop:
            exited = parsed.kind == "exit"
            self.answer = parsed.text if exited else f"Early stop: {stop}"
            # the limit is no part of what is judged: it may be the very number that the task asks for
            self.score = self._judge(self.answer if exited else "Early stop")
            self.done = True
        effective = self.done or self.backend.url != url or self.observation != before
        info = {
            "success": self.score >= 1.0,
            "action_is_effective": effective,
            "action_is_valid": valid,
            "parse_failed": parsed.kind == "none",
            "early_stop": bool(stop) and parsed.kind != "exit",
            "page_truncated": self.page.truncated,
            "steps": len(self.actions),
        }
        return StepResult(self.render(), max(0.0, self.score) if self.done else 0.0, self.done, info)

    def _execute(self, parsed: WebAction, element: Element | None) -> bool:
        assert self.backend is not None
        try:
            if parsed.kind in NEEDS_ELEMENT and element is None:
                raise ActionFailed(f"the page has no element {parsed.element}")
            self.backend.act(parsed, element)
        except ActionFailed as error:
            self.error = str(error)
        self._look()
        return not self.error

    def _early_stop(self) -> str:
        config = self.config
        if len(self.actions) >= config.max_steps:
            return f"{config.max_steps} steps"
        if self.failures >= config.max_parse_failures:
            return f"{config.max_parse_failures} responses without an action"
        if self.repeats >= config.max_repeats:
            return f"the same action {config.max_repeats} times"
        return ""

    def _judge(self, answer: str) -> float:
        assert self.task is not None and self.backend is not None
        if not self.task.evaluation.types:
            return 0.0
        try:
            return evaluate(self.task, answer, self.backend, self.config.dialect, self.judge)
        except ActionFailed as error:
            raise WorldFault(f"web: task {self.task.task_id} could not be judged: {error}") from error

    def _miniwob_end(self, parsed: WebAction, stop: str) -> None:
        over, reward = self.miniwob.status()
        if over or parsed.kind == "exit" or stop:
            self.done, self.score = True, 1.0 if over and reward > 0 else 0.0

    def demonstrate(self) -> str:
        """The next action of the scripted oracle for the page at hand, as a demonstration would write it."""
        check_started(self, self.task)
        assert self.task is not None
        if self.miniwob is not None:
            from .miniwob_oracles import next_action

            action = next_action(self.task.template, self.task.intent, self.page, len(self.actions))
        elif self.demonstrated >= len(self.steps):
            raise WorldFault(f"web: there is no script for step {self.demonstrated} of task {self.task.task_id}")
        else:
            action = resolve(self.steps[self.demonstrated], self.page)
            self.demonstrated += 1
        return script_text(action, self.page.labels.get(action.element) if action.element is not None else None)

    def random_action(self, rng: random.Random) -> str:
        """A click, words of the task typed into a field, or an exit, each element equally likely, in the grammar of
        the observation.
        """
        check_started(self, self.task)
        assert self.task is not None
        brackets, words = self.config.observation == "accessibility", self.task.intent.split()
        chosen = rng.choice([*(number for number, e in self.elements.items() if e.label is not None), None])
        if chosen is None:
            return "```stop []```" if brackets else WebAction("exit").call
        if self.elements[chosen].tag not in ("input", "textarea"):
            return f"```click [{chosen}]```" if brackets else WebAction("click", chosen).call
        start = rng.randrange(len(words))
        text = " ".join(words[start : start + rng.randint(1, 4)]).replace('"', "")
        return f"```type [{chosen}] [{text}] [1]```" if brackets else WebAction("search", chosen, text).call

    def snapshot(self) -> Snapshot:
        """The task and the actions so far: sites are deterministic, so a restore plays them again."""
        check_started(self, self.task)
        return {"world": self.name, **self.origin, "actions": list(self.actions), "demonstrated": self.demonstrated}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name:
            raise WorldFault(f"web: a snapshot of {snapshot.get('world')!r}")
        if "seed" in snapshot:
            self.reset(int(snapshot["seed"]))
        else:
            self.open_task(snapshot["record"])
        for action in snapshot["actions"]:
            self.step(action)
        self.demonstrated = int(snapshot["demonstrated"])

    def close(self) -> None:
        """Give the browser back."""
        if self.backend is not None:
            self.backend.close()
        self.backend = self.task = self.miniwob = None
