"""The recipe's sampler settings are checked before anything starts, and every algorithm can be named in a recipe."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from terrella.core.errors import ConfigError
from terrella.core.mesh import Mesh
from terrella.core.schema import build, differences, parse_yaml
from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid, Role, TokenSequence, Trajectory
from terrella.launch import recipe
from terrella.launch.commands.check_recipe import alone
from terrella.launch.recipe_warnings import find_warnings
from terrella.launch.settings.verbs import Reinforce
from terrella.launch.stages.on_policy import StageTrainer, picture
from terrella.launch.stages.session import Session
from terrella.rl.agents.config import WorldsEnvironment
from terrella.rl.agents.tasks import WorldTasks
from terrella.rl.algorithms.config import MODULES
from terrella.rl.health import Health
from terrella.rl.journal import Journal
from terrella.rl.rollout.config import Rollouts
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams

STAGE = """
kind: rl
name: rlvr
init: pretrain
max_new_tokens: 8
prompts_per_step: 8
samples_per_prompt: 4
steps: 2
optimizer: {lr: 1e-4}
"""


def stage(more: str) -> Reinforce:
    return build(Reinforce, parse_yaml(STAGE + more, "recipe"))


# which tests/rl/test_own_algorithm.py names
@pytest.mark.parametrize("kind", [kind for kind in MODULES if kind != "path"])
def test_every_algorithm_has_a_name_in_recipes(kind: str) -> None:
    critic = "critic: {lr: 1e-3}" if kind in ("ppo", "starpo-s") else ""
    assert stage(f"algorithm: {{kind: '{kind}'}}\n{critic}").algorithm.kind == kind


def test_vllm_servers_in_a_recipe() -> None:
    made = stage(
        "algorithm: {kind: grpo, tis_cap: 2.0}\nrollouts: {sampler: {kind: vllm, devices: ['1', '2']}, ahead: 1}"
    )
    assert made.rollouts.sampler.kind == "vllm" and made.rollouts.ahead == 1
    assert stage("algorithm: {kind: grpo}").rollouts == Rollouts()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("algorithm: {kind: grpo}\nrollouts: {ahead: -1}", "ahead"),
        ("algorithm: {kind: grpo, tis_cap: 0.5, tis_beyond: mask}", "above 1"),
        ("algorithm: {kind: grpo}\nrollouts: {sampler: {kind: vlm}}", "did you mean 'vllm'"),
        ("algorithm: {kind: dapo, overlong_length: 10}", "overlong_cache"),
        ("algorithm: {kind: grpo, tis_cap: 0}", "tis_cap"),
        ("algorithm: {kind: ppo}", "critic: algorithm ppo trains one; give its optimizer"),
        (
            "algorithm: {kind: grpo}\ncritic: {lr: 1e-3}",
            r"recipe:11: critic: algorithm grpo trains none; .*critic: null",
        ),
    ],
)
def test_mistakes_are_named(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage(more)


def test_a_deadline_of_rollouts_acts_or_is_warned_of() -> None:
    """With `ahead` alone; what earlier releases wrote into every run is no setting, and runs of theirs go on."""
    told = {
        ahead: recipe.load("sokoban-tiny", [f"stages.rlvr.rollouts={{deadline_s: 60, ahead: {ahead}}}"])
        for ahead in (0, 1)
    }
    ((where, text),) = find_warnings(told[0])
    assert where == "stages.rlvr.rollouts.deadline_s" and "set ahead to 1" in text and [*find_warnings(told[1])] == []
    assert stage("algorithm: {kind: grpo}\nrollouts: {ahead: 1, deadline_s: 60}").rollouts.step_s == 60
    old = stage("algorithm: {kind: grpo}\nrollouts: {deadline_s: 3600.0}").rollouts
    assert old.step_s == Rollouts().step_s == 3600
    assert differences({"deadline_s": 3600.0, "ahead": 0}, Rollouts()) == []
    assert differences({"deadline_s": 3600.0, "ahead": 1}, Rollouts(ahead=1, deadline_s=60)) != []


def test_seeds_that_are_trained_on_and_held_out_are_warned_of() -> None:
    """The evaluation has 384 rooms from 123 on. Rooms of other tags are others."""

    def told(env: str) -> list[tuple[str, str]]:
        return [*find_warnings(recipe.load("spa-sokoban-tiny", [f"stages.vanilla.env={env}"]))]

    ((where, text),) = told("{first_seed: 506}")
    assert where == "stages.vanilla.env.first_seed"
    assert "plays the seeds 506 to 506, which are held out in stage 'evaluate'" in text
    assert told("{first_seed: 507}") == told("{first_seed: 0, tags: [FrozenLake]}") == []
    ((where, text),) = told("{first_seed: 0, tags: [FrozenLake, OpenSokoban]}")
    assert "plays the seeds 123 to 506" in text


def test_a_picture_tells_faults_from_rewards() -> None:
    trajectories = [Trajectory(7, 0, [], Invalid("broken")), Trajectory(7, 1, [], 0.5)]
    shown = picture(3, ["a", "b"], trajectories, lambda episode: [{"prompt": episode}])
    assert [(row["sample"], row["reward"], row["invalid"]) for row in shown] == [(0, None, "broken"), (1, 0.5, None)]
    assert shown[1]["turns"] == [{"prompt": "b"}] and {row["step"] for row in shown} == {3}


def test_what_alarms_watch_of_answers_leaves_faults_out(tmp_path: Path) -> None:
    """An episode that broke half-way says as little of the length of answers as of their reward."""
    session = object.__new__(Session)
    session.job, session.health, session.journal = SimpleNamespace(mesh=Mesh()), Health(), Journal(tmp_path)
    said = {n: TokenSequence(tuple(range(n + 1)), (Role.PROMPT,) + (Role.ACTION,) * n) for n in (2, 8)}
    steps = [Trajectory(0, 0, [said[2]], 1.0), Trajectory(0, 1, [said[8]], Invalid("world step: broken"))]
    values = session.observe(0, {}, steps, limit=8)
    assert (values["length/mean"], values["truncated"]) == (2.0, 0.0)


def test_refills_count_in_what_an_arm_cost() -> None:
    """A step's own episodes and those that were sampled in the place of groups without a signal: both acted."""
    trainer = object.__new__(StageTrainer)  # what `measure` reads, without weights
    trainer.stage, trainer.mesh, trainer.counts = stage("algorithm: {kind: dapo, refills: 1}"), Mesh(), {"actions": 0}
    settings = build(WorldsEnvironment, parse_yaml("{kind: worlds, tags: [OpenSokoban]}", "env"))
    trainer.tasks = WorldTasks(settings, None, ByteTokenizer(), None)
    info = dict.fromkeys(("success", "action_is_effective", "format_ok", "response_tokens", "bonus"), 0.0)
    own, refill = (
        [Trajectory(p, 0, [], 0.0, [], {**info, "tag": "OpenSokoban", "num_actions": n}) for p in range(2)]
        for n in (3, 4)
    )
    trainer.refilled = []
    assert trainer.measure(0, own)["actions"] == 6
    trainer.refilled = refill
    assert trainer.measure(1, own)["actions"] == 6 + 6 + 8


