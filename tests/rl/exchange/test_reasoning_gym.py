"""Questions of Reasoning Gym: its own judge scores, and nothing that is trained on is evaluated on."""

import pytest

from terrella.core.errors import ConfigError
from terrella.rl.exchange.from_reasoning_gym import ReasoningGymEnvironment
from terrella.tests.rl.exchange.extras import REQUIRED

if not REQUIRED:
    pytest.importorskip("reasoning_gym", reason="the extra worlds is not installed")
pytestmark = pytest.mark.integration  # of the environment with the extra worlds


def scored(env: ReasoningGymEnvironment, task: int, answer: str) -> float:
    playing = env.play(task)
    next(playing)
    with pytest.raises(StopIteration) as ended:
        playing.send(answer)
    return ended.value.value


@pytest.mark.parametrize("name", ["leg_counting", "chain_sum", "spell_backward"])
def test_right_answers_score_one_and_splits_share_no_question(name: str) -> None:
    env = ReasoningGymEnvironment(name, train_tasks=16, test_tasks=8)
    questions = {split: {next(env.play(task)) for task in env.tasks(split)} for split in ("train", "test")}
    assert questions["test"] and not questions["train"] & questions["test"]
    task = env.tasks("test")[0]
    right = env.demonstration(task)
    assert right and scored(env, task, right) == scored(env, task, f"I think: <answer>{right}</answer>") == 1.0
    assert scored(env, task, "no idea") < 1.0


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ConfigError, match="reasoning-gym:no_such_task"):
        ReasoningGymEnvironment("no_such_task")
