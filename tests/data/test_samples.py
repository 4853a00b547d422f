"""Token sequences and video tokens go into shards and come back."""

import numpy as np
import pytest

from terrella.data.errors import ShardError
from terrella.data.samples import token_fields, token_sequence, video_token_layout
from terrella.data.schema import KINDS, TEXT, VIDEO_TOKENS, violations
from terrella.data.shards import ShardSet, ShardWriter
from terrella.data.trajectory import Role, TokenSequence


def test_token_sequences(tmp_path):
    sequence = TokenSequence((5, 49151, 7), (Role.PROMPT, Role.ACTION, Role.STATE))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with ShardWriter(tmp_path, kind=TEXT) as writer:
        writer.write({"messages.json": messages, "meta.json": {"schema": TEXT}, **token_fields(sequence)})
        writer.write({"messages.json": messages, "meta.json": {"schema": TEXT}})
    shards = ShardSet(tmp_path)
    assert token_sequence(shards[0]) == sequence
    with pytest.raises(ValueError, match=r"sample 000000001: no tokens\.npy"):
        token_sequence(shards[1])


def test_video_tokens(tmp_path):
    """Eight steps of 80 frame and 13 action tokens, as the multi-step video model reads them."""
    layout = [{"name": "frame", "tokens": 80}, {"name": "action", "tokens": 13}]
    tokens = np.arange(8 * 93, dtype=np.uint16).reshape(8, 93)
    meta = {"schema": VIDEO_TOKENS, "layout": layout, "codebook": 4375}
    with ShardWriter(tmp_path / "d", kind=VIDEO_TOKENS) as writer:
        writer.write({"tokens.npy": tokens, "meta.json": meta})
        with pytest.raises(ShardError, match=r"field tokens\.npy: 92 tokens a row, the layout in meta\.json says 93"):
            writer.write({"tokens.npy": tokens[:, :92], "meta.json": meta})
        with pytest.raises(ShardError, match=r"field tokens\.npy: dtype int64, expected one of u2"):
            writer.write({"tokens.npy": tokens.astype(np.int64), "meta.json": meta})
    parts = video_token_layout(ShardSet(tmp_path / "d")[0])
    assert np.array_equal(parts["frame"], tokens[:, :80]) and np.array_equal(parts["action"], tokens[:, 80:])


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_use_only_what_the_validator_knows(kind):
    """An unknown keyword raises, so that no part of a schema is silently not checked."""
    for member in KINDS[kind].members.values():
        if member.schema is not None:
            for value in ({}, [], "", 1, None, {"schema": kind}, [{}]):
                violations(value, member.schema)
    with pytest.raises(ValueError, match="'oneOf' is not supported"):
        violations(1, {"oneOf": []})


@pytest.mark.parametrize(
    ("value", "schema", "told"),
    [
        (True, {"type": "integer"}, "(top): expected integer, found bool"),
        (1.5, {"type": ["integer", "null"]}, "(top): expected integer or null, found float"),
        (
            {"a": {"b": [1, "x"]}},
            {"properties": {"a": {"properties": {"b": {"items": {"type": "integer"}}}}}},
            "a.b[1]: expected integer, found str",
        ),
        ({}, {"required": ["k"]}, "(top): 'k' is missing"),
        ({"k": 1}, {"additionalProperties": False}, "(top): 'k' is not known here"),
        (3, {"minimum": 4}, "(top): 3 is below 4"),
        ([], {"minItems": 1}, "(top): 0 items, at least 1 wanted"),
        ("z", {"enum": ["a"]}, "(top): 'z' is not one of ['a']"),
        (1, {"const": True}, "(top): expected True, found 1"),
    ],
)
def test_violations_are_located(value, schema, told):
    assert violations(value, schema) == [told]
