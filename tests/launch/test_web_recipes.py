"""WebRL's block of phases becomes stages that refer to each other rightly, and comes back from a resolved file
unchanged.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from terrella.core import schema
from terrella.core.config import OptimizerConfig
from terrella.core.errors import ConfigError
from terrella.core.rng import fold
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch import recipe, rehearse
from terrella.launch.commands.check_recipe import alone
from terrella.launch.settings.web import Training, WebPhases, WebReplay, WebTasks, expand
from terrella.launch.stages import web_judge, web_plan
from terrella.launch.stages.verbs import start_of
from terrella.launch.stages.web import draw_seed
from terrella.launch.stages.web_orm import held_out
from terrella.models.stand_in import write_byte_tokenizer
from terrella.rl.webrl.config import WebSiteEnvironment
from terrella.rl.webrl.instructions import mutate
from terrella.rl.webrl.plan_config import PlanArm
from terrella.rl.webrl.results import rows_of
from terrella.rl.webrl.sites import pool_of
from terrella.rl.webrl.steps import WebTrajectory
from terrella.rl.webrl.tasks import SiteTasks


def stages(name: str, *overrides: str) -> dict:
    return {stage.name: stage for stage in recipe.load(name, overrides).stages}


def test_nobody_clicks_at_random_on_sites_elsewhere_and_no_oracle_is_made_up(tmp_path: Path) -> None:
    judged = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "x"}}
    tasks = [
        {"task_id": i, "sites": [s], "intent": s, "start_url": "http://h/", "eval": judged}
        for i, s in enumerate(("map", "reddit"))
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    config = f"{{source: file, backend: chromium, tasks_file: {tmp_path / 'tasks.json'}, addresses: {{__MAP__: 'http://h'}}}}"
    (tmp_path / "tags.yaml").write_text(f"Elsewhere: {{world: web, config: {config}}}")
    home = WebSiteEnvironment(kind="web-site", max_prompt_tokens=100)
    there = replace(home, tag="Elsewhere", test_tag="Elsewhere", tag_files=[str(tmp_path / "tags.yaml")])
    assert scripts(there, 2) == [] and scripts(replace(there, random_elsewhere=True), 2) == ["random policy"]
    rows = rows_of({"actor": {(0, 0): ("map", True), (1, 0): ("reddit", False)}}, {}, ["map", "reddit"])
    assert [row["name"] for row in rows] == ["actor"] and "nan" not in json.dumps(rows).lower()
    assert [cell["value"] for cell in rows[0]["cells"]] == [0.5, 1.0, 0.0]  # all, map, reddit
    assert scripts(home, 2) == ["random policy", "oracle"]


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"world": "true", "value": "sampled"}, "'a': world: true tries actions on a second copy of the sites"),
        ({"world": "corrupted", "value": "sampled"}, "'a': world: corrupted tries actions on a second copy"),
        ({"world": "model", "model": "world-sft"}, "'a': value: progress is the place on an oracle's way"),
        ({"world": "model", "model": "world-sft", "value": "sampled"}, None),
        ({"samples": 1}, None),
    ],
)
def test_arms_that_need_an_oracle_or_a_second_world_are_refused_on_tasks_of_a_file(
    arm: dict, words: str | None, tmp_path: Path
) -> None:
    judged = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "x"}}
    task = {"task_id": 1, "sites": ["map"], "intent": "i", "start_url": "http://h/", "eval": judged}
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    there = {"source": "file", "backend": "chromium", "tasks_file": str(tmp_path / "tasks.json")}
    there = {**there, "addresses": {"__MAP__": "http://h"}}
    (tmp_path / "tags.yaml").write_text(json.dumps({"Elsewhere": {"world": "web", "config": there}}))
    sites = (f"env.tag_files=['{tmp_path / 'tags.yaml'}']", "env.test_tag=Elsewhere")
    config = recipe.load("mpc-sites", sites)
    planned = next(stage for stage in config.stages if stage.kind == "web-plan")
    stage, job = replace(planned, arms=[PlanArm("a", **arm)], headline=None), alone(config, tmp_path / "run")
    if words is None:
        web_plan.check(stage, job)
    else:
        with pytest.raises(ConfigError, match=words):
            web_plan.check(stage, job)


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"world": "model", "model": "sft", "value": "sampled"}, "'a': model: 'sft' is no model of page changes"),
        ({"world": "true", "value": "critic", "critic": "critic"}, "'a': value: critic needs tensor, pipeline"),
        ({"world": "none", "value": "critic", "critic": "critic"}, None),  # which asks no value
    ],
)
def test_arms_that_cannot_be_played_are_refused_before_the_first_stage(
    arm: dict, words: str | None, tmp_path: Path
) -> None:
    config = recipe.load("mpc-sites-tiny", ("ranks=2", "parallel.tensor=2"))
    planned = next(stage for stage in config.stages if stage.kind == "web-plan")
    stage, job = replace(planned, arms=[PlanArm("a", **arm)], headline=None), alone(config, tmp_path / "run")
    if words is None:
        web_plan.check(stage, job)
    else:
        with pytest.raises(ConfigError, match=words):
            web_plan.check(stage, job)


def test_sampling_and_actors_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_p: 1.5 must be in \(0, 1\]"):
        recipe.load("mpc-sites-tiny", ("stages.plan.top_p=1.5",))
    with pytest.raises(ConfigError, match="'plan': actor: 'demos' of kind collect leaves no model"):
        recipe.load("mpc-sites-tiny", ("stages.plan.actor=demos",))


def scripts(settings: WebSiteEnvironment, n: int) -> list[str]:
    tasks = SiteTasks(settings, None, ByteTokenizer(), None)
    return tasks.scripts(tasks.some(n))


def test_prompts_and_answers_that_the_model_has_no_room_for_are_refused() -> None:
    sites = WebSiteEnvironment(kind="web-site", max_prompt_tokens=100, max_verdict_tokens=119)
    SiteTasks(sites, None, ByteTokenizer(), 120).require_room(20)
    with pytest.raises(ConfigError, match="max_prompt_tokens: prompts and answers take 121 positions"):
        SiteTasks(sites, None, ByteTokenizer(), 120).require_room(21)
    with pytest.raises(ConfigError, match="max_verdict_tokens: prompts and answers take 120 positions"):
        SiteTasks(sites, None, ByteTokenizer(), 119)
    with pytest.raises(ConfigError, match="'WebNowhere' is no tag of a web world"):
        SiteTasks(replace(sites, tag="WebNowhere"), None, ByteTokenizer(), None).of("train")


def test_phases_need_web_sites() -> None:
    training = Training(OptimizerConfig(lr=1e-3), sequences_per_step=8)
    phases = WebPhases("webrl", "phase", 1, "sft", "demos", "first", 8, 16, training, training)
    with pytest.raises(ValueError, match=r"env: the stage 'phase' of kind webrl needs web sites"):
        expand([phases], None)


def test_what_a_reward_model_judges_is_played_by_a_stage_of_its_own() -> None:
    found = stages("webrl-tiny", "stages.5.orm=orm")
    played, verdicts = found["phase-2-played"], found["phase-2-rollout"]
    assert (played.kind, played.env.data, played.model) == ("collect", "phase-2-tasks", "phase-1-actor")
    assert (verdicts.kind, verdicts.data, verdicts.orm) == ("web-judge", "phase-2-played", "orm")
    assert found["phase-2-replay"].new == "phase-2-rollout" and "phase-1-played" not in found["phase-2-replay"].earlier


@pytest.mark.parametrize("name", ["webrl-arms-tiny", "webrl-arms-1gpu"])
def test_the_arms_differ_in_what_they_are_named_after_and_in_nothing_else(name: str) -> None:
    tree = recipe.settings_tree(name)
    blocks = {s["name"]: s for s in schema.plain(tree)["stages"] if s["kind"] == "webrl"}
    whole = blocks.pop("webrl")
    changed = {name: {k: v for k, v in s.items() if whole.get(k) != v and k != "name"} for name, s in blocks.items()}
    assert changed == {
        "no-replay": {"replay_ratio": 0.0},
        "no-kl": {"method": "filtered_bc", "critic_always": True},
        "no-filter": {"curriculum": "random"},
        "same-tasks": {"curriculum": "first"},
    }
    assert all(set(whole) <= set(s) for s in blocks.values())


def test_an_arm_of_the_study_can_be_run_alone_and_no_phase_believes_the_world() -> None:
    arms = ["webrl", "no-replay", "no-kl", "no-filter", "same-tasks"]
    without = [f"stages.{name}=null" for name in (*arms[:2], *arms[3:], "more-sft", "more-sft-eval")]
    found = stages("webrl-arms-tiny", *without)
    assert [name for name in found if name.endswith("-eval")] == ["no-kl-eval"]
    # a critic is trained for the filter of the next phase, though the actor's loss has no use for it
    assert found["no-kl-2-tasks"].critic == "no-kl-1-critic" and found["no-kl-2-actor"].critic is None
    whole = stages("webrl-arms-tiny")
    assert {whole[f"{arm}-1-replay"].actor for arm in arms} == {"sft"} == {whole["more-sft"].init}
    for arm in arms:
        assert {whole[f"{arm}-{n}-rollout"].kind for n in range(1, 6)} == {"web-judge"}
    assert whole["no-filter-2-tasks"].critic is None and whole["same-tasks-2-tasks"].curriculum == "first"
    assert whole["same-tasks-2-tasks"].failures[0] == "first"


def test_a_curriculum_that_filters_nothing_takes_no_critic_and_known_tasks_no_writer() -> None:
    with pytest.raises(ValueError, match="critic: curriculum random filters nothing"):
        WebTasks("web-tasks", "t", ["first"], 8, critic="critic", curriculum="random")
    with pytest.raises(ValueError, match="url: curriculum first plays known tasks"):
        WebTasks("web-tasks", "t", ["first"], 8, url="http://h", model="m", curriculum="first")
    with pytest.raises(ConfigError, match="url: curriculum first plays known tasks"):
        stages("webrl-webarena-lite", "stages.phase.curriculum=first")


def test_a_reward_model_of_a_folder_judges_in_the_tokens_of_the_start(tmp_path: Path) -> None:
    """The released one is named as a second start; a folder with other tokens is refused before anything runs."""
    write_byte_tokenizer(tmp_path / "start")
    write_byte_tokenizer(tmp_path / "orm")
    named = [
        f"stages.{n}={{kind: start, name: {name}, folder: {tmp_path / name}}}" for n, name in ((0, "start"), (4, "orm"))
    ]
    config = recipe.load("webrl-tiny", (*named, "stages.5.orm=orm"))
    job = alone(config, tmp_path / "run")
    judge = next(stage for stage in config.stages if stage.kind == "web-judge")
    assert start_of(job).name == "start" and judge.orm == "orm"
    web_judge.check(judge, job)
    write_byte_tokenizer(tmp_path / "orm", "glm")
    with pytest.raises(ConfigError, match=r"stages: orm.folder = .*orm has another tokenizer than the recipe's start"):
        web_judge.check(judge, job)
    made = rehearse.turned_down(
        recipe.load("webrl-webarena-lite", ("stages.orm={kind: start, name: orm, folder: orm}",)), None, tmp_path
    )
    assert len(made.folders) == 2 and len({str(sizes) for sizes in made.folders.values()}) == 1
    with pytest.raises(ConfigError, match="need exactly one stage of kind start, not 2"):
        start_of(alone(recipe.load("webrl-tiny", named), tmp_path / "run"))


def test_a_model_of_pages_with_a_tokenizer_of_its_own_begins_from_fresh_weights() -> None:
    assert stages("mpc-sites")["world-sft"].init is None
    with pytest.raises(ConfigError, match="'world-sft' needs init"):
        recipe.load("mpc-sites", ("stages.pages.env.own_tokenizer=false",))


def test_phases_become_stages() -> None:
    found = stages("webrl-tiny")
    assert [n for n in found if n.startswith("phase-2")] == [
        f"phase-2-{p}" for p in ("tasks", "rollout", "replay", "critic", "actor")
    ]
    assert found["phase-1-tasks"].critic is None and found["phase-2-tasks"].critic == "phase-1-critic"
    assert found["phase-2-rollout"].model == "phase-1-actor" and found["phase-2-actor"].init == "phase-1-actor"
    assert found["phase-1-critic"].init == "sft" and found["phase-1-critic"].resume is None
    assert found["phase-3-critic"].resume == "phase-2-critic"
    assert found["phase-3-replay"].earlier == ["demos", "first", "phase-1-rollout", "phase-2-rollout"]
    assert found["phase-eval"].models == ["sft", "phase-1-actor", "phase-2-actor", "phase-3-actor"]


def test_no_phase_draws_as_another_does() -> None:
    """phase-11-tasks and phase-20-tasks have letters of the same sum."""
    whole = recipe.load("webrl-tiny", ("stages.5.phases=20",))
    drawing = [stage for stage in whole.stages if isinstance(stage, WebTasks | WebReplay)]
    for kind in (WebTasks, WebReplay):
        assert len({draw_seed(whole, stage) for stage in drawing if isinstance(stage, kind)}) == 20
    # one whose sum is its own draws by it, as in the golden figures
    assert all(draw_seed(whole, s) == fold(whole.seed, sum(map(ord, s.name))) for s in drawing[:20])


def test_baselines_by_the_same_config() -> None:
    found = stages("webrl-tiny", "stages.5.method=filtered_bc", "stages.5.phases=2", "stages.6.model=phase-2-actor")
    assert not [n for n in found if n.endswith("critic")] and found["phase-2-actor"].critic is None
    for method in ("awr", "digirl", "released", "reinforce"):
        assert stages("webrl-tiny", f"stages.5.method={method}")["phase-1-actor"].method == method


def test_grpo_is_a_method_of_the_same_block() -> None:
    found = stages("webrl-tiny", "stages.5.method=grpo", "stages.5.samples=4", "stages.5.tasks=16", "stages.5.phases=3")
    assert [n for n in found if n.startswith("phase-2")] == ["phase-2-tasks", "phase-2-actor", "phase-2-rollout"]
    first, second = found["phase-1-actor"], found["phase-2-actor"]
    assert (
        first.kind == "rl"
        and first.env.data == "phase-1-tasks"
        and first.algorithm.kind == "grpo"
        and first.samples_per_prompt == 4
    )
    assert (
        first.init == "sft"
        and second.init == "phase-1-actor"
        and found["phase-2-tasks"].failures == ["first", "phase-1-rollout"]
    )
    with pytest.raises(ConfigError, match="samples"):
        stages("webrl-tiny", "stages.5.method=grpo", "stages.5.samples=1")


def test_arms_of_one_run_are_compared_in_one_table() -> None:
    found = stages("webrl-sites-1gpu")
    assert [n for n, stage in found.items() if stage.kind == "eval"] == ["eval", "ablations"]
    # known before the other arms begin
    assert found["eval"].models == ["sft", *(f"phase-{n}-actor" for n in (1, 2, 3, 4))]
    others = [f"{arm}-{n}-actor" for arm in ("no-replay", "no-kl", "paper") for n in (1, 2, 3, 4)]
    assert (
        found["ablations"].models == ["sft", "phase-4-actor", *others]
        and found["ablations"].n == found["eval"].n == 500
    )
    assert (found["phase-2-replay"].ratio, found["no-replay-2-replay"].ratio) == (2.0, 0.0)
    methods = [found[f"{arm}-2-actor"].method for arm in ("phase", "no-kl", "paper")]
    assert methods == ["released", "filtered_bc", "paper"] and "no-kl-2-critic" not in found
    assert found["no-kl-1-tasks"].failures == found["phase-1-tasks"].failures == ["first"]


def test_the_reward_model_is_measured_on_tasks_that_nothing_has_seen() -> None:
    found = stages("webrl-sites-1gpu")
    orm = found["orm"]
    base = found["orm-base"]
    # the same tasks are held out
    assert base.data == ["strayed"] and orm.init == "orm-base" and base.heldout_every == orm.heldout_every
    assert (
        orm.data == ["judged"]
        and found["judged"].env.data == "judged-tasks"
        and found["judged"].samples_per_prompt == 1
    )
    pool = pool_of(recipe.load("webrl-sites-1gpu").env)
    # as the stage draws them
    demos = set(random.Random("0 demos").sample([t.task.intent for t in pool], found["demos"].prompts))
    failed = [trajectory(t.task.task_id, t.task.intent) for t in pool if t.task.intent in demos][::3]
    tasks = mutate(failed, pool, demos, found["judged-tasks"].count, 0)
    tested = {t.task.intent for t in tasks if held_out(t.task.intent, orm.heldout_every)}
    assert len(tested) >= 500 and not tested & demos
    with pytest.raises(ConfigError, match=r"prompts.* must not be negative"):
        stages("webrl-sites-1gpu", "stages.8.prompts=-1.0")


def trajectory(task_id: str, intent: str) -> WebTrajectory:
    return WebTrajectory(task_id, intent, "map", (), 0.0, 0.0)


def test_a_resolved_recipe_is_read_back_unchanged(tmp_path) -> None:
    config = recipe.load("webrl-tiny")
    path = tmp_path / "config.yaml"
    path.write_text(schema.dump(config), encoding="utf-8")
    assert schema.load(recipe.Recipe, path) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.5.url=http://x", "orm"),
        ("stages.5.phases=0", "phases"),
        ("stages.5.first=nowhere", "nowhere"),
        ("stages.6.model=phase-4-actor", "phase-4-actor"),
    ],
)
def test_mistakes_are_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe.load("webrl-tiny", (override,))
