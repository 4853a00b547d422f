"""Token sequences in samples and out of them: `tokens.npy` with `roles.npy`, in any kind that has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .trajectory import Role, TokenSequence


def token_fields(sequence: TokenSequence) -> dict[str, np.ndarray]:
    """The two members that hold a sequence's ids and roles. Sampler log-probs are of one moment and are not stored."""
    return {"tokens.npy": np.array(sequence.ids, dtype=np.int32), "roles.npy": np.array(sequence.roles, dtype=np.int8)}


def token_sequence(sample: dict[str, Any]) -> TokenSequence:
    """The sequence that a sample holds."""
    for field in ("tokens.npy", "roles.npy"):
        if field not in sample:
            raise ValueError(f"sample {sample.get('__key__')}: no {field}; tokenise the shards first")
    return TokenSequence(tuple(sample["tokens.npy"].tolist()), tuple(Role(r) for r in sample["roles.npy"].tolist()))


def video_token_layout(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parts of a video-token sample by name: [steps, tokens] each, as the layout in its meta.json divides a row."""
    tokens = np.atleast_2d(sample["tokens.npy"])
    parts, at = {}, 0
    for part in sample["meta.json"]["layout"]:
        parts[part["name"]] = tokens[:, at : at + part["tokens"]]
        at += part["tokens"]
    if at != tokens.shape[1]:
        raise ValueError(f"sample {sample.get('__key__')}: the layout in meta.json covers {at} of {tokens.shape[1]} tokens a row")
    return parts
