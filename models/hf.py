"""Hugging Face folders: read into an engine, written from one, and proven.

An export ends with `export_proof.json`: the hash of every tensor as it lies on disk, and the logits of fixed prompts
computed by this model and by transformers from the written folder. Without agreement there is no export.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..core.batch import PackedBatch
from ..core.errors import ConfigError, NumericsError, StorageError
from ..core.files import make_folder, read_json, save_tensors, write_json
from .config import ModelConfig
from .families import FAMILIES, from_hf, hf_names, parameter_names, read_config, to_hf, write_hf_config
from .families.base import VOCABULARIES, Tensors, check_hf, qkv_runs
from .families.gemma import layer_types
from .families.glm import chatglm_name, from_chatglm
from .folder import CARRIED, PROOF, HFFolder, check_left, describe_tensor, same_tensor, write_proof
from .lora import is_added, merged

if TYPE_CHECKING:
    from ..core.engine import Engine
    from ..core.mcore.params import Shard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}  # of logits, relative to the largest (at least 1)
ROUNDING = 4.0  # times what transformers' own fp32 rounding changes: how far ours may be off where that is more
PROMPT_SEED, PROMPT_LENGTHS = 20240917, (96, 9, 1)


def weight_source(folder: str | Path, config: ModelConfig) -> tuple[Callable[[str], torch.Tensor], HFFolder]:
    """A function from global names to full tensors, reading a Hugging Face folder lazily."""
    files = HFFolder(Path(folder))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in files.names() and (rows := files.shape(name)[0]) != config.vocab:
            raise ConfigError(
                f"{Path(folder) / 'config.json'}: vocab_size is {config.vocab}, but '{name}' has {rows} rows"
            )
    if is_chatglm(files.folder):
        return lambda name: from_chatglm(config, name, files.get), files
    family = FAMILIES[config.family]
    return lambda name: from_hf(family, config, name, files.get), files


def import_hf(engine: Engine, folder: str | Path) -> None:
    """Load a Hugging Face folder's weights into an engine built for the same model."""
    theirs = require_same(folder, engine.build.model)  # type: ignore[attr-defined]
    source, files = weight_source(folder, theirs)
    # a tensor that a proof states is read whole, to be held against it
    if is_chatglm(files.folder) or files.proven:
        engine.load_weights(lambda name: None if is_added(name) else source(name))
    else:
        engine.load_weights(lambda name: None if is_added(name) else InFolder(files, theirs, name))
    check_all_used(files, theirs)


