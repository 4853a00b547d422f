"""Tries every layout of a step on a cluster, keeps those that fit, and remembers why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .layout import Layout, Work, impossible
from .machine import Constants, Gpu
from .memory import Memory, memory, too_large
from .timing import StepTime, step_time

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """A layout that runs, with its cost."""

    layout: Layout
    memory: Memory
    time: StepTime


@dataclass
class Found:
    """The layouts that fit, fastest first, and the reasons of the rest."""

    fitting: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Layout, str]] = field(default_factory=list)

    def reasons(self) -> dict[str, int]:
        """How often each kind of reason ruled a layout out."""
        counted: dict[str, int] = {}
        for _, reason in self.refused:
            kind = reason.partition(":")[0]
            counted[kind] = counted.get(kind, 0) + 1
        return dict(sorted(counted.items(), key=lambda pair: -pair[1]))


def layouts(work: Work, gpus: int, gpu: Gpu) -> Iterator[Layout]:
    """All layouts worth a look: tensor parallelism stays within NVLink, products divide the GPUs."""
    for tensor in (t for t in SIZES if t <= min(gpu.domain, gpus)):
        for pipeline in (p for p in SIZES if tensor * p <= gpus and p <= work.model.layers):
            for context in (c for c in SIZES if tensor * pipeline * c <= gpus and c <= max(1, work.sequence // 4096)):
                if gpus % (tensor * pipeline * context):
                    continue
                for expert in [e for e in SIZES if e <= work.model.experts] or [1]:
                    if expert > gpus // pipeline:
                        continue
                    for virtual in (
                        [v for v in range(1, 13) if work.model.layers % (pipeline * v) == 0] if pipeline > 1 else [1]
                    ):
                        for microbatch in (1, 2, 4, 8):
                            for recompute in ("none", "full"):
                                yield Layout(gpus, tensor, pipeline, virtual, context, expert, microbatch, recompute)


def search(work: Work, gpus: int, gpu: Gpu, cache_tokens: int = 0, constants: Constants | None = None) -> Found:
    """All layouts judged: refused by the engine's rules, too large, or timed."""
    found = Found()
    for layout in layouts(work, gpus, gpu):
        reason = impossible(layout, work)
        used = memory(work, layout, cache_tokens) if reason is None else None
        reason = reason or too_large(used, gpu)  # type: ignore[arg-type]
        if reason or used is None:
            found.refused.append((layout, reason or ""))
        else:
            found.fitting.append(Candidate(layout, used, step_time(work, layout, gpu, constants)))
    found.fitting.sort(
        key=lambda c: (c.time.total, c.layout.tensor * c.layout.pipeline * c.layout.context, c.layout.microbatch)
    )
    return found


def explain(best: Candidate, found: Found) -> list[str]:
    """Why the best is the best: what its step spends its time on, and what its neighbours would cost."""
    t = best.time
    parts = {k: getattr(t, k) for k in ("compute", "tensor", "expert", "context", "bubble", "data", "optimizer")}
    shares = ", ".join(f"{k} {100 * v / t.total:.0f} %" for k, v in parts.items() if v > 0.005 * t.total)
    lines = [f"time goes to: {shares}"]
    for name in ("tensor", "pipeline", "context", "expert", "recompute"):
        chosen = getattr(best.layout, name)
        others = [c for c in found.fitting if getattr(c.layout, name) != chosen]
        if others:
            other = others[0]
            lines.append(
                f"best with another {name}: {other.layout.text()}, {100 * (other.time.total / t.total - 1):+.0f} % time"
            )
        elif any(getattr(layout, name) != chosen for layout, _ in found.refused):
            layout, reason = next(
                (layout, reason) for layout, reason in found.refused if getattr(layout, name) != chosen
            )
            lines.append(f"no other {name} works; e.g. {layout.text()}: {reason}")
    return lines
