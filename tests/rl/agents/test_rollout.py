"""Seats and their episodes: masks of joined turns, bare prompts, pay for written states, perplexity, records."""

import math

import numpy as np
import pytest
import torch

from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.agents.config import AgentSettings
from terrella.rl.agents.evaluate import state_perplexity, summarise
from terrella.rl.agents.rollout import (
    Instance,
    Player,
    Seat,
    actions_taken,
    describe_agents,
    seats_of,
    turns_of,
    world_finder,
)
from terrella.rl.agents.selfplay import RandomPlayer
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.rl.worlds.tasks import load_tasks, rotation

TASKS, TOKENIZER = load_tasks(), ByteTokenizer()
PARAMS = SamplingParams(200)


def dealt(tags: dict[str, float], groups: int, samples: int) -> list[Seat]:
    turns = rotation(tags)
    return seats_of([Instance(TASKS[turns[i % len(turns)]], 123 + i) for i in range(groups)], samples)


def played(settings: AgentSettings, tags: dict[str, float], groups: int, samples: int = 2) -> tuple[list[Seat], list]:
    seats = dealt(tags, groups, samples)
    player = RandomPlayer(world_finder(seats), TOKENIZER, settings.actions_per_turn, settings.fmt)
    return seats, Player(TOKENIZER, settings).play(player, seats, PARAMS, 0)


@pytest.mark.parametrize("tag", ["SimpleSokoban", "Sudoku", "Countdown", "MetamathQA", "WebShop", "Bandit"])
@pytest.mark.parametrize("window", [0, 1])
def test_masks_of_whole_episodes_are_what_was_sampled(tag: str, window: int) -> None:
    settings = AgentSettings(fmt="state", max_turns=3, actions_per_turn=1, window=window)
    seats, trajectories = played(settings, {tag: 1.0}, 2)
    for seat, trajectory in zip(seats, trajectories, strict=True):
        turns = [turn.answer for turn in seat.episode.turns if turn.answer]
        assert len(trajectory.sequences) == (1 if window == 0 else len(turns))
        sampled = [
            i for s in trajectory.sequences for i, role in zip(s.ids, s.roles, strict=True) if role == Role.ACTION
        ]
        assert sampled == [i for answer in turns for i in answer]


def test_no_text_is_encoded_twice_in_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str) -> list[int]:
        encoded.append(text)
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    settings = AgentSettings(fmt="think", max_turns=3, actions_per_turn=1)
    seats = dealt({"SimpleSokoban": 1.0}, 2, 4)
    player = RandomPlayer(world_finder(seats), TOKENIZER, 1, "think")
    Player(TOKENIZER, settings).play(player, seats, PARAMS, 0)
    asked = [text for text in encoded if "Turn " in text]
    assert len(asked) == len(set(asked)) > 2


def test_a_bare_prompt_is_the_state_alone() -> None:
    seats, trajectories = played(
        AgentSettings(fmt="think", prompt="bare", window=1, max_turns=2, actions_per_turn=1), {"OpenSokoban": 1.0}, 1
    )
    for sequence, state in zip(trajectories[0].sequences, seats[0].episode.states, strict=False):
        asked = [i for i, role in zip(sequence.ids, sequence.roles, strict=True) if role == Role.PROMPT]
        assert TOKENIZER.decode(asked) == f"{state}\n<think>"


def test_written_states_are_paid_for_but_not_shown_as_the_worlds_reward() -> None:
    class Seer:
        def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
            out = []
            for request in requests:
                seen = find(request.key).render("text_with_coordinates")
                text = (
                    f" <observation>\n{seen}\n</observation> x <prediction>\nnowhere\n</prediction> </think> "
                    "<answer> Up </answer>"
                )
                ids = (*TOKENIZER.encode(text), TOKENIZER.eos_id)
                out.append(Sample(ids, (0.0,) * len(ids), "stop", 0))
            return out

    settings = AgentSettings(
        fmt="state", coordinates=True, max_turns=2, actions_per_turn=1, observation_reward=0.5, prediction_reward=0.25
    )
    seats = dealt({"SimpleSokoban": 1.0}, 1, 1)
    find = world_finder(seats)
    (paid,) = Player(TOKENIZER, settings).play(Seer(), seats, PARAMS, 0)
    assert paid.turn_rewards == pytest.approx([0.4, 0.4]) and paid.info["bonus"] == pytest.approx(1.0)
    assert "Reward:\n-0.1\n" in TOKENIZER.decode(paid.sequences[0].ids)
    with pytest.raises(ValueError, match="observation_reward"):
        AgentSettings(fmt="think", observation_reward=0.5)


def test_perplexity_counts_the_states_tokens_and_nothing_else() -> None:
    def uniform(batches: list) -> list:
        return [torch.full(b.tokens_T.shape, -math.log(7.0)) for b in batches]

    def pound(batches: list) -> list:  # sure of walls, at a loss before anything else
        return [torch.where(b.targets_T == TOKENIZER.encode("#")[0], 0.0, -2.0) for b in batches]

    instances, settings = [Instance(TASKS["SimpleSokoban"], seed) for seed in range(123, 126)], AgentSettings()
    for alone in (False, True):
        found = state_perplexity(uniform, instances, TOKENIZER, settings, coordinates=True, alone=alone)
        assert found == pytest.approx(7.0)
        text = "".join(deal_state(seed) for seed in range(123, 126))
        expected = math.exp(2.0 * (1 - text.count("#") / len(TOKENIZER.encode(text))))
        assert state_perplexity(pound, instances, TOKENIZER, settings, coordinates=False, alone=alone) == pytest.approx(
            expected
        )
    assert math.isnan(
        state_perplexity(uniform, [Instance(TASKS["Countdown"], 0)], TOKENIZER, settings, coordinates=True, alone=True)
    )


def deal_state(seed: int) -> str:
    return TASKS["SimpleSokoban"].make().reset(seed)


def test_records_leave_faults_out() -> None:
    seats, trajectories = played(
        AgentSettings(fmt="think", actions_per_turn=3), {"SimpleSokoban": 1, "FrozenLake": 1}, 4
    )
    trajectories[0].reward = Invalid("broken")
    trajectories[0].info["unreadable"], trajectories[1].info["unreadable"] = 0.0, 1.0
    values = describe_agents(trajectories, lambda value: [value])
    assert values["agent/num_actions"] == pytest.approx(np.mean([t.info["num_actions"] for t in trajectories[1:]]))
    assert values["agent/unreadable"] == 1.0
    assert {"agent/success/SimpleSokoban", "agent/success/FrozenLake"} <= set(values)
    assert actions_taken(trajectories) == sum(t.info["num_actions"] for t in trajectories[1:])
    shown = turns_of(seats[1])[0]
    episode = seats[1].episode
    assert shown["context"] == TOKENIZER.decode(
        episode.context_of([]), keep_special=True
    )  # rules, state and template as the model read them
    assert episode.states[0] in shown["context"] and shown["boards"][0].count("\n") == 5
    # nothing was foretold, so nothing is held against it
    assert shown["answer"] == episode.parsed[0].response and "truth" not in shown
    scores = summarise(trajectories)
    assert scores.invalid == 1 and [n for _, n in scores.wins] == [1, 2, 2, 2] and scores.passes(2).n == 3
