"""WebRL on sites that keep what is done to them: over http in Chromium with logins, instructions by an
OpenAI-compatible writer, and the outcome reward model as reward.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from terrella.models.config import ModelConfig
from terrella.models.stand_in import write_weights
from terrella.rl.webrl.config import WebSiteEnvironment
from terrella.rl.webrl.tokenizer import pieces_of
from terrella.rl.worlds.web.sites.base import PASSWORD, USER
from terrella.tests.integration import test_web
from terrella.tests.integration.live_sites import (
    KEYS,
    TEMPLATES,
    LiveSite,
    Writer,
    site_tasks,
    tag_file,
    write_demonstrations,
    write_task_file,
)
from terrella.tests.integration.test_web_recipe import SITE
from terrella.tests.launch.tiny_run import results

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]
browser = test_web.browser  # skips, or fails, where there is no Chromium
PATIENCE_S = 1500.0  # of a busy machine
LIMITS = {"max_steps": 5, "max_parse_failures": 2, "max_repeats": 2}
VOCAB = 420
MODEL = {"family": "llama", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 48}
MODEL |= {"vocab": VOCAB, "max_positions": 512, "tied": True}
DEMONSTRATED, TASKS = 6, 2


@dataclass
class Place:
    """The sites, the writer, and the recipe that trains on them."""

    sites: dict[str, LiveSite]
    writer: Writer
    recipe: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    tmp_path = tmp_path_factory.mktemp("live")
    tasks = site_tasks()
    train, test = tasks[::2], tasks[1::2]
    write_task_file(tmp_path / "train.json", train)
    write_task_file(tmp_path / "test.json", test)
    assert write_demonstrations(tmp_path / "demos", train[:DEMONSTRATED], LIMITS) > DEMONSTRATED
    sites = {key: LiveSite(key) for key in KEYS}
    writer = Writer(tasks)
    tag_file(tmp_path / "tags.yaml", sites, LIMITS)
    home = WebSiteEnvironment(kind="web-site", max_prompt_tokens=160, tag="WebClicks", templates=list(TEMPLATES))
    pieces_of(home, VOCAB).save(tmp_path / "start")
    write_weights(ModelConfig(**MODEL), tmp_path / "start")
    recipe = tmp_path / "live.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(tmp_path, writer.address)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SITE_USER", USER)
        patch.setenv("SITE_PASSWORD", PASSWORD)
        yield Place(sites, writer, recipe)
    for server in (*sites.values(), writer):
        server.close()


def recipe_of(folder: Path, writer: str) -> dict:
    """WebRL as its paper's recipe has it, with everything turned down."""

    def training(epochs: float) -> dict:
        return {"optimizer": {"lr": 3e-3}, "sequences_per_step": 4, "epochs": epochs, "checkpoint_every": 1}

    env = {"kind": "web-site", "tag": "LiveTrain", "test_tag": "LiveTest", "tag_files": [str(folder / "tags.yaml")]}
    env |= {"max_prompt_tokens": 160, "max_verdict_tokens": 224, "pad_prompts_to": 160, "at_once": 2}
    phase = {
        "kind": "webrl",
        "name": "phase",
        "phases": 2,
        "init": "sft",
        "demos": "demos",
        "first": "first",
        "orm": "orm",
    }
    phase |= {"tasks": TASKS, "max_new_tokens": 12, "url": f"{writer}/v1", "model": "writer", "low": 0.0, "high": 1.0}
    phase |= {"method": "released", "actor": training(2), "critic": training(2), "evaluate": 1, "replay_low": 0.0}
    return {
        "name": "webrl-live",
        "world": "language",
        "model": MODEL,
        "env": env,
        "stages": [
            {"kind": "start", "name": "start", "folder": str(folder / "start")},
            {"kind": "collect", "name": "demos", "prompts": DEMONSTRATED, "validation_share": 0.0}
            | {"env": {"demonstrations": str(folder / "demos")}},
            {"kind": "sft", "name": "sft", "data": "demos", "init": "start", "optimizer": {"lr": 1e-2}}
            | {"sequences_per_step": 4, "epochs": 12},
            {"kind": "collect", "name": "first", "model": "sft", "env": {"data": "demos"}, "prompts": 3}
            | {"validation_share": 0.0, "max_new_tokens": 12},
            {"kind": "web-orm", "name": "orm", "init": "sft", "data": ["demos", "first"], "training": training(2)},
            phase,
            {"kind": "export", "name": "export", "model": "phase-2-actor"},
        ],
    }


def command(place: Place, run: Path) -> list[str]:
    return [sys.executable, "-m", "terrella", "train", str(place.recipe), "--run", str(run)]


def outcomes(run: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (run / "stages").glob("*.json")}


