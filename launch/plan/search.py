"""Tries every layout of a step on a cluster, keeps those that fit, and remembers why the others do not."""

from __future__ import annotations

from collections import Counter
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
        """How often each kind of reason ruled a layout out, the commonest first."""
        return dict(Counter(reason.partition(":")[0] for _, reason in self.refused).most_common())


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
        if reason := impossible(layout, work):
            found.refused.append((layout, reason))
            continue
        used = memory(work, layout, cache_tokens)
        if reason := too_large(used, gpu):
            found.refused.append((layout, reason))
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
        other = next((c for c in found.fitting if getattr(c.layout, name) != chosen), None)
        refused = next((pair for pair in found.refused if getattr(pair[0], name) != chosen), None)
        if other is not None:
            lines.append(
                f"best with another {name}: {other.layout.text()}, {100 * (other.time.total / t.total - 1):+.0f} % time"
            )
        elif refused is not None:
            layout, reason = refused
            lines.append(f"no other {name} works; e.g. {layout.text()}: {reason}")
    return lines
