"""Tiny random models of every family: logits equal to transformers', and the round trip equal to the bit, in three
layouts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from terrella.core.errors import ConfigError
from terrella.models import hf
from terrella.models.config import ModelConfig
from terrella.models.convert import open_source
from terrella.models.decode import decode_weights
from terrella.models.families import read_hf_config, write_hf_config
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import few

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3.1": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-raw": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "one-kv": ("qwen2", {"num_key_value_heads": 1}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "video-gpt": (
        "llama",
        {"num_key_value_heads": 4, "vocab_size": 1100, "intermediate_size": 128, "initializer_range": 0.02},
    ),
}
LAYOUTS = {"tp1": (1, {}), "tp2": (2, {"tensor": 2}), "pp2": (2, {"pipeline": 2}), "tp4": (4, {"tensor": 4})}


@cache
def tiny(case: str) -> tuple[Path, torch.Tensor]:
    """A random model saved by transformers, and its logits on the proof prompts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = CASES[case]
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # norms and biases start at one and zero, which would hide a swap
        for name, param in model.named_parameters():
            if "norm" in name or "bias" in name:
                param.add_(torch.randn_like(param) * 0.1)
    folder = Path(mkdtemp(prefix=f"tiny-{case}-"))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder, hf.transformers_logits(folder, hf.proof_batch(hf.read_config(folder)))[1]


# four ranks share two key heads, two share one
SHARED = [("qwen2", "tp4"), ("qwen3", "tp4"), ("glm", "tp4"), ("one-kv", "tp4")]
PLAIN = ("tp1", "tp2", "pp2")


def rows() -> list[Any]:
    """Every family at every layout: in CI each at one of them, at the next one with another commit."""
    (first,) = few(range(len(PLAIN)), 1)
    plain = [
        pytest.param(case, layout, marks=[pytest.mark.full] * ((j - i - first) % len(PLAIN) != 0))
        for i, case in enumerate(CASES)
        for j, layout in enumerate(PLAIN)
    ]
    (drawn,) = few(SHARED, 1)
    return plain + [pytest.param(*row, marks=[pytest.mark.full] * (row != drawn)) for row in SHARED]


@pytest.mark.parametrize(("case", "layout"), rows())
def test_round_trip(case: str, layout: str, tmp_path: Path) -> None:
    folder, logits = tiny(case)
    world, parallel = LAYOUTS[layout]
    if "moe" in case and layout == "tp2":
        parallel = {**parallel, "sequence_parallel": True}
    result = run_ranks(
        "terrella.tests.models.hf_jobs:round_trip", world, folder=str(folder), out=str(tmp_path), parallel=parallel
    )[0]
    torch.testing.assert_close(result["logits"], logits, atol=1e-5, rtol=0)
    before, after = hf.HFFolder(folder), hf.HFFolder(tmp_path)
    assert before.names() - {"lm_head.weight"} == after.names() - {"lm_head.weight"}
    for name in after.names():
        assert torch.equal(before.get(name), after.get(name)), name
    assert (tmp_path / "tokenizer.json").exists()
    assert result["proof"]["max_logit_difference"] <= 1e-5
    assert read_hf_config(hf.read_json(tmp_path / "config.json")) == hf.read_config(folder)


