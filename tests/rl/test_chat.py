"""The first prompt of a conversation, by the chat template of a model's folder."""

import json
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import MARK, ByteTokenizer, HFTokenizer
from terrella.models.stand_in import write_byte_tokenizer
from terrella.rl.chat import first_prompt
from terrella.rl.language import prompt_ids

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
