"""The small tokenizers round-trip, refuse what they cannot spell, and agree with transformers about every id."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    PieceTokenizer,
    load_tokenizer,
)

ALPHABET = "#.@$ \n<>eospad|0123é"


@given(st.text(alphabet=ALPHABET))
def test_char_round_trip(text):
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and all(3 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_byte_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_character_is_named():
    with pytest.raises(ValueError, match="character 'Z' at position 2"):
        CharTokenizer("abc").encode("abZ")
    with pytest.raises(ValueError, match="'\U0001f600'"):
        CharTokenizer("abc").encode("a\U0001f600")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        CharTokenizer("abc").decode([99])


def test_specials_are_hidden_unless_kept():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.decode([1, 3, 4, 2, 0]) == "ab"
    assert tokenizer.decode([1, 3, 4, 2], keep_special=True) == "<bos>ab<eos>"


@pytest.mark.parametrize("make", [lambda: CharTokenizer(ALPHABET), ByteTokenizer], ids=["char", "byte"])
def test_transformers_loads_the_folder_and_agrees(make, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = make()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(theirs) == ours.vocab_size
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (ours.pad_id, ours.bos_id, ours.eos_id)
    for text in ["", "#..@$\n", "  eos  pad ", "<eos>", "a<pad>d"[1:], "é0é", "\n\n"]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text), text
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    again = load_tokenizer(tmp_path)
    assert type(again) is type(ours) and again.encode("0é<") == ours.encode("0é<")


def test_joined_texts_encode_at_once():
    tokenizer = CharTokenizer("abc")
    rows = ["abc", "cba", "aaa"]
    assert np.array_equal(tokenizer.encode_array("".join(rows)).reshape(3, 3), [tokenizer.encode(r) for r in rows])


def test_bpe_learns_templates_and_reads_back(tmp_path):
    texts = [f"{{'name': 'cup (ID: {i})', 'isOpen': {bool(i % 2)}}}" for i in range(40)]
    tokenizer = BPETokenizer.train(texts, 300)
    assert tokenizer.vocab_size <= 300 and (tokenizer.pad_id, tokenizer.eos_id) == (0, 2)
    for text in (*texts[:3], "düne <eos> 12345\n\n", "\x00\x7f"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not set(ids) & {0, 1, 2}
    assert len(tokenizer.encode(texts[12])) < len(texts[12]) / 4 and len(tokenizer.encode("1234")) == 4
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, BPETokenizer) and again.encode(texts[5]) == tokenizer.encode(texts[5])
    assert BPETokenizer.train(texts, 300).encode(texts[7]) == tokenizer.encode(texts[7])
    with pytest.raises(ValueError, match="vocab_size"):
        BPETokenizer.train(texts, 100)


def test_bpe_spells_a_name_alike_wherever_it_stands(tmp_path):
    texts = [
        (
            f"{{'name': 'cup (ID: {i})', 'in': ['cup (ID: {i})', 'tea bag (ID: 12)']}}\nput tea bag (ID: 12) in cup "
            f"(ID: "
            f"{i})"
        )
        for i in range(9)
    ]
    tokenizer = BPETokenizer.train(texts, 340, r"(?:tea bag|cup) \(ID: \d+\)")
    tokenizer.save(tmp_path)
    for reader in (tokenizer, load_tokenizer(tmp_path)):
        ids = reader.encode(texts[3])
        assert reader.decode(ids) == texts[3] and len(reader.encode("17")) == 2
        name = reader.encode("tea bag (ID: 12)")
        assert sum(ids[i : i + len(name)] == name for i in range(len(ids))) == 2 and len(name) <= 2


def test_given_pieces_are_taken_whole_and_their_hugging_face_twin_agrees(tmp_path: Path) -> None:
    tokenizer = PieceTokenizer(["<answer>", " </answer>", "Up", "(1,2)", "(1", *"(),12 U#√\n"])
    text = "<answer>Up (1,2)(1,1)#√\n </answer>"
    ids = tokenizer.encode(text)
    assert len(ids) == 12 and tokenizer.decode([1, *ids, 2]) == text
    tokenizer.save(tmp_path)
    assert HFTokenizer(tmp_path).encode(text) == ids and load_tokenizer(tmp_path).encode(text) == ids
    nested = PieceTokenizer(
        ["ab", "abcd", "a", "b", "c", "d", "bcd|", "|"]
    )  # the longest that fits, and back where a longer one breaks off
    assert [nested.decode([i]) for i in nested.encode("abcabcdab|bcd|")] == ["ab", "c", "abcd", "ab", "|", "bcd|"]
    with pytest.raises(ValueError, match="character 'x' at position 2"):
        tokenizer.encode("Upx")
    with pytest.raises(ValueError, match="repeat"):
        PieceTokenizer(["a", "a"])


def test_what_ends_an_answer_comes_from_the_folder(tmp_path):
    pytest.importorskip("transformers")
    ByteTokenizer().save(tmp_path / "one")
    (tmp_path / "one" / "terrella_tokenizer.json").unlink()  # as a folder of somebody else's
    assert ByteTokenizer().stop_ids == (2,) and load_tokenizer(tmp_path / "one").stop_ids == (2,)
    settings = {"eos_token_id": [9, 2, 11], "temperature": 0.6}
    (tmp_path / "one" / "generation_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path / "one")
    assert loaded.stop_ids == (2, 9, 11)
    loaded.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").stop_ids == (2, 9, 11)
    assert json.loads((tmp_path / "kept" / "generation_config.json").read_text()) == settings
    (tmp_path / "one" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path / "one").stop_ids == (2, 7)
    (tmp_path / "one" / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: eos_token_id must be a token id or a list of them"
    ):
        load_tokenizer(tmp_path / "one")