def test_gradients_of_gemma_are_those_of_transformers() -> None:
    """On documents longer and shorter than the window, packed."""
    from transformers import AutoModelForCausalLM

    folder, _ = tiny("gemma3")
    lengths, draw = [31, 5], torch.Generator().manual_seed(3)
    # transformers gives the padding token, 0, no gradient as an input
    tokens = torch.randint(1, SMALL["vocab_size"], (sum(lengths),), generator=draw).tolist()
    ours = run_ranks("terrella.tests.models.hf_jobs:gradients", 1, folder=str(folder), tokens=tokens, lengths=lengths)[
        0
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    loss = torch.zeros((), dtype=torch.float64)
    for part in torch.tensor(tokens).split(lengths):
        logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
        loss = loss + torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum") / (sum(lengths) - 2)
    loss.backward()
    assert ours["loss"] == pytest.approx(float(loss), rel=1e-6)
    theirs = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert ours["gradients"].keys() == theirs.keys()
    norm = sum(float(gradient.square().sum()) for gradient in theirs.values()) ** 0.5
    for name, gradient in theirs.items():
        error = float((ours["gradients"][name] - gradient).norm() / max(gradient.norm(), 1e-3 * norm))
        assert error <= 2e-6, f"{name}: gradient off by {error:.2e}"


def test_what_gemma_cannot_do_here_is_named() -> None:
    folder, _ = tiny("gemma3")
    told = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"model_type": "gemma3"}, "only its text model, gemma3_text, is supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation: 'silu' is not supported"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3]}, "layer_types: only patterns"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_hf_config({**told, **change})
    with pytest.raises(ConfigError, match="the embedded sampler has no layers of gemma; use sampler"):
        decode_weights({}, read_hf_config(told))
    older = {key: value for key, value in told.items() if key not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    older |= {"sliding_window_pattern": 2}  # as transformers 4 wrote it
    assert read_hf_config(older) == read_hf_config(told)


def test_shards_and_bf16(tmp_path: Path) -> None:
    folder, _ = tiny("qwen2")
    out = str(tmp_path)
    run_ranks(
        "terrella.tests.models.hf_jobs:round_trip",
        1,
        folder=str(folder),
        out=out,
        parallel={},
        dtype="bf16",
        shard_bytes=4096,
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    before, after = hf.HFFolder(folder), hf.HFFolder(tmp_path)
    for name in before.names():
        assert torch.equal(before.get(name).bfloat16(), after.get(name)), name


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with other settings."""
    shutil.copytree(folder, target)
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return target


@pytest.mark.parametrize("vocab", [50, 70])
def test_a_vocabulary_that_is_not_the_weights_is_refused(vocab: int, tmp_path: Path) -> None:
    rows = hf.read_config(tiny("llama")[0]).vocab
    folder = copied(tiny("llama")[0], tmp_path / "wrong", vocab_size=vocab)
    with pytest.raises(
        ConfigError, match=rf"config\.json: vocab_size is {vocab}, but 'model.embed_tokens.weight' has {rows} rows"
    ):
        hf.weight_source(folder, hf.read_config(folder))


@pytest.mark.parametrize("shards", [1, 2])
def test_folders_of_pickled_weights(shards: int, tmp_path: Path) -> None:
    folder, logits = tiny("llama")
    old = copied(folder, tmp_path / "old")
    weights = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: missing"):
        hf.HFFolder(old)
    names = sorted(weights)
    files = {"pytorch_model.bin": names} if shards == 1 else {f"pytorch_model-{i}.bin": names[i::2] for i in range(2)}
    for file, held in files.items():
        torch.save({name: weights[name] for name in held}, old / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (old / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(
        hf.transformers_logits(old, hf.proof_batch(hf.read_config(old)))[1], logits, atol=0, rtol=0
    )
    assert open_source(old).kind == "hf"
    torch.save({"model.embed_tokens.weight": Path("x")}, old / next(iter(files)))
    with torch.serialization.safe_globals([type(Path())]):  # as megatron-core does for its own files
        with pytest.raises(ConfigError, match="refused, it is not a plain file of tensors"):
            hf.HFFolder(old)
        assert type(Path()) in torch.serialization.get_safe_globals()


def test_scaled_positions_are_written_for_both_generations_of_transformers() -> None:
    for case in ("llama3.1", "llama-linear", "qwen2-yarn"):
        config = hf.read_config(tiny(case)[0])
        written = write_hf_config(config, "float32")
        scaling = written["rope_scaling"]
        assert {**scaling, "rope_theta": config.rope_theta} == written["rope_parameters"] and written[
            "rope_theta"
        ] == config.rope_theta
        for missing in ("rope_parameters", "rope_scaling"):  # either alone says it all
            assert read_hf_config({k: v for k, v in written.items() if k != missing}) == config
    assert "rope_scaling" not in write_hf_config(hf.read_config(tiny("llama")[0]), "float32")


def test_a_folder_that_does_not_fit_is_refused() -> None:
    folder, _ = tiny("llama")
    assert (
        "ffn is 48"
        in run_ranks("terrella.tests.models.hf_jobs:import_error", 1, folder=str(folder), changes={"ffn": 64})[0]
    )


def test_unsupported_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="model_type: 'gpt2' is not supported"):
        read_hf_config({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="hidden_act"):
        read_hf_config({"model_type": "llama", "hidden_act": "gelu"})
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read_hf_config({**SMALL, "model_type": "qwen2", "use_sliding_window": True})
    with pytest.raises(ConfigError, match=r"x/config\.json: quantization_config: gptq weights"):
        read_hf_config(
            {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "x/config.json",
        )
    with pytest.raises(ConfigError, match="sliding_window"):
        read_hf_config({**SMALL, "model_type": "mistral", "sliding_window": 64})
    with pytest.raises(ConfigError, match="longrope"):
        read_hf_config({**SMALL, "model_type": "llama", "rope_scaling": {"type": "longrope", "factor": 2.0}})


def test_impossible_sizes_name_the_setting() -> None:
    for name, bad in {"rotary_fraction": 1.5, "query_scale": 0.0, "local_rope_theta": 0.0}.items():
        with pytest.raises(ValueError, match=f"{name}: {bad} must be above 0"):
            ModelConfig(block="gemma", **{name: bad})


def test_a_model_that_its_family_cannot_hold_is_not_written() -> None:
    for family, name in (
        ("qwen2", "qkv_bias"),
        ("qwen3", "qk_norm"),
        ("glm", "rotary_interleaved"),
        ("gemma3_text", "block"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.{name}: .* model\.family: {family}"):
            write_hf_config(ModelConfig(family=family), "float32")
    gemma = ModelConfig(family="gemma3_text", block="gemma", qk_norm=True, head_dim=32)
    written = write_hf_config(gemma, "float32")
    assert written["query_pre_attn_scalar"] == 32 and set(written["layer_types"]) == {"full_attention"}


def test_a_setting_in_single_precision_is_the_same() -> None:
    folder = tiny("llama")[0]
    model = hf.read_config(folder)
    assert hf.require_same(folder, replace(model, norm_eps=9.999999974752427e-07)) == model  # 1e-6 as fp32
    for change, said in (
        ({"norm_eps": 1.1e-6}, "norm_eps is 1e-06"),
        ({"tied": True}, "tied is False"),
        ({"ffn": 64}, "ffn is 48"),
    ):
        with pytest.raises(ConfigError, match=said):
            hf.require_same(folder, replace(model, **change))
