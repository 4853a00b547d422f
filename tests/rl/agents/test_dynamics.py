"""Learnt worlds: lessons say what truly followed, an imagined world that is told the truth is the true one, and a
recipe trains an agent in what its own stage learnt.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.agents.config import AgentSettings, WorldsEnvironment
from terrella.rl.agents.dynamics import LOST, ON, WON, answer, read
from terrella.rl.agents.episode import AgentEpisode
from terrella.rl.agents.rollout import Instance, Player, actions_taken, seats_of, world_finder
from terrella.rl.agents.selfplay import RandomPlayer
from terrella.rl.agents.tasks import WorldTasks
from terrella.rl.multiturn import Imagination
from terrella.rl.rollout.sampler import Sample, SamplingParams
from terrella.rl.worlds.tasks import load_tasks
from terrella.tests.sampling import in_turn, sampled

TASKS, TOKENIZER = load_tasks(), ByteTokenizer()
TAGS = ["SimpleSokoban", "FrozenLake", "OpenSokoban"]


def opened(tag: str, **settings) -> WorldTasks:
    return WorldTasks(WorldsEnvironment(kind="worlds", tags=[tag], **settings), None, TOKENIZER, None)


class Truth:
    """A world model that knows: a true world for every episode, stepped by the actions of the questions."""

    def __init__(self, tag: str, first_seed: int, lies: int = 0) -> None:
        self.tag, self.first_seed, self.lies, self.worlds = tag, first_seed, lies, {}

    def generate(self, requests):
        return [self.say(request) for request in requests]

    def say(self, request) -> Sample:
        _, number, sample, turn = request.key
        if turn == 0:
            world = self.worlds[number, sample] = TASKS[self.tag].make()
            world.reset(self.first_seed + number, sample)
        world, text = self.worlds[number, sample], TOKENIZER.decode(request.ids)
        state, actions = text.split("\nState:\n")[1].split("\nActions:\n")
        assert state == world.render()
        reward, mark = 0.0, ON
        for word in actions.split("\nWrite ")[0].split(" || ") if turn >= self.lies else ():
            result = world.step(world.parse_action(word))
            reward += result.reward
            if result.done:
                mark = WON if result.info["success"] else LOST
                break
        said = "I do not know" if turn < self.lies else answer(world.change(state, world.render()), reward, mark)
        ids = (*TOKENIZER.encode(said), TOKENIZER.eos_id)[: request.params.max_new_tokens]
        return Sample(ids, (0.0,) * len(ids), "stop", 0)


def played(tag: str, imagined: bool, lies: int = 0, count: int = 24):
    settings = AgentSettings(fmt="answer", max_turns=4, actions_per_turn=3)
    seats = seats_of([Instance(TASKS[tag], 500 + i) for i in range(count)], 2)
    for seat in seats:
        seat.imagined = imagined
    player = RandomPlayer(world_finder(seats), TOKENIZER, 2, "answer")
    found = Player(TOKENIZER, settings).play(player, seats, SamplingParams(4), 7, Imagination(Truth(tag, 500, lies)))
    return seats, found


@pytest.mark.parametrize("tag", TAGS)
def test_a_world_imagined_by_one_who_knows_it_is_the_true_one(tag: str) -> None:
    (true, real), (dreamt, imagined) = played(tag, False), played(tag, True)
    assert [t.reward for t in real] == pytest.approx([t.reward for t in imagined], abs=1e-5)
    assert [[*s.episode.states] for s in true] == [[*s.episode.states] for s in dreamt]
    assert [t.sequences for t in real] == [t.sequences for t in imagined]
    names = ("success", "turns", "penalty", "format_ok")
    assert [[t.info[n] for n in names] for t in real] == [[t.info[n] for n in names] for t in imagined]
    # nobody says at which action of a turn an imagined episode was over
    assert actions_taken(imagined, imagined=True) >= actions_taken(real) > 0 == actions_taken(imagined)
    assert sum(t.info["success"] for t in real) > 0


def test_some_ask_the_policy_while_others_ask_the_world_model() -> None:
    """An answer without an action asks nothing of the world model."""

    class Half(RandomPlayer):
        def generate(self, requests):
            ids = (*TOKENIZER.encode(" nothing </answer>"), TOKENIZER.eos_id)
            idle = Sample(ids, (0.0,) * len(ids), "stop", 0)
            return [idle if r.key[1] % 2 else a for r, a in zip(requests, super().generate(requests), strict=True)]

    tag, count = "SimpleSokoban", 6
    seats = seats_of([Instance(TASKS[tag], 500 + i) for i in range(count)], 1)
    for seat in seats:
        seat.imagined = True
    player = Half(world_finder(seats), TOKENIZER, 1, "answer")
    settings = AgentSettings(fmt="answer", max_turns=3, actions_per_turn=1)
    found = Player(TOKENIZER, settings).play(player, seats, SamplingParams(200), 7, Imagination(Truth(tag, 500)))
    assert [t.info["num_actions"] > 0 for t in found] == [True, False] * (count // 2)


def test_what_cannot_be_read_changes_nothing_and_is_counted() -> None:
    seats, found = played("SimpleSokoban", True, lies=1, count=4)
    assert all(seat.episode.states[0] == seat.episode.states[1] for seat in seats)
    assert all(0 < t.info["unreadable"] <= 1 for t in found)
    assert all(t.info["unreadable"] < 1 for t in found if t.info["turns"] > 1)


def test_a_fault_of_the_world_model_is_invalid() -> None:
    class Broken:
        def generate(self, requests):
            return [Invalid("out of order") for _ in requests]

    seats = seats_of([Instance(TASKS["SimpleSokoban"], 1, imagined=True)], 1)
    seats[0].imagined = True
    player = RandomPlayer(world_finder(seats), TOKENIZER, 1, "answer")
    alone = Player(TOKENIZER, AgentSettings(fmt="answer"))
    (found,) = alone.play(player, seats, SamplingParams(50), 0, Imagination(Broken()))
    assert isinstance(found.reward, Invalid) and "out of order" in found.reward.reason
    (found,) = alone.play(player, seats, SamplingParams(50), 0)
    assert isinstance(found.reward, Invalid) and "no world model to ask" in found.reward.reason


def test_a_world_that_breaks_on_what_was_imagined_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(world: object, before: str, written: str) -> str:
        raise LookupError("no such thing")

    monkeypatch.setattr(type(TASKS["SimpleSokoban"].make()), "changed", breaks)
    _, found = played("SimpleSokoban", True, count=2)
    assert all(isinstance(t.reward, Invalid) and "no such thing" in t.reward.reason for t in found)


@pytest.mark.parametrize(("tag", "config"), [*((tag, {}) for tag in TAGS), ("FeedFish", {"skill": 0.8})])
def test_lessons_say_what_truly_followed(tag: str, config: dict) -> None:
    shape = {"max_turns": 4, "actions_per_turn": 2, "random_actions": 2, "config": config}
    tasks = opened(tag, fmt="answer", teaches="transitions", **shape)
    episodes = [tasks.episode(tasks.of("train")[place], place, 0) for place in range(20)]
    found = tasks.play(tasks.player(episodes), episodes, tasks.params(100, 1.0), 0)
    marks = []
    for seat, trajectory in zip(episodes, found, strict=True):
        episode: AgentEpisode = seat.episode
        lessons = tasks.taught(seat, trajectory, 0.0)
        assert len(lessons) == len(episode.parsed)
        for turn, lesson in enumerate(lessons):
            pairs = list(zip(lesson.sequence.ids, lesson.sequence.roles, strict=True))
            asked = TOKENIZER.decode([i for i, role in pairs if role is Role.PROMPT])
            said = read(TOKENIZER.decode([i for i, role in pairs if role is Role.STATE]))
            made = episode.parsed[turn].actions[: episode.turns[turn].left]
            assert episode.states[turn] in asked and f"Actions:\n{' || '.join(made)}\n" in asked
            assert said and episode.world.changed(episode.states[turn], said[0]) == episode.states[turn + 1]
            assert tag != "FeedFish" or len(said[0]) < len(episode.states[turn + 1])  # what changes, not all
            assert said[1] == pytest.approx(episode.turns[turn].reward, abs=1e-5)
            marks.append(said[2])
            last = turn == len(lessons) - 1
            assert (said[2] == WON) == (last and episode.success)
    assert WON in marks and ON in marks


@pytest.mark.parametrize("said", ["", "a", "a\n", "a\n1", "a\nx+", "\n1+", "a\nnan+", "a\n1e9="])
def test_other_answers_are_no_answers(said: str) -> None:
    assert read(said) is None


def test_only_rl_trains_in_an_imagined_world() -> None:
    tasks = opened("SimpleSokoban", fmt="answer", imagined_by="world")
    assert not any(instance.imagined for instance in tasks.some(3))  # held-out tasks are true
    episodes = [tasks.episode(tasks.of("train")[0], 0, 0)]
    with pytest.raises(ConfigError, match="only RL trains in an imagined world"):
        tasks.play(tasks.player(episodes), episodes, tasks.params(10, 1.0), 0)


RECIPE = """
name: imagined
seed: 3
ranks: {ranks}
parallel: {{tensor: {tensor}}}
model: {{family: llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 64, vocab: 256,
  max_positions: {positions}, tied: true, init_std: 0.1}}
