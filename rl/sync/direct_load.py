"""Hugging Face tensors as a rollout engine's own parameters, where the two differ only by joined linears and padded
vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .flat_buffer import Entry


@dataclass(frozen=True)
class Plan:
    """The parameter of each tensor; the parts of each parameter, in order, and its rows."""

    parameter: dict[str, str]
    parts: dict[str, list[str]]
    rows: dict[str, int]


def plan_copies(
    entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], joined_modules: Mapping[str, Sequence[str]]
) -> Plan | None:
    """A plan that fills every parameter exactly, or None. `joined_modules` gives the parts of a joined linear, such as
    qkv_proj: q_proj, k_proj, v_proj."""
    owner = {part: whole for whole, parts in joined_modules.items() for part in parts}
    shape_of = {e["name"]: tuple(e["shape"]) for e in entries}
    parameter: dict[str, str] = {}
    for name in shape_of:
        path = name.split(".")
        if name not in shapes and len(path) > 1 and path[-2] in owner:
            path[-2] = owner[path[-2]]
        parameter[name] = ".".join(path)
    if set(parameter.values()) != set(shapes):
        return None
    parts: dict[str, list[str]] = {}
    for name, target in parameter.items():
        parts.setdefault(target, []).append(name)
    for target, names in parts.items():
        if names != [target]:
            order = list(joined_modules.get(target.split(".")[-2], ()))
            names.sort(key=lambda n: order.index(n.split(".")[-2]))
            if len(names) != len(order):
                return None
        if not _fits([shape_of[n] for n in names], shapes[target], target):
            return None
    return Plan(parameter, parts, {target: shape[0] for target, shape in shapes.items()})


def _fits(found: list[tuple[int, ...]], wanted: tuple[int, ...], name: str) -> bool:
    rows = sum(shape[0] for shape in found)
    padded = name.rsplit(".", 2)[-2] in ("embed_tokens", "lm_head")  # vocabularies are padded with rows of zeros
    return all(s[1:] == wanted[1:] for s in found) and (rows == wanted[0] or (padded and rows < wanted[0]))


def joined(tensors: Iterable[tuple[str, torch.Tensor]], plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole parameters, each as soon as its parts have arrived."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        target = plan.parameter[name]
        found = waiting.setdefault(target, {})
        found[name] = tensor
        names = plan.parts[target]
        if len(found) < len(names):
            continue
        del waiting[target]
        whole = torch.cat([found[n] for n in names]) if len(names) > 1 else tensor
        if len(whole) < plan.rows[target]:
            whole = F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, plan.rows[target] - len(whole)))
        yield target, whole
