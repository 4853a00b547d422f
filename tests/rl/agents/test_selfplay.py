"""Self-play data: every state span is the world's, masks follow roles, the ablations differ only in the states."""

import re

import pytest

from terrella.data.tokenizers import ByteTokenizer, HFTokenizer
from terrella.data.trajectory import Role
from terrella.rl.agents.episode import AgentEpisode, AgentSettings
from terrella.rl.agents.format import parse
from terrella.rl.agents.selfplay import RandomPlayer, encode_spans, lessons, tagged_share, written_response
from terrella.rl.chat import PLAIN
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import SamplingParams
from terrella.rl.tasks import held_out
from terrella.rl.worlds.tasks import load_tasks
from terrella.tests.rl.worlds.parsed import parse_sokoban

TASKS, TOKENIZER = load_tasks(), ByteTokenizer()
SETTINGS = AgentSettings(fmt="state", coordinates=True)


def played(tag: str, seeds: range) -> list[AgentEpisode]:
    episodes = [AgentEpisode(TASKS[tag], seed, i, 0, TOKENIZER, PLAIN, SETTINGS) for i, seed in enumerate(seeds)]
    rollout(RandomPlayer(lambda key: episodes[key[1]].world, TOKENIZER), episodes, SamplingParams(100), 0)
    return episodes


@pytest.mark.parametrize("tag", ["SimpleSokoban", "Sokoban2Boxes", "FrozenLake"])
def test_every_span_equals_the_state_of_the_world(tag: str) -> None:
    episodes = played(tag, range(10_000, 10_012))
    assert tagged_share(episodes) == 1.0
    for episode in episodes:
        twin = TASKS[tag].make()
        twin.reset(episode.seed, episode.sample_index)
        found = lessons(episode)
        assert len(found) == len(episode.parsed) > 0
        left = 10
        for lesson in found:
            parsed = parse(lesson.text, "state", 5)
            assert parsed.ok and parsed.observation == twin.render("text_with_coordinates")
            for word in parsed.actions[:left]:
                left -= 1
                if twin.step(twin.parse_action(word)).done:
                    break
            assert parsed.prediction == twin.render("text_with_coordinates")
            states = [
                i for i, role in zip(lesson.sequence.ids, lesson.sequence.roles, strict=True) if role is Role.STATE
            ]
            assert TOKENIZER.decode(states) == parsed.observation + parsed.prediction
            learnt = [
                i for i, role in zip(lesson.sequence.ids, lesson.sequence.roles, strict=True) if role is not Role.PROMPT
            ]
            assert "<think>" + TOKENIZER.decode(learnt) == lesson.text and learnt[-1] == TOKENIZER.eos_id


def test_later_contexts_hold_the_corrected_answers() -> None:
    episode = next(e for e in played("SimpleSokoban", range(10_000, 10_030)) if len(e.parsed) > 1)
    first, second = lessons(episode)[:2]
    assert second.sequence.ids[: len(first.sequence.ids)] == first.sequence.ids


def test_variants_differ_in_the_states_alone() -> None:
    episode = played("SimpleSokoban", range(10_000, 10_001))[0]
    texts = {v: written_response(episode, 0, v) for v in ("truth", "belief", "masked", "blanked", "random_coordinates")}
    stripped = {re.sub(r"(?s)<(observation|prediction)>.*?</\1>", "", text) for text in texts.values()}
    assert len(stripped) == 1 and len(set(texts.values())) == 4  # the random player believes nothing, as if masked
    masked = lessons(episode, "masked")[0]
    assert Role.STATE not in masked.sequence.roles and "#" not in masked.text
    scattered = parse(texts["random_coordinates"], "state", 5).observation
    assert scattered.split("\nPlayer")[0] == parse_sokoban(episode.states[0])
    blanked, taught = lessons(episode, "blanked")[0], lessons(episode, "blanked", learn_blanks=True)[0]
    assert (
        blanked.sequence.ids == taught.sequence.ids
        and len(blanked.text) == len(lessons(episode)[0].text)
        and "#" not in blanked.text
    )
    assert Role.STATE not in blanked.sequence.roles and Role.STATE in taught.sequence.roles
    with pytest.raises(ValueError, match="variant"):
        lessons(episode, "other")


def test_the_split_is_by_trajectory_and_the_filter_drops_untagged_turns() -> None:
    episodes = played("SimpleSokoban", range(10_000, 10_030))
    for episode in episodes:
        assert len({lesson.held_out for lesson in lessons(episode)}) == 1
    assert 0.1 < sum(held_out(f"{s}/0", 0.2) for s in range(2000)) / 2000 < 0.3
    episode = episodes[0]
    episode.parsed[0] = parse("<think> nothing </think> <answer> Up </answer>", "state", 5)
    assert len(lessons(episode)) == len(episode.parsed) - 1 and len(lessons(episode, only_tagged=False)) == len(
        episode.parsed
    )


def test_spans_of_a_byte_tokenizer_and_of_its_hugging_face_twin(tmp_path) -> None:
    ids, inside = encode_spans(TOKENIZER, "ab√cd", [(2, 3)])
    assert TOKENIZER.decode(ids) == "ab√cd" and inside == [False, False, True, True, True, False, False]
    TOKENIZER.save(tmp_path)
    assert encode_spans(HFTokenizer(tmp_path), "ab√cd", [(2, 3)]) == (ids, inside)


def test_random_play_depends_on_the_key_alone() -> None:
    one, two = played("SimpleSokoban", range(10_000, 10_004)), played("SimpleSokoban", range(10_000, 10_004))
    assert [e.states for e in one] == [e.states for e in two]
