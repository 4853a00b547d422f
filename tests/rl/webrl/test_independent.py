"""Web episodes that wait for nobody: through a recipe they train to the bit as lock-step does, none lost or repeated;
a page that hangs holds up nobody else, and the limits of sites hold over all rollouts.
"""

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid
from terrella.launch import recipe
from terrella.rl.journal import Journal
from terrella.rl.rollout.sampler import Sample, SamplingParams
from terrella.rl.rollout.stream import Stream
from terrella.rl.webrl import sites
from terrella.rl.webrl.config import WebSiteEnvironment
from terrella.rl.webrl.plan_config import PlanArm
from terrella.rl.webrl.planning import Planner
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.sites import Players, Seat, pool_of
from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web import hosted
from terrella.rl.worlds.web.generate import SiteTask
from terrella.rl.worlds.web.reset import Room, Shares
from terrella.rl.worlds.web.tasks import Evaluation, WebTask
from terrella.rl.worlds.web.world import WebWorld
from terrella.tests.integration import test_web
from terrella.tests.parallel.recipe_jobs import run_case

WAIT_S = 120.0
browser = test_web.browser
TAGS = """
WebSlow: {{world: web, max_actions: 8, max_tokens: 32, config: {{sites: [reddit, shopping_admin, gitlab], contents: 2, boxes: false,
  backend: {backend}, max_steps: 4, max_parse_failures: 3, max_repeats: 3, latency_ms: [2, 40], deadline_s: 60}}}}
"""  # noqa: E501
RECIPE = """
name: web-independent
world: language
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 420, max_positions: 256, tied: true}}
env: {{kind: web-site, tag: WebSlow, test_tag: WebSlow, tag_files: [{tags}], templates: [407], max_prompt_tokens: 96,
  max_verdict_tokens: 96, pad_prompts_to: 96, at_once: 3, browsers: 2}}
stages:
- {{kind: start, name: start}}
- {{kind: collect, name: demos, prompts: 3, validation_share: 0.0}}
- {{kind: sft, name: sft, data: demos, init: start, optimizer: {{lr: 1e-2}}, sequences_per_step: 4, epochs: {epochs}}}
- {{kind: rl, name: grpo, init: sft, env: {{data: demos}}, algorithm: {{kind: grpo, tis_cap: 2.0}}, prompts_per_step: 2, samples_per_prompt: 4, steps: 2,
   max_new_tokens: 8, optimizer: {{lr: 1e-2}}, rollouts: {{independent: {independent}, keep_samples: true, sampler: {{kind: embedded, batch_invariant: true}}}}}}
"""  # noqa: E501


def trained(
    folder: Path, backend: str, independent: bool, source: Path | None = None
) -> tuple[list[dict], dict, Counter[int]]:
    """The RL stage's optimizer steps, its samples by key, and how often each prompt was trained on. With a source the
    stages before it are those of that run."""
    tags, path, run = folder / "tags.yaml", folder / "recipe.yaml", folder / "runs" / f"independent-{independent}"
    tags.write_text(TAGS.format(backend=backend))
    path.write_text(RECIPE.format(tags=tags, independent=str(independent).lower(), epochs=12))
    steps = run_case(recipe.load(str(path)), run, source=source, stage="grpo")
    journal = Journal(run / "stages" / "grpo" / "journal")
    return steps[-2:], journal.samples(), journal.trained()


@pytest.mark.parametrize(
    "backend", [pytest.param("dom", marks=pytest.mark.full), pytest.param("chromium", marks=pytest.mark.integration)]
)
@pytest.mark.timeout(1800)
def test_a_recipe_trains_to_the_bit_as_in_lock_step(tmp_path: Path, request, backend: str) -> None:
    if backend == "chromium":
        request.getfixturevalue("browser")
    expected, samples, counts = trained(tmp_path, backend, False)
    steps, independent, again = trained(tmp_path, backend, True, tmp_path / "runs" / "independent-False")
    assert counts == again == Counter(range(4))
    assert independent == samples and len({key[0][3] for key in samples}) > 1  # several turns
    for one, other in zip(steps, expected, strict=True):
        assert one["metrics"] == other["metrics"]
        assert all(bool((value == other["weights"][name]).all()) for name, value in one["weights"].items())


def site_task(number: int, *names: str) -> WebTask:
    return WebTask(str(number), names, "", (), Evaluation(()))


def test_a_room_keeps_its_limits_over_rollouts_in_several_threads() -> None:
    room, lock, most = Room(Shares(at_once=3, per_site=2)), threading.Lock(), Counter[str]()
    now = Counter[str]()

    async def stay(task: WebTask) -> int:
        async with room.seat(task):
            with lock:
                now.update(["all", *task.sites])
                for name, count in now.items():
                    most[name] = max(most[name], count)
            await asyncio.sleep(0.002)
            with lock:
                now.subtract(["all", *task.sites])
        return int(task.task_id)

    async def rollout(first: int) -> list[int]:
        tasks = [site_task(first + n, *(("map",), ("shop", "map"), ("wiki",))[n % 3]) for n in range(20)]
        return await asyncio.gather(*(stay(task) for task in tasks))

    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda f=f: found.append(asyncio.run(rollout(f)))) for f in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(map(tuple, found)) == [tuple(range(20)), tuple(range(100, 120))]
    assert most["all"] == 3 and most["map"] <= 2 and most["shop"] <= 2 and not +now


