"""The contract every world keeps: determinism, snapshot round trip, Invalid on fault, numbers in info, no global
randomness.
"""

import json
import random

import numpy as np
import pytest

from terrella.core.errors import ConfigError
from terrella.data.trajectory import Invalid
from terrella.rl.worlds.base import StepResult, World, attempt, next_seed
from terrella.rl.worlds.tasks import WORLDS, load_tasks
from terrella.rl.worlds.web.world import WebWorld
from terrella.rl.worlds.webshop import WebShop

TASKS = {
    name: task for name, task in load_tasks().items() if task.config.get("backend") != "chromium"
}  # those: tests/integration/test_web.py


def propose(world: World, rng: random.Random) -> int | str:
    """An action that a policy might choose here, sometimes a senseless one."""
    if world.action_words:
        return rng.choice(sorted(world.action_words))
    if isinstance(world, WebShop):
        clicks = world.clickables()
        return f"click[{rng.choice(clicks)}]" if clicks else "search[noise cancelling headphones]"
    if isinstance(world, WebWorld):
        element = rng.choice(sorted(world.elements))
        return (
            f'do(action="Click", element="{element}")' if world.config.observation == "html" else f"click [{element}]"
        )
    if world.name == "sudoku":
        return ",".join(str(rng.randint(0, 5)) for _ in range(3))
    return str(rng.randint(1, 30))


def episode(world: World, seed: int, length: int = 12) -> list[StepResult]:
    rng, results = random.Random(seed), []
    world.reset(seed, sample=3)
    for _ in range(length):
        results.append(world.step(propose(world, rng)))
        if results[-1].done:
            break
    return results


@pytest.mark.parametrize("tag", TASKS)
def test_random_actions_are_actions(tag: str) -> None:
    world = TASKS[tag].make()
    for seed in range(3):
        world.reset(seed)
        for step in range(4):
            word = world.random_action(random.Random(step))
            assert word == world.random_action(random.Random(step)) and world.parse_action(word) is not None
            assert not isinstance(world, WebWorld) or world.parse(word).kind != "none"
            if world.step(world.parse_action(word)).done:
                break


def test_every_world_has_a_tag() -> None:
    assert {task.world for task in TASKS.values()} == set(WORLDS)


@pytest.mark.parametrize("tag", TASKS)
def test_same_seed_same_episode_and_no_global_randomness(tag: str) -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    one = [episode(TASKS[tag].make(), seed) for seed in range(6)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(6)
    again = TASKS[tag].make()
    assert [episode(again, seed) for seed in range(6)] == one
    starts = {TASKS[tag].make().reset(seed) for seed in range(12)}
    assert len(starts) > (1 if TASKS[tag].world == "bandit" else 8)
    for result in (r for results in one for r in results):
        assert {"success", "action_is_effective", "action_is_valid"} <= set(result.info)
        assert all(isinstance(float(v), float) for v in result.info.values()) and isinstance(result.reward, float)


@pytest.mark.parametrize("tag", TASKS)
def test_snapshot_round_trip_in_another_instance(tag: str) -> None:
    for seed in range(5):
        world, twin, rng = TASKS[tag].make(), TASKS[tag].make(), random.Random(seed)
        world.reset(seed, sample=1)
        for _ in range(seed):
            if world.step(propose(world, rng)).done:
                world.reset(seed + 100, sample=2)
        saved = json.loads(json.dumps(world.snapshot()))
        twin.reset(seed + 7)
        twin.restore(saved)
        assert (
            all(twin.render(mode) == world.render(mode) for mode in world.render_modes)
            and twin.snapshot() == world.snapshot()
        )
        for _ in range(8):
            action = propose(world, rng)
            result = world.step(action)
            assert twin.step(action) == result
            if result.done:
                break
        world.restore(saved)
        assert world.snapshot() == saved


@pytest.mark.parametrize("tag", TASKS)
def test_a_fault_is_invalid_and_not_a_reward(tag: str) -> None:
    world = TASKS[tag].make()
    for fault in (attempt(world.step, 1), attempt(world.render), attempt(world.snapshot)):
        assert isinstance(fault, Invalid) and "before reset" in fault.reason
    assert isinstance(
        attempt(world.restore, {"world": "another", "codes": [], "rows": [], "board": [], "position": -1}), Invalid
    )
    world.reset(0)
    bad_mode = attempt(world.render, "rgb_array")
    assert isinstance(bad_mode, Invalid) and "render mode" in bad_mode.reason
    if world.action_words:
        assert isinstance(attempt(world.step, 99), Invalid)
    assert attempt(world.render) == world.render()


def test_files_that_are_missing_or_broken_are_named(tmp_path) -> None:
    broken = tmp_path / "qa.jsonl"
    broken.write_text('{"query": "1+1?", "response": "The answer is: 2"}\n{"query": "x"}\n')
    with pytest.raises(ConfigError, match=r"qa\.jsonl:2"):
        WORLDS["qa"](file=str(broken))
    with pytest.raises(ValueError, match=r"folder: .* has no items_shuffle_1000\.json"):
        WebShop(folder=str(tmp_path / "none"))


def test_next_seed_is_stable() -> None:
    assert [next_seed(1), next_seed(2)] == [120362236, 327731190]
