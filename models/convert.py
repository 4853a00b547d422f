"""Conversion between checkpoints, Hugging Face folders and the formats of public releases; every result is proven.

Tensors are read, mapped and written one at a time, and held only until their shard is full. The proof then runs fixed
prompts through the source's layers in this project's implementation and through the written ones in transformers, one
layer at a time, and compares logits. Its temporary files are in the unfinished folder, and are deleted with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from ..core.checkpoint import MANIFEST, CheckpointReader, Entry, seal, write_shard
from ..core.config import ParallelConfig, PrecisionConfig
from ..core.engine import Engine
from ..core.errors import ConfigError
from ..core.files import whole_folder, write_json
from ..core.layout import document_layout
from ..core.mcore.params import EMBEDDING, Shard
from . import formats, hf
from .config import ModelConfig
from .families import FAMILIES, from_hf, parameter_names
from .families.base import VOCABULARIES
from .folder import write_proof
from .hub import resolve
from .lora import LoraConfig, write_peft
from .source import Source, adapters, one_rank, weight

Kind = Literal["auto", "checkpoint", "hf", "peft", "verl-fsdp", "verl-megatron", "accelerate", "bin", "nemo"]


def detect(path: Path) -> str:
    """The format of the model at a path."""
    if path.is_file():
        return "bin"
    tests = {
        "checkpoint": path / MANIFEST,
        "peft": path / "adapter_config.json",
        "nemo": path / "context",
        "hf": path / "config.json",
    }
    for kind, marker in tests.items():
        if marker.exists():
            return kind
    if list(path.glob("model_world_size_*_rank_*.pt")):
        return "verl-fsdp"
    if list(path.glob("mp_rank_*/model.pt")):
        return "verl-megatron"
    if list(path.glob("model*.safetensors")) or (path / "pytorch_model.bin").exists():
        return "accelerate"
    run = (path / "config.yaml").exists() and (path / "checkpoints").is_dir()
    raise ConfigError(
        f"{path}: not a model in any known format"
        + (f"; it is a run: name {path / 'export'}, or one of {path / 'checkpoints'}" if run else "")
    )


def open_source(path: str | Path, *, kind: Kind = "auto", base: str | Path | None = None) -> Source:
    """Open a model. `base` is a Hugging Face folder or config file that describes the model, if its files do not."""
    path = resolve(path)
    base = resolve(base) if base is not None else None
    chosen = detect(path) if kind == "auto" else kind
    if chosen == "checkpoint":
        return _open_checkpoint(path, base)
    if chosen == "hf":
        config = hf.read_config(path)
        source, files = hf.weight_source(path, config)
        hf.check_all_used(files, config)
        return Source("hf", path, config, source, carry_from=path)
    if chosen == "nemo":
        from .nemo import open_nemo

        return open_nemo(path)
    if base is None:
        raise ConfigError(f"{path}: a {chosen} source needs --base, the Hugging Face folder of the model it belongs to")
    config, heads = hf.read_config(base), {}
    if chosen == "peft":
        tensors = formats.read_peft(path, formats.read_folder(base))
    elif chosen == "verl-fsdp":
        tensors = formats.read_verl_fsdp(path)
    elif chosen == "verl-megatron":
        tensors = formats.read_verl_megatron(path, config)
    elif chosen == "bin" or (path / "pytorch_model.bin").exists():
        file = path if path.is_file() else path / "pytorch_model.bin"
        tensors, heads = formats.read_bin(file), formats.twin_heads(file)
    else:
        tensors = formats.read_safetensors(path)
    formats.check_complete(tensors, config, path)
    family = FAMILIES[config.family]
    return Source(
        chosen,
        path,
        config,
        lambda name: from_hf(family, config, name, tensors.get),
        carry_from=base,
        value_head="twin" if heads else "none",
        value_heads=heads,
    )


def _open_checkpoint(path: Path, base: Path | None) -> Source:
    reader = CheckpointReader(path)
    described = reader.manifest["model"]
    lora = (
        LoraConfig(**{**described["lora"], "targets": tuple(described["lora"]["targets"])})
        if described.get("lora")
        else None
    )
    heads = {name: reader.full(name) for name in reader.names() if name.startswith("value_head.")}
    config, kind = ModelConfig.from_dict(described["model"]), described.get("value_head", "none")
    return Source("checkpoint", path, config, reader.full, lora, base, kind, heads)


def _stream(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    for name in parameter_names(source.config):
        yield name, weight(source, name)


def to_hf(
    path: str | Path,
    out: str | Path,
    *,
    kind: Kind = "auto",
    base: str | Path | None = None,
    dtype: str = "bf16",
    shard_bytes: int = 5 << 30,
    adapters: Literal["merge", "peft"] = "merge",
) -> dict[str, Any]:
    """Write a model as a Hugging Face folder (or its adapters as a PEFT folder) and prove it. The folder appears
    only when proven.
    """
    if dtype not in hf.DTYPES:
        raise ConfigError(f"dtype: '{dtype}' must be fp32 or bf16")
    source, out = open_source(path, kind=kind, base=base), Path(out)
    if source.value_heads:
        raise ConfigError(f"{source.path}: has value heads, which no Hugging Face folder holds; from-hf keeps them")
    with whole_folder(out) as partial:
        if adapters == "peft":
            return _to_peft(source, partial, base)
        tensors = hf.hf_tensors(source.config, _stream(source), dtype)
        stated = hf.write_folder(partial, source.config, tensors, dtype, source.carry_from, shard_bytes)
        return hf.prove(partial, source.config, stated, own_logits(source, hf.DTYPES[dtype]), "fp32")


def _to_peft(source: Source, partial: Path, base: str | Path | None) -> dict[str, Any]:
    if source.lora is None:
        raise ConfigError(f"{source.path}: has no adapters to write as a PEFT folder")
    if base is None:
        raise ConfigError("--base: a PEFT folder needs the Hugging Face folder of its base model, also to prove it")
    names = [pair for name in parameter_names(source.config) for pair in adapters(source, name) or ()]
    write_peft(partial, source.config, source.lora, ((name, source.tensor(name)) for name in names), str(base))
    # The proof merges the written adapters into the base and compares with the checkpoint's merged model.
    with tempfile.TemporaryDirectory(dir=partial) as scratch:
        again = open_source(partial, kind="peft", base=base)
        stream = hf.hf_tensors(source.config, _stream(again), "fp32")
        stated = hf.write_folder(Path(scratch) / "merged", source.config, stream, "fp32", None, 5 << 30)
        proof = hf.prove(Path(scratch) / "merged", source.config, stated, own_logits(source, torch.float32), "fp32")
    kept = {key: value for key, value in proof.items() if key not in ("tensors", "files")}  # of the merged model
    return write_proof(partial, kept, {})


def from_any(
    path: str | Path,
    out: str | Path,
    *,
    kind: Kind = "auto",
    base: str | Path | None = None,
    shard_bytes: int = 2 << 30,
) -> dict[str, Any]:
    """Write a model as a checkpoint that an engine of any layout loads, and prove it against transformers."""
    source = open_source(path, kind=kind, base=base)
    with whole_folder(Path(out)) as partial:
        write_json(partial / "extra.json", {"converted_from": str(source.path), "kind": source.kind})
        shards, tensors, entries, size = [], {}, [], 0
        for name, tensor in chain(_stream(source), source.value_heads.items()):
            amount = tensor.numel() * tensor.element_size()
            if size and size + amount > shard_bytes:
                shards.append(write_shard(partial, len(shards), tensors, entries))
                tensors, entries, size = {}, [], 0
            tensors[str(len(entries))] = tensor.detach().reshape(-1).contiguous().clone()
            entries.append(Entry(name, "param", tuple(tensor.shape), Shard(None, 0, 1), 0))
            size += amount
        shards.append(write_shard(partial, len(shards), tensors, entries))
        described = {
            "model": source.config.to_dict(),
            "value_head": source.value_head,
            "lora": None,
        }
        manifest = {
            "step": 0,
            "updates": 0,
            "optimizer": False,
            "precision": "fp32",
            "parallel": {},
            "world": 0,
            "model": described,
        }
        seal(partial, manifest, shards)
        proof = _prove_checkpoint(source, _open_checkpoint(partial, None))
        write_json(partial / "import_proof.json", proof)
    return proof


def _prove_checkpoint(source: Source, written: Source) -> dict[str, Any]:
    logits = own_logits(written, torch.float32)
    if source.kind == "hf" and not hf.is_chatglm(source.path):
        theirs = hf.transformers_logits(source.path, hf.proof_batch(source.config), written.path)
    else:
        with tempfile.TemporaryDirectory(dir=written.path) as scratch:
            folder = Path(scratch)
            hf.write_folder(
                folder, source.config, hf.hf_tensors(source.config, _stream(source), "fp32"), "fp32", None, 5 << 30
            )
            theirs = hf.transformers_logits(folder, hf.proof_batch(source.config))
    return hf.compare_logits(logits, theirs, "fp32", written.path)


def own_logits(source: Source, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the proof prompts by this project's layers in fp32, with weights rounded to the export's `dtype`.

    One layer is in memory at a time: a one-layer model is loaded with the weights of each layer in turn.
    """
    config, batch = source.config, hf.proof_batch(source.config)
    head = EMBEDDING if config.tied else "output_layer.weight"
    with one_rank(), torch.no_grad():
        from .gpt import build_gpt

        engine = Engine(build_gpt(replace(config, layers=1, vocab=8)), ParallelConfig(), None, PrecisionConfig("fp32"))
        chunk: Any = engine.chunks[0]
        layout = document_layout(batch.cu_seqlens_D1.tolist()).to(engine.device)
        packed = chunk.packed_input(batch.positions_T.to(engine.device), layout)
        hidden = weight(source, EMBEDDING)[batch.tokens_T].to(dtype).float()[:, None].to(engine.device)
        hidden = hidden * config.embedding_scale
        for index in range(config.layers):
            chunk.decoder.layers[0].self_attention.layer_number = index + 1  # tells whether it is a sliding layer
            engine.load_weights(lambda name, i=index: _rounded(source, name, i, dtype))
            hidden, _ = chunk.decoder.layers[0](hidden_states=hidden, packed_seq_params=packed)
        return hf.head_logits(
            chunk.decoder.final_layernorm(hidden).squeeze(1), weight(source, head)[: config.vocab], dtype
        )


def _rounded(source: Source, name: str, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Layer `layer` of the source, in place of the only layer; embedding and head are kept."""
    if name in VOCABULARIES:
        return None
    return weight(source, name.replace("layers.0.", f"layers.{layer}.", 1)).to(dtype).float()
