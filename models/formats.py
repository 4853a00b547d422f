"""Weights as public releases left them: each reader gives Hugging Face names and tensors, whatever the files are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError
from ..core.files import read_json
from .config import ModelConfig
from .families import FAMILIES, hf_names, parameter_names
from .folder import (
    HFFolder,
    by_name,
    check_files,
    check_left,
    load_pickle,
    open_safetensors,
    unpickle,
    weight_files,
)


@dataclass(frozen=True)
class HFTensors:
    """Named tensors, read when asked for."""

    names: frozenset[str]
    get: Callable[[str], torch.Tensor]


_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "module.")


def plain_name(name: str) -> str:
    """A name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def strip_prefix(state: dict[str, torch.Tensor], where: Path) -> dict[str, torch.Tensor]:
    """Names as transformers has them, from a state dict of a model held inside others."""
    state = {plain_name(k): v for k, v in state.items()}
    anchor = next((k for k in state if k.endswith("model.embed_tokens.weight")), None)
    if anchor is None:
        raise ConfigError(f"{where}: has no tensor that ends with 'model.embed_tokens.weight'")
    prefix = anchor.removesuffix("model.embed_tokens.weight")
    left = [k for k in state if not k.startswith(prefix) and not _twin_part(k)]
    if left:
        raise ConfigError(f"{where}: the model has no place for tensor '{left[0]}' ({len(left)} such)")
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def from_dict(state: dict[str, torch.Tensor]) -> HFTensors:
    return HFTensors(frozenset(state), state.__getitem__)


def read_bin(path: Path) -> HFTensors:
    """One pickled state dict, such as WebRL's `pytorch_actor.bin` or the trunk of its `pytorch_critic.bin`."""
    return from_dict(strip_prefix(load_pickle(path), path))


def _twin_part(name: str) -> re.Match[str] | None:
    return None if "layers" in name else re.search(r"(?:^|\.)([A-Za-z_]*?)([12])\.(\d+)\.(weight|bias)$", name)


def twin_heads(path: Path) -> dict[str, torch.Tensor]:
    """The two value heads of WebRL's `pytorch_critic.bin`, under the names of our twin heads; {} for a file that has
    none and is not called a critic.
    """
    state = {plain_name(k): v for k, v in load_pickle(path).items()}
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in state.items():
        if match := _twin_part(name):
            found.setdefault(match[2], []).append((f"{match[3]}.{match[4]}", tensor))
    if not found and "critic" not in path.name:
        return {}
    if set(found) != {"1", "2"} or any(len(parts) != 6 for parts in found.values()):
        raise ConfigError(f"{path}: has no two value heads of three linear layers each")
    return {
        f"value_head.heads.{int(which) - 1}.{rest}": tensor for which, parts in found.items() for rest, tensor in parts
    }


_FURTHER = re.compile(r"model_\d+\.safetensors")


def read_folder(folder: Path) -> HFTensors:
    """A Hugging Face folder, held against its proof where it has one."""
    files = HFFolder(folder)
    return HFTensors(frozenset(files.names()), files.get)


def read_safetensors(folder: Path) -> HFTensors:
    """Every safetensors file of a folder that accelerate wrote."""
    indexed = (folder / "model.safetensors.index.json").exists()
    # accelerate numbers the further models of one saved state: model_1.safetensors belongs to another network
    found = sorted(path.name for path in folder.glob("model*.safetensors") if not _FURTHER.fullmatch(path.name))
    names = weight_files(folder) if indexed else found
    handles: dict[str, tuple[Any, str]] = {}
    for name in names:
        handle = open_safetensors(folder / name)
        handles.update({plain_name(key): (handle, key) for key in handle.keys()})
    return HFTensors(frozenset(handles), lambda name: handles[name][0].get_tensor(handles[name][1]))


def read_peft(folder: Path, base: HFTensors) -> HFTensors:
    """A PEFT LoRA folder folded into its base model."""
    check_files(folder)
    settings = read_json(folder / "adapter_config.json")
    if (
        not isinstance(settings, dict)
        or settings.get("peft_type") != "LORA"
        or settings.get("use_dora")
        or settings.get("bias", "none") != "none"
    ):
        raise ConfigError(f"{folder}/adapter_config.json: only plain LoRA without bias is supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ConfigError(
            f"{folder}/adapter_config.json: r = {rank!r} and lora_alpha = {alpha!r}; a positive rank and a number are "
            "needed"
        )
    alphas = settings.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(isinstance(value, int | float) for value in alphas.values()):
        raise ConfigError(f"{folder}/adapter_config.json: alpha_pattern: must give a number for each name")

    def scale(target: str, rank: int) -> float:
        """PEFT's: the first pattern that the end of a module's name matches says its alpha."""
        own = next((value for key, value in alphas.items() if re.match(rf"(.*\.)?({key})$", target)), alpha)
        return own / (rank**0.5 if settings.get("use_rslora") else rank)

    weights = folder / "adapter_model.safetensors"
    state = load_pickle(folder / "adapter_model.bin") if not weights.exists() else None
    handle = open_safetensors(weights) if state is None else None
    names = set(state if handle is None else handle.keys())  # type: ignore[arg-type]
    adapters: dict[str, dict[str, str]] = {}
    for name in names:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if match is None:
            raise ConfigError(f"{folder}: adapter tensor '{name}' is not supported")
        adapters.setdefault(match[1], {})[match[2]] = name
    half = sorted(target for target, pair in adapters.items() if len(pair) < 2)
    if half:
        raise ConfigError(f"{folder}: the adapter of '{half[0]}' has lora_{next(iter(adapters[half[0]]))} only")
    missing = sorted(target for target in adapters if f"{target}.weight" not in base.names)
    if missing:
        raise ConfigError(f"{folder}: the base model has no tensor '{missing[0]}.weight'")

    def get(name: str) -> torch.Tensor:
        tensor = base.get(name)
        pair = adapters.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return tensor
        read = state.__getitem__ if handle is None else handle.get_tensor  # type: ignore[union-attr]
        a, b = read(pair["A"]).float(), read(pair["B"]).float()
        if b.shape[1] != a.shape[0] or (b.shape[0], a.shape[1]) != tuple(tensor.shape):
            raise ConfigError(f"{folder}: the adapter of '{name}' is {list(b.shape)} x {list(a.shape)}")
        return (tensor.float() + scale(name.removesuffix(".weight"), len(a)) * (b @ a)).to(tensor.dtype)

    return HFTensors(base.names, get)


