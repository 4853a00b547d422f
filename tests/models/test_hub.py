"""Pinned names, model cards, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.core.files import write_json
from terrella.models.folder import write_proof
from terrella.models.hub import card_to_push, model_card, push, resolve, sizes_of


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    for name in ("missing-folder", "owner/name", "owner/name@main", "owner/name@abc123"):
        with pytest.raises(ConfigError, match="neither a folder nor a pinned hub id"):
            resolve(name)
    # the hub's cache layout, read without a network
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve(f"owner/name@{commit}") == snapshot


def test_a_model_of_the_hub_that_is_not_supported_is_not_called_unreachable(tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is cached")
        return str(tmp_path / "config.json")

    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ConfigError, match=r"^/.*config\.json: model_type: 'gpt2' is not supported"):
        sizes_of(f"owner/name@{'0' * 40}")


def test_only_proven_folders_are_uploaded(tmp_path: Path) -> None:
    write_json(
        tmp_path / "config.json",
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61},
    )
    with pytest.raises(ConfigError, match=r"no export_proof\.json"):
        push(tmp_path, "owner/name")
    write_proof(tmp_path, {"max_logit_difference": 2e-7, "tolerance": 1e-5}, {"a": {}, "b": {}})
    card = model_card(tmp_path, "owner/name", base="owner/base", notes="A world model.")
    for piece in (
        "base_model: owner/base",
        "# name",
        "A world model.",
        "2 tensors",
        "2.00e-07 (allowed 1.00e-05)",
        "LlamaForCausalLM",
    ):
        assert piece in card
    assert "base_model: owner/base\n" in model_card(tmp_path, "owner/name", base=f"owner/base@{'0' * 40}")
    assert "base_model" not in model_card(tmp_path, "owner/name", base=str(tmp_path))


def test_what_a_card_says_of_the_run_is_not_lost_on_the_way_to_the_hub(tmp_path: Path) -> None:
    write_json(
        tmp_path / "config.json",
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61},
    )
    write_proof(tmp_path, {"max_logit_difference": 2e-7, "tolerance": 1e-5}, {"a": {}})
    card = tmp_path / "README.md"
    card.write_text(model_card(tmp_path, "grpo", "owner/base", "## Scores\n\nrl 0.9"))
    for _ in range(2):  # a second push changes nothing
        card.write_text(card_to_push(tmp_path, "owner/name", notes="A note."))
        assert card.read_text() == model_card(tmp_path, "owner/name", "owner/base", "A note.\n\n## Scores\n\nrl 0.9")
    card.write_text("My own page.\n")
    assert card_to_push(tmp_path, "owner/name") == "My own page.\n"
    with pytest.raises(ConfigError, match="is not a card that terrella wrote"):
        card_to_push(tmp_path, "owner/name", notes="A note.")
