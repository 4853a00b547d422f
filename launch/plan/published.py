"""Published training figures on H100, held out: no constant of the model was fitted on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...models.geometry import GEOMETRIES, flops_per_token
from .layout import Layout, Work
from .machine import GPUS
from .timing import step_time


@dataclass(frozen=True)
class Published:
    """One figure: tokens per second and GPU, and the layout it was published with, or that we assume."""

    group: Literal["dense", "experts", "other software"]
    model: str
    precision: Literal["bf16", "fp8"]
    layout: Layout
    sequence: int
    batch: int
    figure: float  # tokens per second and GPU; below 1: MFU of the bf16 peak
    source: str
    assumed: str = ""  # what the source does not say

    @property
    def work(self) -> Work:
        return Work(GEOMETRIES[self.model], self.sequence, self.batch, self.precision, own=False)

    @property
    def tokens_per_s(self) -> float:
        if self.figure >= 1:
            return self.figure
        return self.figure * GPUS["h100"].bf16 / flops_per_token(self.work.model, self.sequence)

    def predicted(self) -> float:
        return step_time(self.work, self.layout, GPUS["h100"]).tokens_per_s

    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted() / self.tokens_per_s - 1.0


BRIDGE, TITAN, MEGATRON = "Megatron-Bridge", "torchtitan", "Megatron-LM README"
_8B, _405B = Layout(8, fsdp=True, recompute="selective"), Layout(1024, tensor=8, pipeline=8, virtual=8, context=2)
_70B = Layout(64, tensor=4, pipeline=8, virtual=5)
_235B = Layout(256, tensor=2, pipeline=8, virtual=4, expert=32, overlap_experts=True)
_DROP = replace(_235B, overlap_experts=False, drop=True)
_OSS = Layout(64, pipeline=4, expert=8, recompute="selective")
_SHOWN = "tokens dropped; exchange not hidden, as in its recipe"
_HIDDEN = "exchange hidden, as its recipe asks"

# every H100 row of a decoder that this project can describe, in the makers' summaries 25.09 to 26.06 and README
# (DeepSeek-V3 is left out)
HELD_OUT = (
    Published("dense", "llama3-8b", "fp8", _8B, 8192, 128, 14079, f"{BRIDGE} 25.09", "selective recompute"),
    Published("dense", "llama3-8b", "fp8", _8B, 8192, 128, 14451, f"{BRIDGE} 25.11", "selective recompute"),
    Published("dense", "llama3-70b", "fp8", _70B, 8192, 128, 1619, f"{BRIDGE} 25.09"),
    Published("dense", "llama3-70b", "fp8", _70B, 8192, 128, 1602, f"{BRIDGE} 25.11"),
    Published("dense", "llama3-70b", "fp8", _70B, 8192, 256, 1621, f"{BRIDGE} 26.02"),
    Published("dense", "llama3-70b", "fp8", _70B, 8192, 256, 1664, f"{BRIDGE} 26.04", "GBS of 26.02"),
    Published("dense", "llama3-405b", "fp8", _405B, 8192, 512, 302, f"{BRIDGE} 25.09"),
    Published("dense", "llama3-405b", "fp8", _405B, 8192, 512, 292, f"{BRIDGE} 25.11"),
    Published("dense", "llama3-405b", "fp8", _405B, 8192, 1536, 311, f"{BRIDGE} 26.02"),
    Published("dense", "llama3-405b", "fp8", _405B, 8192, 1536, 328, f"{BRIDGE} 26.04", "GBS of 26.02"),
    Published(
        "dense",
        "gpt3-175b",
        "bf16",
        Layout(96, tensor=4, pipeline=8, virtual=6),
        4096,
        1152,
        0.47,
        MEGATRON,
        "TP4 PP8 VPP6 MBS1",
    ),
    Published(
        "dense",
        "gpt3-175b",
        "bf16",
        Layout(4608, tensor=8, pipeline=8, virtual=6),
        4096,
        1152,
        0.42,
        MEGATRON,
        "TP8 PP8 VPP6 MBS1",
    ),
    Published(
        "experts",
        "qwen3-30b-a3b",
        "fp8",
        Layout(16, 1, 2, 24, 1, 8, 2, drop=True),
        4096,
        512,
        10494,
        f"{BRIDGE} 25.09",
        "tokens dropped: no host waits",
    ),
    Published("experts", "qwen3-30b-a3b", "fp8", Layout(16, 1, 2, 24, 1, 8, 2), 4096, 512, 5275, f"{BRIDGE} 25.11"),
    Published("experts", "qwen3-30b-a3b", "fp8", Layout(16, 1, 2, 12, 1, 8, 1), 4096, 1024, 5113, f"{BRIDGE} 26.02"),
    Published(
        "experts",
        "qwen3-30b-a3b",
        "fp8",
        Layout(16, expert=16, once_a_node=True),
        4096,
        1024,
        8826,
        f"{BRIDGE} 26.06",
        "HybridEP",
    ),
    Published("experts", "qwen3-235b-a22b", "fp8", _DROP, 4096, 2048, 1204, f"{BRIDGE} 25.09", _SHOWN),
    Published("experts", "qwen3-235b-a22b", "fp8", _235B, 4096, 2048, 1575, f"{BRIDGE} 25.11", _HIDDEN),
    Published("experts", "qwen3-235b-a22b", "fp8", _235B, 4096, 8192, 1633, f"{BRIDGE} 26.02", _HIDDEN),
    Published(
        "experts", "qwen3-235b-a22b", "fp8", _235B, 4096, 8192, 1712, f"{BRIDGE} 26.04", f"layout of 26.02; {_HIDDEN}"
    ),
    Published(
        "experts",
        "gpt-oss-120b",
        "bf16",
        replace(_OSS, microbatch=4),
        4096,
        512,
        5630,
        f"{BRIDGE} 25.11",
        "full attention",
    ),
    Published("experts", "gpt-oss-120b", "bf16", _OSS, 4096, 1280, 5993, f"{BRIDGE} 26.02", "full attention"),
    Published("other software", "llama3-8b", "bf16", _8B, 8192, 8, 6667, f"{TITAN} Dec 2024", "500 W GPUs, MBS1"),
    Published("other software", "llama3-8b", "fp8", _8B, 8192, 8, 8532, f"{TITAN} Dec 2024", "500 W GPUs, MBS1"),
    Published(
        "other software",
        "llama3-70b",
        "bf16",
        Layout(256, 8, fsdp=True, recompute="full"),
        8192,
        512,
        597,
        f"{TITAN} Jun 2025",
        "full recompute",
    ),
)


def mean_error(group: str | None = None) -> float:
    """Mean absolute error of a group, or of all held-out figures."""
    errors = [abs(p.error()) for p in HELD_OUT if group in (None, p.group)]
    return sum(errors) / len(errors)
