"""verifiers both ways: its own validator and evaluation loop take our worlds, and its tasksets are played by our
verbs.
"""

import importlib
import json
import os
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")

from terrella.core.errors import ConfigError
from terrella.data.trajectory import Invalid
from terrella.rl.environment import End
from terrella.rl.exchange import to_verifiers
from terrella.rl.exchange.from_verifiers import VerifiersEnvironment
from terrella.rl.exchange.text_play import WorldInText
from terrella.rl.hosted import Host
from terrella.tests.rl.exchange.scripted_model import served

HERE = Path(__file__).parent
WORDS = ("Up", "Down", "Left", "Right")


def word(messages: list[dict[str, str]]) -> str:
    """An action that depends on what was said last alone, so that a play can be repeated here."""
    return random.Random(messages[-1]["content"]).choice(WORDS)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs one of its commands in this process and in an empty folder, with our worlds under the name that an
    installed package has.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "terrella_worlds", to_verifiers)

    def run(module: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [module])
        importlib.import_module(f"verifiers.v1.cli.{module}").main(["terrella-worlds", *words, "--no-rich"])

    return run


@pytest.mark.parametrize("world", ["SimpleSokoban", "text-game/brew-tea"])
def test_its_validator_passes(world: str, command, tmp_path: Path) -> None:
    command("validate", "-n", "4", "--taskset.world", world, "--runtime.type", "subprocess")
    (file,) = tmp_path.glob("outputs/*/summary.json")
    assert json.loads(file.read_text())["outcomes"] == {
        "valid": 4,
        "invalid": 0,
        "error": 0,
        "timeout": 0,
        "missing": 0,
    }


def evaluated(command, folder: Path, answer) -> list[dict]:
    """What its evaluation loop wrote down about eight episodes with the model that `answer` is."""
    with served(answer) as url:
        client = ["--client.base-url", url, "--client.api-key-var", "NO_KEY"]
        command("eval.main", "-n", "4", "-r", "2", "-m", "scripted", "--no-serve", "--no-push", *client)
    (file,) = folder.glob("outputs/*/traces.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_its_evaluation_loop_plays_our_world_with_a_model_that_is_busy_at_times(command, tmp_path: Path) -> None:
    refused: list[str] = []

    def busy(messages: list[dict[str, str]]) -> str | int:
        # the first two requests of each start: what a connection that takes longer than verifiers waits looks like
        if len(messages) == 1 and refused.count(messages[0]["content"]) < 2:
            refused.append(messages[0]["content"])
            return 504
        return word(messages)

    episodes = evaluated(command, tmp_path, busy)
    assert len(episodes) == 8 and len(refused) == 8  # of four starts, two each
    assert [trace["errors"] for episode in episodes if not episode["ok"] for trace in episode["traces"]] == []
    assert all(episode["ok"] for episode in episodes)
    for episode in episodes:
        score = played(WorldInText("SimpleSokoban"), {"seed": episode["task"]["data"]["seed"]})
        (trace,) = episode["traces"]
        assert trace["rewards"]["world_reward"]["score"] == pytest.approx(score.pop("reward"))
        assert trace["metrics"] == pytest.approx(score)


def test_a_model_that_is_gone_is_an_error_of_the_episode_and_no_score(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_verifiers, "RETRIES", 0)
    episodes = evaluated(command, tmp_path, lambda messages: 503)
    assert len(episodes) == 8 and not any(episode["ok"] for episode in episodes)
    assert all("busy" in trace["errors"][-1]["message"] for episode in episodes for trace in episode["traces"])


def played(env, task) -> dict[str, float]:
    playing = env.play(task)
    said = next(playing)
    try:
        while True:
            text = said if isinstance(said, str) else said[-1]["content"]
            said = playing.send(word([{"content": text}]))
    except StopIteration as ended:
        return ended.value


def test_a_taskset_with_many_turns_is_the_world_it_wraps() -> None:
    env = VerifiersEnvironment(
        "terrella-worlds", train_tasks=3, test_tasks=2, settings={"world": "SimpleSokoban", "first_seed": 5}
    )
    assert env.tasks("train") == [0, 1, 2] and env.tasks("test") == [3, 4]
    for task in (0, 3):
        assert played(env, task) == pytest.approx(played(WorldInText("SimpleSokoban"), {"seed": 5 + task}))
    abandoned = [env.play(0) for _ in range(40)]  # more at once than a pool of threads has
    assert len({tuple(message["content"] for message in next(playing)) for playing in abandoned}) == 1
    for playing in abandoned:
        playing.close()
    assert set(env.baselines()["random"]("one two", 0).split()) <= {"one", "two"}


def test_a_question_with_a_system_prompt_and_faults_are_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE)]))
    importlib.invalidate_caches()
    args = {"id": "small-taskset", "train_tasks": 16, "test_tasks": 4}
    host = Host("terrella.rl.exchange.from_verifiers:VerifiersEnvironment", Path(), 5.0, args)
    try:
        assert host.tasks("train") == list(range(16))
        asked = host.start_many([(0, 3), (1, 4), (2, 13), (3, 14)])
        assert asked[0] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Twice 3?"}]
        right, wrong, raised, hung = host.answer_many([(0, "6"), (1, "6"), (2, "26"), (3, "28")])
        assert isinstance(right, End) and right.reward == 1.0 and wrong.reward == 0.0
        assert isinstance(raised.reward, Invalid) and "the judge is away" in raised.reward.reason
        assert isinstance(hung.reward, Invalid) and "5 s" in hung.reward.reason
    finally:
        host.close()


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="verifiers:no-such-taskset"):
        VerifiersEnvironment("no-such-taskset")
