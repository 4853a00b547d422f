"""Conversions, each ending in its proof."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from terrella.core.checkpoint import CheckpointReader
from terrella.core.errors import ConfigError, StorageError
from terrella.launch.commands.convert import convert
from terrella.models import formats, hf, nemo
from terrella.models.convert import open_source
from terrella.models.families import parameter_names
from terrella.tests.models.test_hf import tiny
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import in_turn

JOBS = "terrella.tests.models.convert_jobs"
TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "model.norm.weight": "encoder.final_layernorm.weight",
}
RENAMED = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def same_tensors(a: Path, b: Path, dtype: torch.dtype = torch.float32) -> None:
    before, after = hf.HFFolder(a), hf.HFFolder(b)
    assert before.names() - {"lm_head.weight"} == after.names() - {"lm_head.weight"}
    for name in after.names():
        assert torch.equal(before.get(name).to(dtype), after.get(name)), name


@pytest.mark.parametrize("case", ["qwen2-tied", "qwen3-moe", "glm"])
def test_hf_to_checkpoint_and_back(case: str, tmp_path: Path) -> None:
    folder, _ = tiny(case)
    run_ranks(f"{JOBS}:from_any", 1, path=str(folder), out=str(tmp_path / "checkpoint"))
    assert (tmp_path / "checkpoint" / "import_proof.json").exists()
    run_ranks(
        f"{JOBS}:to_hf", 1, path=str(tmp_path / "checkpoint"), out=str(tmp_path / "hf"), base=str(folder), dtype="fp32"
    )
    same_tensors(folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert hf.read_json(tmp_path / "hf" / "export_proof.json")["max_logit_difference"] <= 1e-5


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_folders_that_leave_settings_to_their_family(case: str, tmp_path: Path) -> None:
    """As Gemma 3 was released: no tie_word_embeddings, and how often a global layer comes instead of every layer's
    kind."""
    folder = shutil.copytree(tiny(case)[0], tmp_path / "folder")
    settings = json.loads((folder / "config.json").read_text())
    del settings["tie_word_embeddings"]
    if case == "gemma3":
        del settings["layer_types"]
        settings["sliding_window_pattern"] = 2
    (folder / "config.json").write_text(json.dumps(settings))
    proof = run_ranks(f"{JOBS}:from_any", 1, path=str(folder), out=str(tmp_path / "checkpoint"))[0]
    assert proof["max_logit_difference"] <= proof["tolerance"]


def test_trained_checkpoint_in_bf16(tmp_path: Path) -> None:
    """A checkpoint saved by two tensor ranks with adapters: merged, and as a PEFT folder."""
    folder, _ = tiny("qwen2")
    run_ranks(f"{JOBS}:train_lora", 2, folder=str(folder), out=str(tmp_path / "checkpoint"), parallel={"tensor": 2})
    common = {"path": str(tmp_path / "checkpoint"), "base": str(folder)}
    run_ranks(f"{JOBS}:to_hf", 1, out=str(tmp_path / "merged"), dtype="fp32", **common)
    run_ranks(f"{JOBS}:to_hf", 1, out=str(tmp_path / "bf16"), dtype="bf16", **common)
    run_ranks(f"{JOBS}:to_hf", 1, out=str(tmp_path / "peft"), adapters="peft", **common)
    same_tensors(tmp_path / "merged", tmp_path / "bf16", torch.bfloat16)
    base = hf.HFFolder(folder)
    merged = hf.HFFolder(tmp_path / "merged")
    assert any(not torch.equal(base.get(n), merged.get(n)) for n in base.names()), "the adapters changed nothing"
    run_ranks(
        f"{JOBS}:to_hf", 1, path=str(tmp_path / "peft"), out=str(tmp_path / "again"), base=str(folder), dtype="fp32"
    )
    again = hf.HFFolder(tmp_path / "again")
    for name in merged.names():
        torch.testing.assert_close(again.get(name), merged.get(name), atol=1e-6, rtol=0)
    a = {n: t for n, t in load_file(tmp_path / "peft" / "adapter_model.safetensors").items() if "0.self_attn" in n}
    q, k, v = (a[f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_A.weight"] for part in "qkv")
    assert not torch.equal(q, k) and not torch.equal(k, v), "as in PEFT, queries, keys and values have an A each"


def test_peft_scales(tmp_path: Path) -> None:
    """Ranks and alphas that an adapter folder gives some modules only are those of the merged weights."""
    folder, _ = tiny("qwen2")
    base, names = formats.read_folder(folder), ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    tensors = {}
    for rank, name in zip((2, 3), names, strict=True):
        rows, columns = base.get(f"{name}.weight").shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "rank_pattern": {"down_proj": 3}}
    settings["alpha_pattern"] = {r"layers\.1\.mlp\.down_proj": 6}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    merged = formats.read_peft(tmp_path, base)
    for name, scale in zip(names, (8 / 2, 6 / 3), strict=True):
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        wanted = base.get(f"{name}.weight").float() + scale * b @ a
        torch.testing.assert_close(merged.get(f"{name}.weight").float(), wanted)


def test_verl_fsdp_shards(tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    run_ranks(f"{JOBS}:write_verl_fsdp", 2, folder=str(folder), out=str(tmp_path / "actor"))
    run_ranks(
        f"{JOBS}:to_hf", 1, path=str(tmp_path / "actor"), out=str(tmp_path / "hf"), base=str(folder), dtype="fp32"
    )
    same_tensors(folder, tmp_path / "hf")
    (tmp_path / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ConfigError, match="files of all ranks"):
        formats.read_verl_fsdp(tmp_path / "actor")


def test_verl_megatron_shards(tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    config, state = hf.read_config(folder), load_file(folder / "model.safetensors")
    for t in range(2):
        for p in range(2):
            part = {}
            for name, tensor in state.items():
                layer = int(name.split(".")[2]) if ".layers." in name else None
                if (
                    (layer is not None and layer // 1 != p)
                    or ("embed" in name and p)
                    or (("lm_head" in name or name == "model.norm.weight") and not p)
                ):
                    continue
                local = name.replace(f".layers.{layer}.", ".layers.0.")
                if "q_proj" in name:
                    rows = [state[name.replace("q_proj", f"{x}_proj")].chunk(2)[t] for x in "qkv"]
                    part[local.replace("q_proj", "qkv_proj")] = torch.cat(rows)
                elif "gate_proj" in name:
                    part[local.replace("gate", "gate_up")] = torch.cat(
                        [tensor.chunk(2)[t], state[name.replace("gate", "up")].chunk(2)[t]]
                    )
                elif "k_proj" in name or "v_proj" in name or "up_proj" in name:
                    continue
                elif "norm" in name:
                    part[local] = tensor
                else:
                    dim = 1 if "o_proj" in name or "down_proj" in name else 0
                    padded = (
                        torch.cat([tensor, tensor.new_zeros(3, tensor.shape[1])])
                        if "embed" in name or "lm_head" in name
                        else tensor
                    )
                    part[local] = padded.chunk(2, dim)[t].clone()
            path = tmp_path / f"mp_rank_{t:02d}_{p:03d}"
            path.mkdir()
            torch.save(part, path / "model.pt")
    tensors = formats.read_verl_megatron(tmp_path, config)
    formats.check_complete(tensors, config, tmp_path)
    for name, tensor in state.items():
        assert torch.equal(tensors.get(name), tensor), name


def test_accelerate_and_bin_files(tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    state = load_file(folder / "model.safetensors")
    (tmp_path / "accelerate").mkdir()
    save_file({f"module.{k}": v for k, v in state.items()}, tmp_path / "accelerate" / "model.safetensors")
    torch.save({f"model.{k}": v for k, v in state.items()}, tmp_path / "pytorch_actor.bin")
    for tensors in (
        formats.read_safetensors(tmp_path / "accelerate"),
        formats.read_bin(tmp_path / "pytorch_actor.bin"),
    ):
        formats.check_complete(tensors, hf.read_config(folder), tmp_path)
        for name in state:
            assert torch.equal(tensors.get(name), state[name])


def test_critic_file_with_twin_heads(tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    state = {f"base_lm.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    for head in (1, 2):
        for i, shape in ((0, (32, 32)), (2, (32, 32)), (4, (2, 32))):
            state[f"critic{head}.{i}.weight"], state[f"critic{head}.{i}.bias"] = (
                torch.randn(shape),
                torch.randn(shape[0]),
            )
    path = tmp_path / "pytorch_critic.bin"
    torch.save(state, path)
    run_ranks(f"{JOBS}:from_any", 1, path=str(path), out=str(tmp_path / "critic"), base=str(folder))
    values = run_ranks(f"{JOBS}:twin_values", 1, folder=str(tmp_path / "critic"))[0]
    assert values.shape == (sum(hf.PROMPT_LENGTHS), 2, 2)
    heads = formats.twin_heads(path)
    assert torch.equal(heads["value_head.heads.1.4.weight"], state["critic2.4.weight"])
    path = path.rename(tmp_path / "values.bin")  # what it is called says nothing
    assert open_source(path, base=folder).value_heads.keys() == heads.keys()
    torch.save({name: tensor for name, tensor in state.items() if "critic" not in name}, path)
    assert not open_source(path, base=folder).value_heads
    with pytest.raises(ConfigError, match="has no two value heads"):
        open_source(path.rename(tmp_path / "critic.bin"), base=folder)
    torch.save({**state, "v_head.summary.weight": torch.randn(1, 32)}, path)  # heads of another kind
    with pytest.raises(ConfigError, match=r"no place for tensor 'v_head\.summary\.weight' \(1 such\)"):
        open_source(path, base=folder)


@pytest.mark.parametrize("kind", ["scalar", "twin"])
def test_value_heads_of_a_checkpoint_are_kept_or_refused(tmp_path: Path, kind: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    run_ranks(f"{JOBS}:save_critic", 1, out=str(before), value_head=kind)
    run_ranks(f"{JOBS}:from_any", 1, path=str(before), out=str(after))
    theirs, ours = CheckpointReader(before), CheckpointReader(after)
    assert ours.manifest["model"] == theirs.manifest["model"] and ours.names() == theirs.names()
    heads = [name for name in ours.names() if name.startswith("value_head.")]
    assert heads and all(torch.equal(theirs.full(name), ours.full(name)) for name in heads)
    for command in ("to-hf", "to-nemo"):
        told = CliRunner().invoke(convert, [command, str(before), str(tmp_path / command)])
        assert isinstance(told.exception, ConfigError) and "value heads" in str(told.exception)
        assert not (tmp_path / command).exists()


def test_pickles_that_run_code_are_refused(tmp_path: Path) -> None:
    import os

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model.embed_tokens.weight": Bomb()}, tmp_path / "bad.bin")
    with pytest.raises(ConfigError, match="refused"):
        formats.read_bin(tmp_path / "bad.bin")
    assert not (tmp_path / "executed").exists()
    for held in (torch.zeros(3), [torch.zeros(3)], {0: torch.zeros(3)}):
        torch.save(held, tmp_path / "bad.bin")
        with pytest.raises(ConfigError, match=r"bad\.bin: holds a \w+, not tensors by their names"):
            formats.read_bin(tmp_path / "bad.bin")


def test_incomplete_sources_are_named(tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    config, state = hf.read_config(folder), load_file(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.norm\.weight'"):
        formats.check_complete(
            formats.from_dict({k: v for k, v in state.items() if k != "model.norm.weight"}), config, tmp_path
        )
    with pytest.raises(ConfigError, match="no place for tensor 'surplus'"):
        formats.check_complete(formats.from_dict({**state, "surplus": torch.zeros(1)}), config, tmp_path)


def test_chatglm_names(tmp_path: Path) -> None:
    """The older names, made from a tiny GLM; transformers' GLM is the judge."""
    folder, logits = tiny("glm")
    config, state = hf.read_config(folder), load_file(folder / "model.safetensors")
    old = {}
    for name, tensor in state.items():
        if name in TOP:
            old[f"transformer.{TOP[name]}"] = tensor
            continue
        prefix = name.replace("model.layers", "transformer.encoder.layers")
        if "q_proj" in name:
            rows = [state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            old[prefix.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(rows)
        elif "k_proj" in name or "v_proj" in name:
            continue
        else:
            for new, was in RENAMED.items():
                prefix = prefix.replace(new, was)
            old[prefix] = tensor
    save_file({k: v.contiguous() for k, v in old.items()}, tmp_path / "model.safetensors")
    hf.write_json(
        tmp_path / "config.json",
        {
            "model_type": "chatglm",
            "num_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "multi_query_attention": True,
            "multi_query_group_num": config.kv_heads,
            "kv_channels": config.head_dim,
            "ffn_hidden_size": config.ffn,
            "padded_vocab_size": config.vocab,
            "seq_length": config.max_positions,
            "layernorm_epsilon": config.norm_eps,
            "add_qkv_bias": True,
            "rope_ratio": 1,
        },
    )
    result = run_ranks(f"{JOBS}:import_logits", 2, folder=str(tmp_path), parallel={"tensor": 2})[0]
    torch.testing.assert_close(result, logits, atol=1e-5, rtol=0)


def nemo_folder(out: Path) -> Path:
    """A NeMo 2 folder of a tiny model, its weights written by torch's own writer of distributed checkpoints."""
    from torch.distributed import checkpoint

    source, stacks = open_source(tiny("qwen2")[0]), {}
    for name in parameter_names(source.config):
        stacks.setdefault(nemo._stacked_key(name)[0], []).append(source.tensor(name))
    state = {key: torch.stack(parts) if ".layers." in key else parts[0] for key, parts in stacks.items()}
    checkpoint.save(state, checkpoint_id=out / "weights", no_dist=True)
    kind = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (out / "weights" / "metadata.json").write_text(json.dumps(kind))
    (out / "context").mkdir()
    (out / "context" / "model.yaml").write_text(yaml.safe_dump({"config": nemo.model_settings(source.config)}))
    return out


def test_a_nemo_folder_that_runs_code_is_refused(tmp_path: Path) -> None:
    """`.metadata` is a pickle, and so is `common.pt`: neither may run anything, whichever command opens the folder."""
    weights = nemo_folder(tmp_path / "nemo") / "weights"
    config, held = hf.read_config(tiny("qwen2")[0]), (weights / ".metadata").read_bytes()

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    described = pickle.loads(held)  # noqa: S301
    described.planner_data = {"hidden": [Bomb()]}
    for bomb in (pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0), pickle.dumps(described)):
        (weights / ".metadata").write_bytes(bomb)
        for verb in ("from-nemo", "to-hf"):
            with pytest.raises(StorageError, match=r"\.metadata: refused: it names \w+\.mkdir"):
                convert.main([verb, str(tmp_path / "nemo"), str(tmp_path / "out")], standalone_mode=False)
    (weights / ".metadata").write_bytes(held)
    data = next(weights.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    for verb in ("from-nemo", "to-hf"):
        with pytest.raises(StorageError, match="is not readable"):
            convert.main([verb, str(tmp_path / "nemo"), str(tmp_path / "out")], standalone_mode=False)
    data.write_bytes(content)
    # nothing ran, and no half of a conversion is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nemo"]
    (weights / "common.pt").write_bytes(pickle.dumps(Bomb()))  # ours has no use for it
    source = open_source(tmp_path / "nemo")
    tensors = hf.weight_source(tiny("qwen2")[0], config)[0]
    for name in parameter_names(config):
        assert torch.equal(source.tensor(name), tensors(name)), name
    for size in (0, 7, len(held) // 2):  # cut short
        (weights / ".metadata").write_bytes(held[:size])
        with pytest.raises(StorageError, match=r"\.metadata: not readable"):
            open_source(tmp_path / "nemo")


def test_a_nemo_folder_reads_nothing_outside_itself(tmp_path: Path) -> None:
    described = nemo_folder(tmp_path / "nemo") / "weights" / ".metadata"
    metadata = pickle.loads(described.read_bytes())  # noqa: S301
    for where in metadata.storage_data.values():
        where.relative_path = f"../../{where.relative_path}"
    described.write_bytes(pickle.dumps(metadata))
    with pytest.raises(StorageError, match="outside the folder"):
        open_source(tmp_path / "nemo").tensor("embedding.word_embeddings.weight")


def test_a_nemo_folder_as_its_own_version_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen in folders of NeMo 2.7.3: megatron-core's class describes the tensors, and the tokenizer decides the
    vocabulary.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    folder = nemo_folder(tmp_path / "nemo")
    module = "megatron.core.dist_checkpointing.strategies.torch"
    theirs = type("MCoreMetadata", (Metadata,), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(MCoreMetadata=theirs))
    described = folder / "weights" / ".metadata"
    metadata = theirs(**vars(pickle.loads(described.read_bytes())))  # noqa: S301
    described.write_bytes(pickle.dumps(metadata))
    settings = folder / "context" / "model.yaml"
    written = yaml.safe_load(settings.read_text())
    scaling = {"scale_factor": 8.0, "old_context_len": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings.write_text(yaml.safe_dump({"config": written["config"] | scaling | {"vocab_size": None}}))
    source = open_source(folder)
    true = hf.read_config(tiny("qwen2")[0])
    assert source.config.vocab >= true.vocab and source.config.rope_scaling is not None
    assert source.config.rope_scaling.original_max_positions == 8192
    name = "decoder.layers.1.input_layernorm.weight"
    assert torch.equal(source.tensor(name), hf.weight_source(tiny("qwen2")[0], true)[0](name))
    for setting in ({"rotary_interleaved": True}, {"activation_func": {"_target_": "torch.nn.functional.gelu"}}):
        settings.write_text(yaml.safe_dump({"config": written["config"] | setting}))
        with pytest.raises(ConfigError, match=next(iter(setting))):
            open_source(folder)


def test_a_model_that_turns_neighbours_is_not_written_for_nemo(tmp_path: Path) -> None:
    """The settings would call GLM's rotary embedding Llama's."""
    with pytest.raises(ConfigError, match=r"rotary_interleaved are not supported for NeMo folders"):
        nemo.write_nemo(open_source(tiny("glm")[0]), tmp_path / "nemo")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_nemo_folder_round_trip(tmp_path: Path) -> None:
    """Only that our reader reads what our writer writes, through the command: no folder of NeMo's own was at hand."""
    folder, _ = tiny("qwen2")
    for verb, source, out in (("to-nemo", folder, "nemo"), ("from-nemo", tmp_path / "nemo", "checkpoint")):
        command = [sys.executable, "-m", "terrella", "convert", verb, str(source), str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
    reader = CheckpointReader(tmp_path / "checkpoint")
    tensors, config = hf.weight_source(folder, hf.read_config(folder))[0], hf.read_config(folder)
    for name in parameter_names(config):
        assert torch.equal(reader.full(name), tensors(name)), name


@in_turn("streamed conversion")
def test_conversion_and_proof_stream(tmp_path: Path) -> None:
    """Memory stays below 1.3 x the largest shard plus one layer, though the model is four shards."""
    command = [sys.executable, "-m", "terrella.tests.models.convert_memory", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    allowed = 1.3 * found["shard"] + found["layer"]
    assert found["model"] > 2 * allowed
    assert found["from_hf"] <= allowed and found["to_hf"] <= allowed, found


INTERRUPTED = """
import os, signal, sys
import transformers.models.qwen2.modeling_qwen2
from terrella.core.mcore import shim
shim.install()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from terrella.launch.cli import main
from terrella.models import convert, gpt, hf
real = hf._one_layer
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, None):
    child = os.fork()
    if not child:
        def one_layer(*given):
            made = real(*given)
            if number is not None: os.kill(os.getpid(), number)
            return made
        hf._one_layer = one_layer
        main(["convert", "from-hf", sys.argv[1], sys.argv[2]])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("END", code, *(sorted(os.listdir(os.path.dirname(path))) for path in sys.argv[1:]), flush=True)
"""


@in_turn("interrupted conversion")
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Ended in the middle of its proof; after SIGKILL the next start takes away what lies there."""
    source, out = tmp_path / "models" / "source", tmp_path / "made" / "checkpoint"
    shutil.copytree(tiny("qwen2-tied")[0], source)
    out.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(source), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("END")] == [
        "END 143 ['source'] []",
        "END 130 ['source'] []",
        "END -9 ['source'] ['.checkpoint.partial']",
        "END 0 ['source'] ['checkpoint']",
    ], done.stdout + done.stderr
    assert not list(out.glob(".*"))
