"""Gymnasium both ways: its own checker passes on our worlds, and its environments are played in text."""

import json
import shutil
from importlib.util import find_spec

import pytest

from terrella.tests.rl.exchange.extras import REQUIRED
from terrella.tests.sampling import sampled

if not REQUIRED:
    pytest.importorskip("gymnasium", reason="the extra worlds is not installed")
import gymnasium
from gymnasium.utils.env_checker import check_env

from terrella.core.errors import ConfigError
from terrella.launch.commands.check_env import settings_of
from terrella.rl.exchange.from_gymnasium import GymnasiumEnvironment
from terrella.rl.exchange.named_worlds import names
from terrella.rl.exchange.to_gymnasium import id_of

pytestmark = pytest.mark.integration  # of the environment with the extra worlds
NEEDS = {"WebMiniwob": ("miniwob", "playwright"), "web-page/": ("playwright",), "tabletop/": ("mujoco",)}


def checked(name: str) -> None:
    """Gymnasium's own checker on a world, as `gymnasium.make` gives it."""
    env = gymnasium.make(f"terrella.rl.exchange.to_gymnasium:{id_of(name)}", disable_env_checker=True)
    try:
        check_env(env.unwrapped)
    finally:
        env.close()


@pytest.mark.parametrize("name", sampled(names(), 8))
def test_its_checker_passes_on_every_world(name: str) -> None:
    missing = [p for start, packages in NEEDS.items() if name.startswith(start) for p in packages if not find_spec(p)]
    if name.startswith(("WebMiniwob", "web-page/")) and not (
        shutil.which("chromium") or shutil.which("chromium-browser")
    ):
        missing.append("chromium")
    if missing:
        (pytest.fail if REQUIRED else pytest.skip)(f"not installed: {', '.join(missing)}")
    checked(name)


def test_steps_words_and_snapshots() -> None:
    env = gymnasium.make("terrella.rl.exchange.to_gymnasium:terrella/SimpleSokoban-v0").unwrapped
    first, info = env.reset(seed=3)
    assert "Sokoban" in info["instruction"] and env.action_space.n == 4
    kept = json.loads(json.dumps(env.snapshot()))
    seen = [env.step(action)[:4] for action in (0, 1, "Left", 3)]
    assert env.restore(kept) == first
    assert [env.step(action)[:4] for action in (0, 1, 2, "right")] == seen


def played(env: GymnasiumEnvironment, task: dict, answers: list[str]) -> tuple[list[str], dict]:
    playing = env.play(task)
    prompts = [next(playing)]
    try:
        for answer in answers:
            prompts.append(playing.send(answer))
    except StopIteration as ended:
        return prompts, ended.value
    raise AssertionError(f"not over after {len(answers)} answers: {prompts[-1]}")


def test_cartpole_in_text_is_the_real_one() -> None:
    env = GymnasiumEnvironment("CartPole-v1", actions=["left", "right"], max_actions=12)
    prompts, score = played(env, {"seed": 5}, ["<think>to the</think>\nright"] * 4 + ["fly"] + ["LEFT."] * 7)
    real = gymnasium.make("CartPole-v1")
    real.reset(seed=5)
    steps = [real.step(1) for _ in range(4)] + [real.step(0) for _ in range(7)]
    assert score == {"reward": 11.0, "actions": 12, "not_an_action": 1 / 12, "ended": 0.0}
    assert json.loads(prompts[4].splitlines()[0]) == pytest.approx([float(f"{x:.4g}") for x in steps[3][0]])
    assert "left, right" in prompts[0] and "12 actions left" in prompts[0] and "'fly' is no action" in prompts[5]
    assert {env.baselines()["random"](prompt, {"seed": 5}) for prompt in prompts} == {"left", "right"}


def test_frozen_lake_is_drawn_and_boxes_are_lists() -> None:
    lake = GymnasiumEnvironment("FrozenLake-v1", render="ansi", settings={"is_slippery": False}, max_actions=9)
    prompts, score = played(lake, {"seed": 0}, list("112122"))
    assert "SFFF\nFHFH" in prompts[0] and "\x1b" not in prompts[0]
    assert score["reward"] == 1.0 and score["ended"] == 1.0
    pendulum = GymnasiumEnvironment("Pendulum-v1", max_actions=3)
    prompts, score = played(pendulum, {"seed": 0}, ["[0.5]", "[99]", "nothing"])
    assert score["not_an_action"] == pytest.approx(2 / 3) and "outside of Box" in prompts[2]
    assert pendulum.read(pendulum.baselines()["random"](prompts[0], {"seed": 0})).shape == (1,)


def test_settings_by_name_and_what_is_wrong_is_named() -> None:
    settings = settings_of("gymnasium:CartPole-v1", ["max_actions=7", "deadline_s=3"])
    assert settings.path == "terrella.rl.exchange.from_gymnasium:GymnasiumEnvironment"
    assert settings.args == {"id": "CartPole-v1", "max_actions": 7} and settings.deadline_s == 3.0
    with pytest.raises(ConfigError, match=r"env\.id is what kind names"):
        settings_of("gymnasium:CartPole-v1", ["id=other"])
    with pytest.raises(ConfigError, match="CartPole-v77"):
        GymnasiumEnvironment("CartPole-v77")
    with pytest.raises(ConfigError, match="2 different words"):
        GymnasiumEnvironment("CartPole-v1", actions=["left"])