def test_who_stops_waiting_for_a_seat_leaves_none_taken() -> None:
    async def run() -> None:
        room = Room(Shares(1))
        async with room.seat(site_task(0, "map")):
            waiting = asyncio.ensure_future(room.seat(site_task(1, "map")).__aenter__())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(WAIT_S), room.seat(site_task(2, "map")):
            pass

    asyncio.run(run())


class Says:
    """Always the same answer."""

    def __init__(self, text: str) -> None:
        self.ids = tuple(ByteTokenizer().encode(text)) + (ByteTokenizer().eos_id,)

    def generate(self, requests):
        return [Sample(self.ids, (-0.5,) * len(self.ids), "stop", 0) for _ in requests]


def some(count: int) -> tuple[Players, list[Seat]]:
    settings = WebSiteEnvironment(
        kind="web-site", max_prompt_tokens=200, tag="WebClicks", templates=[407], at_once=2, browsers=2
    )
    tasks: list[SiteTask] = pool_of(settings)
    return Players(settings, Prompter(ByteTokenizer(), 200)), [Seat(tasks[i], i, 0) for i in range(count)]


def test_a_page_that_hangs_is_begun_anew_in_another_world_and_holds_up_nobody(monkeypatch) -> None:
    """The first world never returns from its step. The others end, and its task is played in a fresh world."""
    hung, release = [], threading.Event()
    step = WebWorld.step

    def sometimes(world: WebWorld, action):
        if not hung:
            hung.append(world)
            release.wait(WAIT_S)
        return step(world, action)

    monkeypatch.setattr(WebWorld, "step", sometimes)
    monkeypatch.setattr(sites.Limits, "world_s", 2.0)
    players, seats = some(5)
    stream = Stream(Says('exit(message="")'))
    try:
        begun = time.monotonic()
        played = players.play(stream, seats, SamplingParams(32), 0, 1)
        assert time.monotonic() - begun < WAIT_S / 2
    finally:
        release.set()
        stream.close()
    assert not any(isinstance(t.reward, Invalid) for t in played) and [t.prompt_id for t in played] == [*range(5)]
    assert sum(t.info.get("restarts", 0) for t in played) == 1
    assert hung[0] not in players.worlds and len(players.worlds) <= 2 and all(seat.episode.ended for seat in seats)


def test_an_episode_has_as_many_turns_as_its_tag_says(tmp_path: Path) -> None:
    limits = "max_steps: 210, max_parse_failures: 999, max_repeats: 999"
    (tmp_path / "tags.yaml").write_text(
        f"WebLong: {{world: web, max_actions: 8, max_tokens: 32, config: {{sites: [map], contents: 1, {limits}}}}}"
    )
    settings = WebSiteEnvironment(
        kind="web-site", max_prompt_tokens=200, tag="WebLong", tag_files=[str(tmp_path / "tags.yaml")]
    )
    players, task = Players(settings, Prompter(ByteTokenizer(), 200)), pool_of(settings)[0]
    stream = Stream(Says("on"))
    try:
        (stepwise,) = players.play(Says("on"), [Seat(task, 0, 0)], SamplingParams(32), 0, 1)
        (streamed,) = players.play(stream, [Seat(task, 0, 0)], SamplingParams(32), 0, 1)
    finally:
        stream.close()
    planned = players.episode(0, task, 0, 0)
    Planner(PlanArm("none", branching=1), Says("on"), SamplingParams(32), 0).play([planned])
    assert stepwise.reward == streamed.reward == 0.0 and planned.fault is None
    assert stepwise.info["steps"] == streamed.info["steps"] == len(planned.rounds) == 210


def test_limits_of_sites_below_the_ranks_are_refused() -> None:
    players, _ = some(1)
    sites.tag_of(players.settings, "train").config["at_once_per_site"] = 1
    try:
        with pytest.raises(ConfigError, match="at_once_per_site: 1 is below the 2 ranks"):
            players.shares(2)
    finally:
        sites.tag_of(players.settings, "train").config["at_once_per_site"] = 0


@pytest.mark.parametrize(
    ("cores", "gib", "ranks", "browsers"),
    [(2, 64, 1, 8), (16, 128, 1, 64), (16, 128, 4, 16), (16, 2, 1, 4), (1, 0, 1, 1)],
)
def test_browsers_are_as_many_as_cores_and_memory_bear(cores: int, gib: int, ranks: int, browsers: int) -> None:
    assert hosted.browsers_here(cores, gib << 30, ranks) == browsers


def test_a_thread_that_does_not_return_is_given_up_and_those_behind_it_hear_of_it() -> None:
    home, release = hosted.Home(), threading.Event()
    faults: list[BaseException] = []

    def ask(work) -> None:
        try:
            home.ask(work, 0.5)
        except WorldFault as fault:
            faults.append(fault)

    threads = [threading.Thread(target=ask, args=(work,)) for work in (lambda: release.wait(WAIT_S), lambda: 1)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S / 4)
    assert time.monotonic() - begun < WAIT_S / 4 and len(faults) == 2
    with pytest.raises(WorldFault, match=r"did not return within 0\.5 s"):
        home.ask(lambda: 1, 1.0)
    release.set()
    other = hosted.Home()
    assert other.ask(lambda: 7, WAIT_S) == 7
    with pytest.raises(KeyError):
        other.ask(lambda: {}["x"], WAIT_S)