@pytest.mark.parametrize("streamed", [True, False])
def test_a_session_on_fewer_ranks_forgets_what_the_others_sampled_beyond_the_checkpoint(
    tmp_path: Path, streamed: bool
) -> None:
    """Two data ranks sampled by versions 2 and 3; one goes on from version 2. Only a stream's later weights will be
    others, and what both trained beyond the checkpoint is as if it had not happened.
    """
    config = recipe.load("sokoban-tiny")
    job, folder = alone(config, tmp_path), tmp_path / "stages" / "rlvr" / "journal"
    for rank in range(2):
        journal = Journal(folder, rank)
        for version in (2, 3):
            request = SampleRequest((1, 2), (0, rank, 0, version), SamplingParams(1))
            journal.add([request], [Sample((5,), (-1.0,), "stop", version)])
            journal.note("trained", version, [rank])
    settings = Rollouts(replay=str(folder), independent=streamed)
    Session(job, "rlvr", SimpleNamespace(steps=2), settings, start=3, extra={})  # type: ignore[arg-type]
    kept = {(key[1], sample.weight_version) for (key, _), sample in Journal(folder).samples().items()}
    assert kept == ({(0, 2), (1, 2)} if streamed else {(0, 2), (1, 2), (0, 3), (1, 3)})
    assert {(event["step"], *event["prompts"]) for event in Journal(folder).events()} == {(2, 0), (2, 1)}


def test_the_answers_of_several_turns_are_watched_one_by_one(tmp_path: Path) -> None:
    """A context that goes on makes one sequence of them; none of these was cut off at four tokens."""
    config = recipe.load("sokoban-tiny")
    folder = tmp_path / "journal"
    folder.mkdir()
    session = Session(alone(config, tmp_path), "rlvr", SimpleNamespace(steps=0), Rollouts(replay=str(folder)), 0, {})  # type: ignore[arg-type]
    turn = [Role.OBSERVATION] * 2 + [Role.ACTION] * 3
    talk = TokenSequence(tuple(range(17)), (Role.PROMPT, Role.PROMPT, *turn * 3))
    values = session.observe(0, {}, [Trajectory(0, 0, [talk], 1.0)], limit=4)
    assert (values["length/mean"], values["truncated"]) == (3.0, 0.0)
