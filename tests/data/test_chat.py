"""Chat templates are known by what they write; roles cover exactly the answers; joint and split tokenisation are compared."""

import json

import pytest

from terrella.core.errors import ConfigError
from terrella.data.chat import encode_chat, load_chat_tokenizer, split_tokens, template_name
from terrella.data.tokenizers import CharTokenizer, HFTokenizer
from terrella.data.trajectory import Role

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace("m['content'] +", "(m['content'] if loop.last else '') +")


def tokenizer_with(folder, template, merges=()):
    """A byte-level tokenizer, with merges if wanted, and a chat template."""
    pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*letters, *(a + b for a, b in merges)])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>")])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return HFTokenizer(folder)


CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def parts(tokenizer, sequence):
    """Text of each stretch of one role."""
    found = []
    for i, r in zip(sequence.ids, sequence.roles):
        if found and found[-1][0] == r:
            found[-1][1].append(i)
        else:
            found.append((r, [i]))
    return [(r.name, tokenizer.decode(ids, keep_special=True)) for r, ids in found]


GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_a_chat_that_a_template_refuses_is_named(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "gemma", GEMMA)
    with pytest.raises(ConfigError, match=r"gemma: its chat template refuses a chat of system, user: System role not supported"):
        encode_chat(tokenizer, [{"role": "system", "content": "be brief"}, *CHAT[:2]])


def test_templates_are_known_by_what_they_write(tmp_path):
    # the folders' names lie
    assert template_name(tokenizer_with(tmp_path / "llama-3-8b", CHATML)) == "chatml"
    assert template_name(tokenizer_with(tmp_path / "qwen", LLAMA3)) == "llama3"
    assert template_name(tokenizer_with(tmp_path / "x", "{{ messages[0]['content'] }}")) == "other"
    assert template_name(tokenizer_with(tmp_path / "chatml", None)) is None
    with pytest.raises(ConfigError, match="no chat template"):
        load_chat_tokenizer(tmp_path / "chatml")


def test_roles_cover_the_answers(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "t", CHATML)
    sequence, joint = encode_chat(tokenizer, CHAT)
    assert joint
    assert parts(tokenizer, sequence) == [
        ("PROMPT", "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"),
        ("ACTION", "two<|im_end|>"),
        ("OBSERVATION", "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"),
        ("ACTION", "four<|im_end|>"),
        ("OBSERVATION", "\n"),
    ]
    whole = tokenizer.hf.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(sequence.ids, keep_special=True) == whole
    sequence, _ = encode_chat(tokenizer, [CHAT[0], {**CHAT[1], "learn": False}, *CHAT[2:]])
    assert [text for role, text in parts(tokenizer, sequence) if role == "ACTION"] == ["four<|im_end|>"]
    sequence, _ = encode_chat(tokenizer_with(tmp_path / "l", LLAMA3), CHAT[:2])
    assert sequence.roles.count(Role.ACTION) == len("two") + 1


def test_a_template_that_rewrites_history_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        encode_chat(tokenizer_with(tmp_path / "t", FORGETFUL), CHAT)
    with pytest.raises(ConfigError, match="end with the assistant's answer"):
        encode_chat(tokenizer_with(tmp_path / "u", CHATML), CHAT[:3])


def test_joint_and_split_are_compared(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "t", None, merges=[("a", "b")])
    assert split_tokens(tokenizer, "xa", "cd").joint
    apart = split_tokens(tokenizer, "xa", "bc")
    assert not apart.joint and tokenizer.decode(apart.prompt) == "xa" and tokenizer.decode(apart.answer) == "bc"
    chat = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "bc"}]
    sequence, joint = encode_chat(tokenizer, chat)
    assert not joint and tokenizer.decode(sequence.ids) == "xabc"


def test_small_tokenizers_have_no_template():
    tokenizer = CharTokenizer("abc>")
    sequence, joint = encode_chat(tokenizer, [{"role": "user", "content": "ab>"}, {"role": "assistant", "content": "c"}])
    assert joint and sequence.ids == (3, 4, 6, 5, tokenizer.eos_id)
    assert sequence.roles == (Role.PROMPT,) * 3 + (Role.ACTION,) * 2
