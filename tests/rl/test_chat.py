"""The first prompt of a conversation, by the chat template of a model's folder."""

import json
from pathlib import Path

import pytest

from terrella.core.by_path import OwnFile
from terrella.core.errors import ConfigError
from terrella.data.tokenizers import MARK, ByteTokenizer, HFTokenizer
from terrella.models.stand_in import write_byte_tokenizer
from terrella.rl.agents.dynamics import question
from terrella.rl.agents.episode import AgentEpisode
from terrella.rl.chat import PLAIN, chat_of, first_ids, first_prompt, turns_of
from terrella.rl.conversation import Conversation, Conversations
from terrella.rl.language import prompt_ids
from terrella.rl.own.config import DataEnvironment
from terrella.rl.own.tasks import DataTasks
from terrella.rl.rollout.sampler import Sample
from terrella.rl.worlds.tasks import load_tasks

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
# as DeepSeek-R1-Distill-Qwen has it: it writes the first token itself, opens the thought, and drops thoughts of earlier
# answers
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{% else %}"
    "{{ '<Assistant>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
# as Mistral-7B-Instruct-v0.2 has it: no system turn
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}


def tokenizer_with(folder: Path, template: str) -> HFTokenizer:
    ByteTokenizer().save(folder)
    (folder / MARK).unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return HFTokenizer(folder)


def test_a_prompt_is_written_by_the_folders_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML)
    opened = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert first_prompt(tokenizer, "2+2?") == opened
    assert first_prompt(tokenizer, [SYSTEM, USER]) == f"<|im_start|>system\nBe brief.<|im_end|>\n{opened}"
    assert first_prompt(ByteTokenizer(), "2+2?") == "2+2?"
    assert first_prompt(ByteTokenizer(), [SYSTEM, USER]) == "System:\nBe brief.\nUser:\n2+2?\nAgent:\n"


def test_a_template_that_begins_and_opens_a_thought_itself_is_followed_once(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": DEEPSEEK, "bos_token": "<|im_start|>"})
    )
    tokenizer = HFTokenizer(tmp_path)
    prompt = first_prompt(tokenizer, "2+2?")
    assert prompt == f"{tokenizer.hf.bos_token}<User>2+2?<Assistant><think>\n"
    ids = prompt_ids(tokenizer, "2+2?")
    assert (
        ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1 and tokenizer.decode(ids).endswith("<think>\n")
    )


def test_a_chat_that_a_template_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "gemma", GEMMA)
    assert first_prompt(tokenizer, [USER]).endswith("assistant\n")
    with pytest.raises(
        ConfigError, match=r"gemma: its chat template refuses a chat of system, user: System role not supported"
    ):
        first_prompt(tokenizer, [SYSTEM, USER])


def base_folder(folder: Path) -> HFTokenizer:
    """A folder as base models of Llama have it: no chat template, and a post-processor that begins texts with BOS."""
    from tokenizers import Tokenizer, processors

    ByteTokenizer().save(folder)
    (folder / MARK).unlink()
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast.save(str(folder / "tokenizer.json"))
    return HFTokenizer(folder)


def test_a_base_model_reads_what_its_own_folder_encodes(tmp_path: Path) -> None:
    base, plain = base_folder(tmp_path / "base"), tokenizer_with(tmp_path / "plain", "")
    assert base.adds_bos and not plain.adds_bos and base.bos_id == 1
    own = base.hf.encode("2+2?")
    assert own == [1, *base.encode("2+2?")]
    assert first_ids(base, "2+2?") == own and prompt_ids(base, "2+2?") == tuple(own)
    assert prompt_ids(base, "2+2?", 8) == (0, 0, 0, *own)
    assert first_ids(base, [SYSTEM, USER]) == base.hf.encode("System:\nBe brief.\nUser:\n2+2?\nAgent:\n")
    assert first_ids(plain, "2+2?") == plain.hf.encode("2+2?") == plain.encode("2+2?")
    (tmp_path / "base" / "chat_template.jinja").write_text(CHATML)
    chat = HFTokenizer(tmp_path / "base")  # a template says itself what a chat begins with
    assert chat.adds_bos and first_ids(chat, "2+2?") == chat.encode(first_prompt(chat, "2+2?"))


def test_lessons_rollouts_and_agents_begin_alike(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "answer": "4"}) + "\n")
    tasks = DataTasks(DataEnvironment("data", train=OwnFile(tmp_path / "rows.jsonl")), None, base, None)
    ((lesson,),) = tasks.lessons(tasks.of("train"), "sft")
    asked = tasks.conversations.context(Conversation(None, 0, 0, ["2+2?"]))
    assert asked == tuple(base.hf.encode("2+2?")) and lesson.ids == (*asked, *base.encode("4"), base.eos_id)
    answered = Conversation(None, 0, 0, ["2+2?", "Sure?"], turns=[(asked, Sample((60, 2), (0.0, 0.0), "stop", 0))])
    assert tasks.conversations.context(answered) == (*asked, 60, 2, *base.encode("\nUser:\nSure?\nAgent:\n"))
    episode = AgentEpisode(load_tasks()["SimpleSokoban"], 123, 0, 0, base, PLAIN)
    for ids in (episode.context(), question(episode, episode.states[0], ["Up"])):
        assert ids is not None and ids[0] == 1 and ids.count(1) == 1


def test_turns_are_those_of_the_whole_chat(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML)
    chat = chat_of(tokenizer)
    assert turns_of(tokenizer) == (chat.agent, chat.next_user)
    assert turns_of(ByteTokenizer()) == (PLAIN.agent, PLAIN.next_user)


def test_several_turns_with_a_template_that_has_no_system_turn(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings = {"chat_template": MISTRAL, "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    tokenizer = HFTokenizer(tmp_path)
    assert turns_of(tokenizer) == (" [/INST]", "<|im_end|>[INST] ")
    talk = Conversations(Nothing(), tokenizer)
    begin = talk.context(Conversation(None, 0, 0, ["2+2?"]))
    said = (*tokenizer.encode("4"), tokenizer.eos_id)
    again = talk.context(
        Conversation(None, 0, 0, ["2+2?", "Sure?"], turns=[(begin, Sample(said, (0.0,) * 2, "stop", 0))])
    )
    whole = [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    assert tokenizer.decode(again, keep_special=True) == tokenizer.hf.apply_chat_template(whole, tokenize=False)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}: its chat template refuses a chat of system, user: .*alternate"
    ):
        chat_of(tokenizer)


class Nothing:
    """A table that nobody plays at."""

    def start_many(self, asked: object, max_invalid: float) -> list:
        return []

    def answer_many(self, answers: object, max_invalid: float) -> list:
        return []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('one question only') }}", "refuses a chat of user: one question only"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "must show user, assistant messages once each"),
    ],
)
def test_a_template_without_turns_is_named(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}: its chat.template {said}"):
        turns_of(tokenizer_with(tmp_path, template))
