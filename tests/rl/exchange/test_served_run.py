"""From a recipe to a world that others play: the model of a run is served over OpenEnv, and so is the true world; one
client plays both, and the drift that the served model reports is the one that the client sees.
"""

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("openenv.core.env_server", reason="the extra openenv is not installed")
from openenv.core import GenericEnvClient

from terrella.rl.exchange.named_worlds import Play, find_world
from terrella.rl.web_pages.data import load_transitions
from terrella.rl.web_pages.tree import items_f1

pytestmark = [pytest.mark.full, pytest.mark.timeout(7000)]
PATIENCE_S, SEED, STEPS = 600.0, 0, 6
SMALL = """
name: {world}
ranks: 1
model: {{family: llama, layers: 1, hidden: 64, heads: 2, kv_heads: 2, head_dim: 32, ffn: 128, vocab: 768,
  max_positions: 512, tied: true, init_std: 0.05}}
env: {{kind: {world}, data: data, pad_prompts_to: 8, {env}}}
stages:
- {{kind: collect, name: data}}
- kind: sft
  name: sft
  steps: 60
  sequences_per_step: 16
  prompt_weight: 1.0
  optimizer: {{lr: 4e-3, clip_grad: 1.0}}
- kind: rl
  name: rlvr
  init: sft
  algorithm: {{kind: grpo}}
  prompts_per_step: 2
  samples_per_prompt: 2
  steps: 2
  max_new_tokens: 48
  optimizer: {{lr: 1e-4, clip_grad: 1.0}}
- {{kind: export, name: export, model: rlvr}}
"""
OWN = {
    "web-page": "unseen_pages: [pages/filter]",
    "text-game": "games: [weigh-stones], seeds: 4, heldout_per_verb: 5",
}


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, list[str]]]:
    """The address of `terrella worlds serve`, and the lines that it prints meanwhile."""
    command = [sys.executable, "-u", "-m", "terrella", "worlds", "serve", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        late = threading.Timer(PATIENCE_S, process.kill)  # the first line would be waited for without end
        late.start()
        first = process.stdout.readline()
        late.cancel()
        printed: list[str] = []
        reading = threading.Thread(target=lambda out=process.stdout: printed.extend(map(str.strip, out)))
        reading.start()
        try:
            yield first.split(" at ")[1].split()[0], printed
        finally:
            process.terminate()
            process.wait(60)
            reading.join(60)


def actions_of(world: str) -> list[str]:
    """What is played: the recorded actions of a page's start, or actions that the true game understands."""
    if world.startswith("web-page/"):
        return [step.action for step in load_transitions()[:STEPS]]  # of the first page, whose seed is 0
    play, rng, chosen = Play(find_world(world)), random.Random(0), []
    play.reset(SEED)
    for _ in range(STEPS):
        chosen.append(play.random_action(rng))
        play.step(chosen[-1])
    return chosen


@pytest.mark.parametrize("world", ["web-page/todo", "text-game/weigh-stones"])
def test_a_trained_model_is_played_beside_the_true_world(world: str, tmp_path: Path) -> None:
    kind = world.partition("/")[0]
    if kind == "web-page" and not (shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("chromium is not installed; make system-deps")
    recipe, run = tmp_path / "small.yaml", tmp_path / "run"
    recipe.write_text(SMALL.format(world=kind, env=OWN[kind]))
    trained = subprocess.run(
        [sys.executable, "-m", "terrella", "train", str(recipe), "--run", str(run)],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert trained.returncode == 0, trained.stdout[-2000:] + trained.stderr[-2000:]
    imagining = [str(run), "--of", world, "--pad-prompts-to", "8", "--max-new-tokens", "48"]
    told = []
    with serving(*imagining) as (model, printed), serving(world) as (truth, silent):
        client = {"message_timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S}
        with (
            GenericEnvClient(base_url=model, **client).sync() as imagined,
            GenericEnvClient(base_url=truth, **client).sync() as true,
        ):
            starts = imagined.reset(seed=SEED).observation, true.reset(seed=SEED).observation
            assert starts[0] == starts[1]  # the same interface, and a true start
            for action in actions_of(world):
                kept = imagined.state()["snapshot"]
                one, other = imagined.step({"text": action}), true.step({"text": action})
                assert set(one.observation) == set(other.observation)
                told.append(one.observation["info"])
                assert told[-1]["true_reward"] == other.reward
                if kind == "web-page":
                    f1 = items_f1(one.observation["text"], other.observation["text"])
                    assert told[-1]["items_f1"] == pytest.approx(f1) and (f1 == 1.0) == (told[-1]["exact"] == 1.0)
                if one.observation["text"] == other.observation["text"]:
                    assert told[-1]["exact"] == 1.0
            back = imagined.reset(snapshot=kept)
            assert imagined.step({"text": action}).observation["text"] == one.observation["text"] != "", back
    assert silent == []
    exact = [info["exact"] for info in told]
    first = exact.index(0.0) if 0.0 in exact else len(exact)
    assert [info["exact_steps"] for info in told] == [float(min(k, first)) for k in range(1, len(told) + 1)]
    said = [
        f"step {k}: {'exact' if info['exact'] else 'drifted'}, exact for the first {int(info['exact_steps'])}"
        for k, info in enumerate(told, 1)
    ]
    assert printed == [*said, said[-1]]  # the last step was played again, from the snapshot
    print(*printed, *(f"items_f1 {info['items_f1']:.3f}" for info in told if "items_f1" in info), sep="\n")