env: {{kind: worlds, tags: [{tag}], fmt: answer, prompt: bare, window: 1, max_turns: 2, actions_per_turn: 1,
  random_actions: 1}}
stages:
- {{kind: start, name: start}}
- {{kind: collect, name: selfplay, env: {{teaches: transitions, config: {config}}}, prompts: 40}}
- {{kind: sft, name: world, data: selfplay, init: start, steps: 30, sequences_per_step: 8,
  optimizer: {{lr: 1e-2, clip_grad: 1.0}}}}
- {{kind: collect, name: format, env: {{config: {config}}}, prompts: 40}}
- {{kind: sft, name: agent, data: format, init: world, steps: 30, sequences_per_step: 8,
  optimizer: {{lr: 1e-2, clip_grad: 1.0}}}}
- {{kind: rl, name: rl, init: agent, env: {{imagined_by: {world}}}, algorithm: {{kind: grpo}}, prompts_per_step: 2,
  samples_per_prompt: 4, steps: 2, max_new_tokens: 32, optimizer: {{lr: 1e-3}},
  validation: {{every: 2, prompts: 2, samples: 2}}}}
- {{kind: eval, name: evaluate, arms: [{{name: agent, model: rl}}], n: 4, max_new_tokens: 32}}
"""


NAMED = ("selfplay", "format", "evaluate")


def train(folder: Path, **settings) -> subprocess.CompletedProcess:
    usual = {"ranks": 1, "tensor": 1, "world": "world", "tag": "OpenSokoban", "positions": 64, "config": "{}"}
    (folder / "recipe.yaml").write_text(RECIPE.format(**usual | settings))
    command = [sys.executable, "-m", "terrella", "train", "recipe.yaml", "--run", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@in_turn("imagined")
@pytest.mark.parametrize(
    "settings",
    sampled([{"ranks": 2, "tensor": 2}, {"tag": "FeedFish", "positions": 256, "config": "{skill: 0.5}"}], 1),
    ids=["grid", "text-game"],
)
def test_a_recipe_trains_an_agent_in_its_own_imagination(tmp_path: Path, settings: dict) -> None:
    done = train(tmp_path, **settings)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "rl"]
    assert len(steps) == 2 and steps[-1]["actions"] == 0 < steps[-1]["imagined_actions"] <= 2 * 2 * 4 * 2
    assert "validation/pass@1" in steps[-1] and 0 <= steps[-1]["agent/unreadable"] <= 1
    assert -1 <= steps[-1]["validation/gap"] <= 1 and steps[-1]["exploited"] == 0
    # what the agent cost is what it and its world model learnt from
    kept = {name: json.loads((tmp_path / "run" / "stages" / f"{name}.json").read_text()) for name in NAMED}
    assert kept["evaluate"]["agent/actions"] == kept["selfplay"]["actions"] + kept["format"]["actions"]


def test_a_world_model_that_no_stage_trains_is_named(tmp_path: Path) -> None:
    done = train(tmp_path, world="nobody")
    assert done.returncode == 2 and "'rl' refers to 'nobody', which is no earlier stage" in done.stderr
