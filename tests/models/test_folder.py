"""Folders that carry the proof of their export: whoever reads one notices what was changed since."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from terrella.core.errors import NumericsError, TerrellaError
from terrella.launch.commands.doctor import look
from terrella.models import hf
from terrella.models.convert import open_source
from terrella.models.families import parameter_names
from terrella.models.folder import PROOF, verify_export, write_proof
from terrella.models.hub import push
from terrella.tests.models.test_hf import tiny


def export(case: str, folder: Path, shard_bytes: int = 20_000) -> Path:
    """A model as the exports write it, with its proof; the logits' part is of no concern here."""
    source = open_source(tiny(case)[0])
    tensors = hf.hf_tensors(
        source.config, ((name, source.tensor(name)) for name in parameter_names(source.config)), "fp32"
    )
    stated = hf.write_folder(folder, source.config, tensors, "fp32", source.carry_from, shard_bytes)
    write_proof(folder, {"max_logit_difference": 0.0, "tolerance": 1e-5}, stated)
    return folder


def read_all(folder: Path) -> None:
    """What `convert from-hf` and a stage that starts from a folder do."""
    source = open_source(folder)
    for name in parameter_names(source.config):
        source.tensor(name)


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_byte_beside_the_proof_is_named(seed: int, tmp_path: Path) -> None:
    folder = export("qwen2", tmp_path / "export")
    read_all(folder)
    assert len(verify_export(folder)["tensors"]) == 27
    draw = random.Random(seed)
    victim = draw.choice(sorted(p for p in folder.iterdir() if seed % 2 == 0 or p.suffix == ".safetensors"))
    held = bytearray(victim.read_bytes())
    held[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
    victim.write_bytes(held)
    for use in (read_all, verify_export, lambda folder: push(folder, "owner/name")):
        with pytest.raises(TerrellaError, match=str(folder)):
            use(folder)
    assert [check.level for check in look(folder, quick=False)] == ["fail"]


def test_a_part_of_an_export_that_was_replaced_is_named(tmp_path: Path) -> None:
    folder = export("llama", tmp_path / "export", shard_bytes=5 << 30)
    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    save_file({**weights, "surplus": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(TerrellaError, match="tensor 'surplus' is in the weights or in"):
        verify_export(folder)
    turned = weights["model.embed_tokens.weight"].reshape(32, -1)  # the same bytes in another shape
    save_file({**weights, "model.embed_tokens.weight": turned}, folder / "model.safetensors")
    with pytest.raises(TerrellaError, match=r"tensor 'model.embed_tokens.weight' is not the proven one"):
        verify_export(folder)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    with pytest.raises(TerrellaError, match=r"config\.json: is not the proven one"):
        read_all(folder)
    for broken in ("[]", '{"tensors": 3}', '{"tensors": {"a": 1}}', '{"files": {"../secret": "0"}}', "\x00"):
        (folder / PROOF).write_text(broken)
        with pytest.raises(TerrellaError, match=PROOF):
            read_all(folder)


def test_a_head_that_a_tied_config_would_lose_is_refused(tmp_path: Path) -> None:
    folder = export("qwen2-tied", tmp_path / "export", shard_bytes=5 << 30)
    (folder / PROOF).unlink()
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    open_source(folder)  # a second copy of the embedding says nothing else
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1e-3}, folder / "model.safetensors")
    with pytest.raises(
        TerrellaError, match=r"lm_head.weight differs from the embedding.*set tie_word_embeddings to false"
    ):
        open_source(folder)


def test_a_proof_allows_what_rounding_explains_and_no_more(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(8, 61, generator=draw, dtype=torch.float64) * 19
    steady, shaky = exact + 1e-6 * torch.randn(8, 61, generator=draw), exact + 1e-3 * torch.randn(8, 61, generator=draw)
    ours = exact + 1e-3 * torch.randn(8, 61, generator=draw)
    proof = hf.compare_logits(ours, (exact, shaky), "fp32", tmp_path)
    assert proof["fp32_rounding"] > 1e-3 and proof["max_logit_difference"] <= proof["tolerance"]
    with pytest.raises(NumericsError, match="its own fp32 differs by"):
        hf.compare_logits(ours, (exact, steady), "fp32", tmp_path)  # transformers rounds this model well: ours is wrong
    with pytest.raises(NumericsError):
        hf.compare_logits(exact + 0.05, (exact, shaky), "fp32", tmp_path)


def test_weights_that_the_config_does_not_describe_are_named(tmp_path: Path) -> None:
    folder = export("qwen2", tmp_path / "export", shard_bytes=5 << 30)
    (folder / PROOF).unlink()
    settings = json.loads((folder / "config.json").read_text())
    for change, name in (
        ({"vocab_size": 60}, "embed_tokens"),
        ({"intermediate_size": 40}, "gate_proj"),
        ({"head_dim": 16}, "q_proj"),
    ):
        (folder / "config.json").write_text(json.dumps({**settings, **change}))
        wrong = rf"tensor '.*{name}.weight' is torch.float32 .* config.json makes it"
        shape = rf"{wrong}|config.json: vocab_size is 60, but '.*{name}.weight' has"
        with pytest.raises(TerrellaError, match=shape):
            read_all(folder)
    for broken in ("{", "[]", '{"a": 1}', "\x00"):
        (folder / "config.json").write_text(broken)
        with pytest.raises(TerrellaError, match=r"config\.json"):
            read_all(folder)
