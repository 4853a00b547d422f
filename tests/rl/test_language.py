"""Single-turn questions: pairs to questions and sequences, episodes judged on sampled ids, faults kept apart."""

import pytest

from terrella.data.convert.text_game import is_gold, pair_of
from terrella.data.tokenizers import ByteTokenizer, HFTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.language import AnswerEpisode, answers, prompt_ids, read_pair, readable
from terrella.rl.rewards.web_page import NOTHING
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.rl.text_games.crawl import GAMES, bare_prompt, crawl, prompts

TOKENIZER = ByteTokenizer()
PARAMS = SamplingParams(max_new_tokens=4000, stop_ids=(2,))


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(crawl(GAMES["weigh-stones"], range(1)))


class Scripted:
    """A sampler that says given texts, or fails."""

    def __init__(self, texts: list[str | Invalid]) -> None:
        self.texts = texts

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        found: list[Sample | Invalid] = []
        for request in requests:
            text = self.texts[request.key[1]]
            if isinstance(text, Invalid):
                found.append(text)
                continue
            ids = (*TOKENIZER.encode(text), TOKENIZER.eos_id)
            found.append(Sample(ids, (-0.5,) * len(ids), "stop", 0))
        return found


@pytest.mark.parametrize("style", [bare_prompt, prompts()])
def test_a_pair_becomes_a_question(rows: list[dict], style) -> None:
    for row in rows[::29]:
        question = read_pair(pair_of(row, style, "train"))
        assert question.domain == "text-game" and question.prompt == style(row) and question.gold == is_gold(row)
        assert question.judge(question.answer, "binary", "strict") == (1.0, "")
        reward, reason = question.judge("rubbish", "task_specific", "strict")
        assert reward == 0.0 and reason
    with pytest.raises(ValueError, match="f1"):
        question.judge("", "f1", "strict")


def test_web_pairs() -> None:
    extra = {"extra.json": {"schema": "world_pair/1"}, "prompt.json": [{"role": "user", "content": "?"}]}
    same, other = (
        read_pair({**extra, "target.json": t}) for t in (NOTHING, NOTHING.replace("None", "[1] link 'a'", 1))
    )
    assert (same.domain, same.gold, other.gold) == ("web-page", False, True)
    assert other.judge(other.answer, "f1", "strict") == (1.0, "") and other.judge(NOTHING, "f1", "strict")[0] == 0.0


def test_episodes_train_on_sampled_ids(rows: list[dict]) -> None:
    question = read_pair(pair_of(rows[-1], bare_prompt, "train"))
    assert question.gold
    texts: list[str | Invalid] = [
        question.answer,
        "The final answer is: {'modified': [], 'removed': []}",
        "hm",
        Invalid("gone"),
    ]
    made = {"kind": "task_specific", "mode": "strict", "multiple": 32}
    episodes = [AnswerEpisode(question, i, 0, TOKENIZER, **made) for i in range(4)]
    done = rollout(Scripted(texts), episodes, PARAMS, seed=0)
    assert done[0].reward == pytest.approx(1.3) and 0 < done[1].reward < 0.3 and done[2].reward == 0.0
    assert done[2].info["reason"] and not done[0].info["reason"] and done[3].reward == Invalid("gone")
    sampled = done[0].sequences[0]
    actions = [i for i, r in zip(sampled.ids, sampled.roles, strict=True) if r == Role.ACTION]
    assert actions == [*TOKENIZER.encode(question.answer), TOKENIZER.eos_id]
    assert answers(Scripted(texts), [question] * 4, TOKENIZER, PARAMS, 0, chunk=4) == texts


def test_ids_beyond_the_tokenizer_are_a_wrong_answer_and_no_fault(rows: list[dict]) -> None:
    question = read_pair(pair_of(rows[0], bare_prompt, "train"))
    episode = AnswerEpisode(question, 0, 0, TOKENIZER, kind="binary", mode="strict")
    episode.receive(Sample((*TOKENIZER.encode("{"), 400, 999, *TOKENIZER.encode("}")), (-1.0,) * 4, "length", 0))
    assert episode.response == "{\ufffd}" and episode.score()[1] == 0.0
    assert readable(TOKENIZER, TOKENIZER.encode(question.answer)) == question.answer


def test_public_rows_for_imitation() -> None:
    ask = [{"role": "user", "content": "state and action"}]
    simulated = {
        "prompt.json": ask,
        "target.json": "So the answer. The final answer is: {}",
        "extra.json": {"source": "llm_simulator"},
    }
    question = read_pair(simulated)
    assert (question.domain, question.lesson, question.gold) == ("text-game", simulated["target.json"], True)
    with pytest.raises(ValueError, match="nothing can be judged"):
        question.judge("x", "binary", "strict")
    page = {
        "prompt.json": ask,
        "target.json": NOTHING,
        "extra.json": {"source": "web_agent", "answer": f"Nothing moves.\n{NOTHING}"},
    }
    question = read_pair(page)
    assert question.lesson.startswith("Nothing moves.") and question.answer == NOTHING
    assert question.judge(question.answer, "f1", "strict")[0] == 1


def test_a_chat_template_makes_the_prompt_a_turn(tmp_path) -> None:
    TOKENIZER.save(tmp_path)
    template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}{{ ' [it]' if add_generation_prompt }}"
    )
    plain = HFTokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = HFTokenizer(tmp_path)
    assert prompt_ids(plain, "hm") == tuple(plain.encode("hm"))
    assert prompt_ids(chat, "hm") == tuple(plain.encode("[user] hm [it]"))
