"""OpenEnv both ways: its own client plays our worlds with seeds and snapshots, and its servers are played by our
verbs.
"""

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("openenv.core.env_server", reason="the extra openenv is not installed")
from openenv.cli._validation import validate_running_environment  # `openenv validate --url`
from openenv.core import GenericEnvClient

from terrella.core.errors import ConfigError
from terrella.rl.exchange.common import text_of
from terrella.rl.exchange.from_openenv import OpenEnvEnvironment, _drawn
from terrella.rl.exchange.named_worlds import Play, find_world

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The addresses of three servers."""
    code = [sys.executable, "-m", "terrella.tests.rl.exchange.openenv_worlds"]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        start = threading.Timer(PATIENCE_S, process.kill)  # of its start: the line would be waited for without end
        start.start()
        addresses = json.loads(process.stdout.readline())
        start.cancel()
        yield addresses
        process.kill()


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("limits", [{}, {"minimum": 10}, {"maximum": -3}, {"minimum": 4, "maximum": 5}])
def test_random_play_stays_within_the_limits_that_a_schema_names(kind: str, limits: dict[str, int]) -> None:
    value = _drawn(kind, limits, random.Random(0))
    assert limits.get("minimum", -99) <= value <= limits.get("maximum", 99)


def test_its_validator_passes(servers: dict[str, str]) -> None:
    report = validate_running_environment(servers["sokoban"], timeout_s=60.0)
    assert (
        report["passed"]
        and report["summary"]["failed_criteria"] == []
        and report["summary"]["required_total_count"] > 0
    )


def test_its_client_plays_our_world_with_seeds_and_snapshots(servers: dict[str, str]) -> None:
    native = Play(find_world("SimpleSokoban"))
    with (
        GenericEnvClient(base_url=servers["sokoban"]).sync() as one,
        GenericEnvClient(base_url=servers["sokoban"]).sync() as other,
    ):
        first = one.reset(seed=11)
        assert first.observation["text"] == native.reset(11).text
        assert "Sokoban" in first.observation["instruction"] and first.observation["actions"] == native.words
        for word in ("Up", "nonsense", "Left"):
            step, true = one.step({"text": word}), native.step(word)
            assert (step.observation["text"], step.reward, step.done) == (true.text, true.reward, true.done)
            assert step.observation["info"] == true.info
        state = one.state()
        assert state["world"] == "SimpleSokoban" and state["step_count"] == 3 and state["seed"] == 11
        back = other.reset(snapshot=state["snapshot"])  # another connection's world goes on from there
        assert back.observation["text"] == native.last.text
        assert other.step({"text": "Down"}).observation == one.step({"text": "Down"}).observation


def test_an_environment_behind_an_address_is_played_in_text(servers: dict[str, str]) -> None:
    world = OpenEnvEnvironment(servers["sokoban"], max_actions=4)
    assert world.words == ["Up", "Down", "Left", "Right"] and world.field == "text"
    native, playing = Play(find_world("SimpleSokoban")), world.play({"seed": 3})
    assert native.reset(3).text in next(playing)
    total = 0.0
    with pytest.raises(StopIteration) as ended:
        for word in ("Up", "Left", "Down", "Right"):
            total += native.step(word).reward
            assert native.last.text in playing.send(word)
    assert ended.value.value["reward"] == pytest.approx(total)


def test_fields_and_numbers(servers: dict[str, str]) -> None:
    adder = OpenEnvEnvironment(servers["adder"])
    assert adder.field is None and adder.read('I say {"a": 1, "b": 3}.') == {"a": 1, "b": 3}
    with pytest.raises(ValueError, match="a, b"):
        adder.read('{"c": 1}')
    playing = adder.play({"seed": 4})
    assert '{"goal": 4' in next(playing)
    with pytest.raises(StopIteration) as ended:
        playing.send('{"a": 1, "b": 3}')
    assert ended.value.value["reward"] == 1.0
    counter = OpenEnvEnvironment(servers["counter"], observation="goal")
    assert counter.field == "number" and counter.read("my guess:\n7") == {"number": 7}
    assert set(adder.read(adder.random_answer(random.Random(0)))) == {"a", "b"}


def test_a_server_that_is_not_there_and_errors_of_it_are_named(servers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is the server running"):
        OpenEnvEnvironment("http://127.0.0.1:9", wait_s=2.0)
    with pytest.raises(ConfigError, match="openenv:http"):
        OpenEnvEnvironment("localhost")
    counter = OpenEnvEnvironment(servers["counter"], observation="goal")
    playing = counter.play({"seed": 1})
    next(playing)
    with pytest.raises(RuntimeError, match="error"):
        playing.send('"one"')


def test_what_is_too_large_for_a_prompt_is_a_fault() -> None:
    with pytest.raises(ValueError, match="200,000 characters"):
        text_of("x" * 200_000)