@pytest.fixture(scope="module")
def whole(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(place, run), timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run


@pytest.mark.full
def test_two_phases_on_live_sites(place: Place, whole: Path) -> None:
    said = outcomes(whole)
    for number in (1, 2):
        tasks, played, judged = (said[f"phase-{number}-{part}"] for part in ("tasks", "played", "rollout"))
        assert tasks["kept"] == played["trajectories"] == judged["trajectories"] == TASKS and played["invalid"] == 0
        assert played["solved"] == 0 and "orm/accuracy" not in judged  # the world knows no answer to written tasks
    for key, site in place.sites.items():
        print(f"{key}: {site.logins} logins, {site.resets} resets, {site.changes} changes")
    assert sum(site.logins for site in place.sites.values()) >= 3 + 2 * TASKS + 3  # first, phases, evaluation
    assert min(site.resets for site in place.sites.values()) > 0
    print(f"{place.writer.written} requests for instructions, {place.writer.refused} found impossible")
    assert place.writer.written >= 2 and place.writer.refused >= 2
    assert not any("Delete" in path.read_text() for path in (whole / "stages").rglob("tasks.json"))
    kept = [path for path in whole.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml", ".log", ".tar")]
    assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]


# stage of the second phase -> the file that it is about to write for the n-th time when its rank kills itself
KILLS = {
    "phase-2-played": ("stages/phase-2-played/journal/", 2),
    "phase-2-actor": ("checkpoints/phase-2-actor/step-", 2),
}


@pytest.mark.full
def test_killed_in_the_second_phase_it_ends_the_same(place: Place, whole: Path, tmp_path: Path) -> None:
    """Killed in the midst of an episode, and again between two updates of the actor, each time resumed by the same
    command: tables, metrics, rollouts and weights are those of the run in one go, and nothing is written anew.
    """
    run, requests = tmp_path / "killed", []
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    before = place.writer.written
    for stage, (file, times) in KILLS.items():
        told = {"PYTHONPATH": path, "KILL_PLACE": str(run / file), "KILL_TIMES": str(times)}
        done = subprocess.run(command(place, run), env=os.environ | told, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == -signal.SIGKILL and not (run / "stages" / f"{stage}.json").exists()
        requests.append(place.writer.written - before)
    done = subprocess.run(command(place, run), timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert requests == [place.writer.written - before] * len(KILLS)  # the instructions of both phases were there
    expected, got = results(whole), results(run)
    print(f"killed in {', '.join(KILLS)}; {len(expected)} parts compared, {len(expected['metrics'])} rows of metrics")
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == expected[name], name
    for shard in sorted((whole / "stages").rglob("*.tar")):
        assert (run / shard.relative_to(whole)).read_bytes() == shard.read_bytes(), shard.name


@pytest.mark.full
def test_planning_on_tasks_of_a_file(place: Place, tmp_path: Path) -> None:
    """An actor looks ahead by a trained world model of pages, on tasks without an oracle: its own scores are the value.
    Nobody clicks at random on such sites, and the sites come back before every arm.
    """
    folder, before = place.recipe.parent, {key: site.resets for key, site in place.sites.items()}
    told = yaml.safe_load(place.recipe.read_text())
    told["name"], told["model"] = "plan-live", {**MODEL, "max_positions": 4096}
    write_weights(ModelConfig(**told["model"]), tmp_path / "start")
    for path in (folder / "start").glob("*token*"):
        shutil.copy(path, tmp_path / "start")
    start, demos, sft, *_ = told["stages"]
    pages = {"kind": "web-page", "data": "pages", "own_tokenizer": True}
    arms = [{"name": "one", "samples": 1, "branching": 1}]
    arms += [{"name": "trained", "samples": 4, "branching": 2, "world": "model", "model": "world", "stop": "valued"}]
    arms[1] |= {"max_new_tokens": 16, "value": "sampled", "budget": 2}
    told["stages"] = [
        start | {"folder": str(tmp_path / "start")},
        demos,
        sft,
        {"kind": "collect", "name": "pages", "env": pages},
        {"kind": "sft", "name": "world", "env": {"data": "pages", "non_gold_ratio": None}, "steps": 1}
        | {"sequences_per_step": 2, "optimizer": {"lr": 1e-3}},
        {"kind": "web-plan", "name": "plan", "actor": "sft", "n": 3, "max_new_tokens": 12, "arms": arms},
    ]
    recipe, run = tmp_path / "plan.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(told))
    words = [sys.executable, "-m", "terrella", "train", str(recipe), "--run", str(run)]
    done = subprocess.run(words, timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    plan = outcomes(run)["plan"]
    print(plan)
    assert plan["tasks"] == 3 and plan["invalid"] == 0 and plan["trained"]["imagined"] > 0
    table = json.loads((run / "results" / "plan.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["one", "trained"] and "nan" not in json.dumps(table).lower()
    assert all(site.resets > before[key] for key, site in place.sites.items())