def read_verl_fsdp(folder: Path) -> HFTensors:
    """verl's `model_world_size_W_rank_R.pt`: parts of any number of ranks, as DTensors or as plain slices of the
    first dimension.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    found = {tuple(map(int, re.findall(r"\d+", p.name))): p for p in folder.glob("model_world_size_*_rank_*.pt")}
    worlds = {world for world, _ in found}
    if len(worlds) != 1 or len(found) != next(iter(worlds)):
        raise ConfigError(
            f"{folder}: needs the files of all ranks of one world size, has {len(found)} of {sorted(worlds)}"
        )
    states = [{plain_name(k): v for k, v in load_pickle(path).items()} for _, path in sorted(found.items())]

    def get(name: str) -> torch.Tensor:
        parts = [state[name] for state in states]
        if isinstance(parts[0], DTensor):
            placements = [p for p in parts[0].placements if not isinstance(p, Replicate)]
            local = [part._local_tensor for part in parts]
            if not placements:
                return local[0]
            if len(placements) > 1 or not isinstance(placements[0], Shard):
                raise ConfigError(
                    f"{folder}: '{name}' is cut as {placements}; only FSDP over one dimension is supported"
                )
            return torch.cat(local, placements[0].dim)
        return parts[0] if parts[0].dim() == 0 else torch.cat(parts)

    return HFTensors(frozenset(states[0]), get)


def read_verl_megatron(folder: Path, config: ModelConfig) -> HFTensors:
    """verl's `mp_rank_TT_PPP/model.pt`: fused parts cut over tensor ranks, layers numbered per pipeline rank. Not
    verified on its files.
    """
    ranks: dict[tuple[int, int], list[dict[str, torch.Tensor]]] = {}
    for path in sorted(folder.glob("mp_rank_*/model.pt")):
        tensor_rank, *pipeline = map(int, re.findall(r"\d+", path.parent.name))
        state = unpickle(path)
        chunks = [by_name(chunk, path) for chunk in (state if isinstance(state, list) else [state])]
        ranks[tensor_rank, pipeline[0] if pipeline else 0] = [{plain_name(k): v for k, v in c.items()} for c in chunks]
    if not ranks:
        raise ConfigError(f"{folder}: has no mp_rank_*/model.pt")
    tensor_size, stages = 1 + max(t for t, _ in ranks), 1 + max(p for _, p in ranks)
    if len(ranks) != tensor_size * stages:
        raise ConfigError(f"{folder}: has {len(ranks)} of {tensor_size} x {stages} ranks' files")
    merged: dict[str, torch.Tensor] = {}
    offset = 0
    for chunk in range(len(ranks[0, 0])):
        for stage in range(stages):
            parts = [ranks[t, stage][chunk] for t in range(tensor_size)]
            local = {int(m[1]) for k in parts[0] if (m := re.match(r"model\.layers\.(\d+)\.", k))}
            for name in parts[0]:
                target = re.sub(r"model\.layers\.(\d+)\.", lambda m, o=offset: f"model.layers.{int(m[1]) + o}.", name)
                merged.update(_join_verl(target, [part[name] for part in parts], config))
            offset += len(local)
    return from_dict(merged)


def _join_verl(name: str, parts: list[torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    if ".qkv_proj." in name:
        size = len(parts)
        query, key = config.heads * config.head_dim // size, config.kv_heads * config.head_dim // size
        cuts = [query, key, key]
        split = zip(*[part.split(cuts) for part in parts], strict=True)
        return {
            name.replace("qkv_proj", f"{x}_proj"): torch.cat(list(rows)) for x, rows in zip("qkv", split, strict=True)
        }
    if ".gate_up_proj." in name:
        split = zip(*[part.chunk(2) for part in parts], strict=True)
        return {
            name.replace("gate_up_proj", f"{x}_proj"): torch.cat(list(rows))
            for x, rows in zip(("gate", "up"), split, strict=True)
        }
    if "norm" in name:
        return {name: parts[0]}
    joined = torch.cat(parts, 1 if "o_proj" in name or "down_proj" in name else 0)
    vocabulary = "embed_tokens" in name or "lm_head" in name
    return {name: joined[: config.vocab] if vocabulary else joined}


def check_complete(tensors: HFTensors, config: ModelConfig, where: Path) -> None:
    """Refuse a source that lacks a tensor or has one that no part of the model corresponds to."""
    family = FAMILIES[config.family]
    wanted = {hf for name in parameter_names(config) for hf in hf_names(family, name)}
    missing = sorted(wanted - tensors.names)
    if missing:
        raise ConfigError(f"{where}: has no tensor '{missing[0]}' ({len(missing)} missing)")
    check_left(set(tensors.names - wanted), config, tensors.get, where)
