"""Many clients of one server: every episode is the one that was asked for, none is lost and none is crossed."""

import asyncio
import json
import random

import pytest

pytest.importorskip("openenv.core.env_server", reason="the extra openenv is not installed")

from terrella.rl.exchange.named_worlds import Play, find_world
from terrella.tests.rl.exchange.test_openenv import servers

__all__ = ["servers"]  # a fixture
WORDS, CLIENTS = ("Up", "Down", "Left", "Right"), 64


async def client(url: str, seeds: list[int], actions: int) -> dict[int, list[str]]:
    """The texts of one client's episodes, one after the other on one connection."""
    from websockets.asyncio.client import connect

    seen: dict[int, list[str]] = {}
    async with connect(f"ws{url.removeprefix('http')}/ws", open_timeout=120, ping_interval=None) as wire:
        for seed in seeds:
            rng, texts = random.Random(seed), []
            asked = [{"type": "reset", "data": {"seed": seed % 50}}]
            asked += [{"type": "step", "data": {"text": rng.choice(WORDS)}} for _ in range(actions)]
            for message in asked:
                await wire.send(json.dumps(message))
                reply = json.loads(await asyncio.wait_for(wire.recv(), 120))
                assert reply["type"] == "observation", reply
                texts.append(reply["data"]["observation"]["text"])
                if reply["data"]["done"]:
                    break
            seen[seed] = texts
    return seen


def native(play: Play, seed: int, actions: int) -> list[str]:
    rng = random.Random(seed)
    texts = [play.reset(seed % 50).text]
    for _ in range(actions):
        if not play.last.done:
            texts.append(play.step(rng.choice(WORDS)).text)
    return texts


def soak(url: str, episodes: int, actions: int) -> int:
    """Play episodes by 64 clients at once and hold each against the world played here; how many steps that were."""

    async def everyone() -> list[dict[int, list[str]]]:
        return await asyncio.gather(*(client(url, list(range(i, episodes, CLIENTS)), actions) for i in range(CLIENTS)))

    seen = {seed: texts for part in asyncio.run(everyone()) for seed, texts in part.items()}
    assert sorted(seen) == list(range(episodes))
    play = Play(find_world("SimpleSokoban"))
    assert [seed for seed in range(episodes) if seen[seed] != native(play, seed, actions)] == []
    steps = sum(len(texts) - 1 for texts in seen.values())
    print(f"{len(seen)} episodes by {CLIENTS} clients, {steps} steps: none lost, none crossed")
    return steps


def test_64_clients_at_once(servers: dict[str, str]) -> None:
    assert soak(servers["sokoban"], 2 * CLIENTS, 3) > 3 * CLIENTS


@pytest.mark.full
def test_ten_thousand_episodes(servers: dict[str, str]) -> None:
    assert soak(servers["sokoban"], 10_000, 3) > 25_000