@dataclass(frozen=True)
class InFolder:
    """A global tensor of a Hugging Face folder of which a rank reads its part alone."""

    files: HFFolder
    config: ModelConfig
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        names = hf_names(FAMILIES[self.config.family], self.name)
        shapes = [self.files.shape(name) for name in names]
        rows = self.config.padded_vocab if self.name in VOCABULARIES else sum(shape[0] for shape in shapes)
        return (rows, *shapes[0][1:])

    def cut(self, shard: Shard) -> torch.Tensor:
        """The part that `shard` names."""
        c, family = self.config, FAMILIES[self.config.family]
        if shard.dim is None or shard.size == 1:
            return from_hf(family, c, self.name, self.files.get)
        names = hf_names(family, self.name)
        for name in names:
            check_hf(c, name, self.files.shape(name), self.files.rows_of(name, 0, 0).dtype)
        if self.name in VOCABULARIES:
            each = c.padded_vocab // shard.size
            low, high = (min(place, c.vocab) for place in (shard.rank * each, (shard.rank + 1) * each))
            found = self.files.rows_of(names[0], low, high)
            return torch.nn.functional.pad(found, (0, 0, 0, each - len(found)))
        if shard.dim == 1:
            return shard_columns(self.files, names[0], shard)
        if "linear_qkv" in self.name:
            runs = qkv_runs(c.heads, c.kv_heads, c.head_dim, shard.rank, shard.size)
            return torch.cat([self.files.rows_of(names[part], low, high) for part, low, high in runs])
        parts = []
        for name in names:  # a fused gate and up is two halves in one tensor
            halves = shard.halves // len(names) if shard.halves > 1 else 1
            each = self.files.shape(name)[0] // halves // shard.size
            starts = [(half * shard.size + shard.rank) * each for half in range(halves)]
            parts += [self.files.rows_of(name, start, start + each) for start in starts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def shard_columns(files: HFFolder, name: str, shard: Shard) -> torch.Tensor:
    """A shard's columns of a matrix."""
    each = files.shape(name)[1] // shard.size
    return files.columns_of(name, shard.rank * each, (shard.rank + 1) * each)


def require_same(folder: str | Path, ours: ModelConfig) -> ModelConfig:
    """The config of a Hugging Face folder, refused where it is not the recipe's model."""
    theirs, mine = read_config(folder), ours.to_dict()
    other = {k: v for k, v in theirs.to_dict().items() if k != "init_std" and not same_setting(mine[k], v)}
    if other:
        key, *more = other
        also = f" (and {', '.join(more)})" if more else ""
        raise ConfigError(
            f"{folder}: {key} is {other[key]}, the engine's model has {mine[key]}{also}; give the recipe's model this "
            f"folder's sizes, or take them from it: --set 'model={{folder: {folder}}}'"
        )
    return theirs


def same_setting(ours: Any, theirs: Any) -> bool:
    """Whether two settings of a model agree; a float may have been written in single precision, as
    9.999999974752427e-07 for 1e-6.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_setting(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def is_chatglm(folder: Path) -> bool:
    """Whether a folder has the older names of GLM."""
    return read_json(folder / "config.json").get("model_type") == "chatglm"


def check_all_used(files: HFFolder, config: ModelConfig) -> None:
    """Refuse a folder with tensors that no part of the model corresponds to: they would be lost without a word."""
    names = parameter_names(config)
    if is_chatglm(files.folder):
        known = {chatglm_name(name) for name in names}
    else:
        known = {hf for name in names for hf in hf_names(FAMILIES[config.family], name)}
    check_left(files.names() - known, config, files.get, files.folder)


def hf_tensors(config: ModelConfig, parameters: Tensors, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face tensors of a stream of global ones."""
    family = FAMILIES[config.family]
    for name, tensor in parameters:
        if is_added(name):
            continue
        for hf, value in to_hf(family, config, name, tensor).items():
            yield hf, value.detach().to(device="cpu", dtype=DTYPES[dtype]).contiguous()


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
    carry_from: Path | None,
    shard_bytes: int,
) -> dict[str, dict[str, Any]]:
    """Write sharded safetensors, config and carried files; returns each tensor's shape and hash as given."""
    make_folder(folder)
    stated: dict[str, dict[str, Any]] = {}
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal pending, size
        if pending:
            files.append(list(pending))
            save_tensors(folder / f"part-{len(files):05d}.safetensors", pending, {"format": "pt"})
        pending, size = {}, 0

    for name, tensor in tensors:
        amount = tensor.numel() * tensor.element_size()
        if size and size + amount > shard_bytes:
            flush()
        pending[name] = tensor.clone() if tensor.untyped_storage().nbytes() != amount else tensor
        size += amount
        stated[name] = describe_tensor(tensor)
    flush()
    single = len(files) == 1
    names = (
        ["model.safetensors"]
        if single
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    for i, name in enumerate(names):
        (folder / f"part-{i + 1:05d}.safetensors").rename(folder / name)
    if not single:
        total = sum(math.prod(s["shape"]) * (4 if dtype == "fp32" else 2) for s in stated.values())
        mapping = {tensor: file for tensors_, file in zip(files, names, strict=True) for tensor in tensors_}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": mapping})
    if carry_from is not None:
        for name in CARRIED:
            if (carry_from / name).exists() and carry_from.resolve() != folder.resolve():
                shutil.copyfile(carry_from / name, folder / name)
    settings = write_hf_config(config, "float32" if dtype == "fp32" else "bfloat16")
    write_json(folder / "config.json", {**settings, **_special_ids(carry_from)})
    return stated


def _special_ids(carry_from: Path | None) -> dict[str, Any]:
    found = {}
    alone = carry_from is not None and carry_from.is_file()  # a config file without its folder
    for name in ("",) if alone else ("config.json", "generation_config.json"):
        values = (read_json(carry_from / name) if carry_from else None) or {}
        found |= {k: values[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if values.get(k) is not None}
    return found


def proof_batch(config: ModelConfig) -> PackedBatch:
    """Fixed prompts, as one packed batch."""
    draw = torch.Generator().manual_seed(PROMPT_SEED)
    lengths = [min(n, config.max_positions) for n in PROMPT_LENGTHS]
    tokens = torch.randint(0, config.vocab, (sum(lengths),), generator=draw)
    return PackedBatch(
        tokens_T=tokens,
        targets_T=tokens,
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_D1=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
    )


def engine_logits(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    """Logits (T, vocabulary) of a batch on every rank. Makes the whole tensor: for proofs only."""

    def score(hidden_TH, head, local):
        logits = (hidden_TH @ head.weight_VH.T).float()
        if head.group is not None:
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(head.group))]
            dist.all_gather(parts, logits.contiguous(), group=head.group)
            logits = torch.cat(parts, -1)
        return {"logits": logits[:, : head.vocab_size]}

    return engine.score([batch], score)[0]["logits"].cpu()


def transformers_logits(
    folder: Path, batch: PackedBatch, place: Path | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits by transformers, document by document: in fp64, and in fp32 to see what rounding does to this
    model.

    One layer at a time is in memory: each is a model of its own, written for a moment into `place`, or the folder.
    """
    files, settings, config = HFFolder(folder), read_json(folder / "config.json"), read_config(folder)
    embedding_VH = files.get("model.embed_tokens.weight")
    cuts = list(pairwise(batch.cu_seqlens_D1.tolist()))
    rounded = [embedding_VH[batch.tokens_T[a:b]].float()[None] * config.embedding_scale for a, b in cuts]
    exact = [x.double() for x in rounded]
    for index in range(config.layers):
        with tempfile.TemporaryDirectory(dir=place or folder, prefix=".layer-") as scratch, torch.no_grad():
            model = _one_layer(files, settings, config, index, Path(scratch))
            rounded = [model(inputs_embeds=x, use_cache=False).last_hidden_state for x in rounded]
            model = model.double()
            if any("experts" in key for key in settings):  # transformers' grouped products of experts take no fp64
                model.set_experts_implementation("eager")
            exact = [model(inputs_embeds=x, use_cache=False).last_hidden_state for x in exact]
            del model
    head_VH = embedding_VH if config.tied else files.get("lm_head.weight")
    ends = (torch.cat([x[0] for x in y]) for y in (exact, rounded))
    return tuple(head_logits(end, head_VH, torch.float32) for end in ends)  # type: ignore[return-value]


def _one_layer(files: HFFolder, settings: dict[str, Any], config: ModelConfig, index: int, scratch: Path) -> Any:
    """One layer of a folder as transformers itself loads it; the final norm only behind the last."""
    from transformers import AutoModelForCausalLM

    prefix = f"model.layers.{index}."
    tensors = {
        name.replace(prefix, "model.layers.0.", 1): files.get(name) for name in files.names() if name.startswith(prefix)
    }
    tensors["model.norm.weight"] = files.get("model.norm.weight")
    tensors["model.embed_tokens.weight"] = torch.zeros(8, config.hidden)
    if not config.tied:
        tensors["lm_head.weight"] = torch.zeros(8, config.hidden)
    save_tensors(scratch / "model.safetensors", tensors, {"format": "pt"})
    small: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    kinds = settings.get("layer_types")
    if config.block == "gemma":  # whose older folders state how often a global layer comes instead
        kinds = layer_types(config.layers, config.global_every)
    if kinds:
        small["layer_types"] = [kinds[index]]
    write_json(scratch / "config.json", {**settings, **small})
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(scratch, **options).eval().model
    if index < config.layers - 1:
        model.norm = torch.nn.Identity()
    return model


def head_logits(hidden_TH: torch.Tensor, head_VH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits, in the precision of the hidden states, of a head whose weights are rounded to `dtype`, a part of the
    vocabulary at a time.
    """
    return torch.cat([hidden_TH @ part.to(dtype).to(hidden_TH).T for part in head_VH.split(8192)], 1).cpu()


def prove(
    folder: Path, config: ModelConfig, stated: dict[str, dict[str, Any]], logits_TV: torch.Tensor, precision: str
) -> dict[str, Any]:
    """Compare the written folder with what was meant, and write `export_proof.json`; raise when they disagree."""
    files = HFFolder(folder)
    if files.names() != set(stated):
        raise StorageError(f"{folder}: the written tensors are not the ones meant")
    for name, meant in stated.items():
        if not same_tensor(files.get(name), meant):
            raise StorageError(f"{folder}: tensor '{name}' was not written as meant")
    proof = compare_logits(logits_TV, transformers_logits(folder, proof_batch(config)), precision, folder)
    return write_proof(folder, proof, stated)


def compare_logits(
    ours_TV: torch.Tensor, theirs: tuple[torch.Tensor, torch.Tensor], precision: str, where: Path
) -> dict[str, Any]:
    """What a proof says of two models' logits on the fixed prompts; raises when they disagree.

    Theirs are in fp64 and in fp32. Some true models turn fp32 rounding into large differences; then ours may be as far
    from the fp64 logits as a few times what transformers' own rounding explains.
    """
    exact_TV, rounded_TV = theirs
    scale, difference = max(1.0, float(exact_TV.abs().max())), float((ours_TV - exact_TV).abs().max())
    rounding = float((rounded_TV - exact_TV).abs().max())
    allowed = max(TOLERANCE[precision] * scale, ROUNDING * rounding)
    if not difference <= allowed:
        raise NumericsError(
            f"{where}: logits differ from transformers' by {difference:.2e}, allowed {allowed:.2e} (its own fp32 "
            f"differs by {rounding:.2e})"
        )
    return {
        "prompts": {"seed": PROMPT_SEED, "lengths": list(PROMPT_LENGTHS)},
        "max_logit_difference": difference,
        "largest_logit": scale,
        "fp32_rounding": rounding,
        "tolerance": allowed,
        "same_choice": float((ours_TV.argmax(-1) == exact_TV.argmax(-1)).float().mean()),
    }


def export_hf(
    engine: Engine,
    folder: str | Path,
    *,
    dtype: str = "fp32",
    carry_from: str | Path | None = None,
    shard_bytes: int = 5 << 30,
) -> dict[str, Any]:
    """Write the engine's weights as a Hugging Face folder and prove it. Collective; rank 0 writes. Returns the proof on
    every rank.

    Adapters are merged. Tokenizer and generation files are copied from the folder `carry_from`.
    """
    if dtype not in TOLERANCE:
        raise ConfigError(f"dtype: '{dtype}' must be fp32 or bf16")
    folder, carried = Path(folder), Path(carry_from) if carry_from is not None else None
    config: ModelConfig = engine.build.model  # type: ignore[attr-defined]
    lora = engine.build.lora  # type: ignore[attr-defined]
    stream = hf_tensors(config, merged(engine.parameters(), config, lora) if lora else engine.parameters(), dtype)
    first = dist.get_rank() == 0
    stated = {}
    if first:
        (folder / PROOF).unlink(missing_ok=True)
        stated = write_folder(folder, config, stream, dtype, carried, shard_bytes)
    else:
        for _ in stream:
            pass
    logits = engine_logits(engine, proof_batch(config))
    outcome: list[Any] = [None]
    if first:
        try:
            precision = "bf16" if "bf16" in (dtype, engine.precision.params) else "fp32"
            outcome = [(True, prove(folder, config, stated, logits, precision))]
        except Exception as error:
            outcome = [(False, error)]
    dist.broadcast_object_list(outcome, src=0)
    ok, value = outcome[0]
    if not ok:
        raise value
    return value
