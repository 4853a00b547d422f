"""The machines, and the constants of the time model with where each comes from.

Fitted: measured by us on one H200 (torch 2.11, TransformerEngine 2.11, megatron-core), never on a published figure.
fp8 matmuls are assumed to reach the same share of their peak: our two fp8 steps (0.352 and 0.561 s) disagree too much to fit anything.
Data sheet: the maker's number. Assumed: neither measured here nor fitted; a topology's usual share of its data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator, by its data sheet. Rates in FLOP/s and bytes/s."""

    name: str
    memory: float
    bf16: float
    fp8: float
    fp32: float  # without tensor cores
    bandwidth: float
    nvlink: float  # one direction
    network: float  # one direction, this GPU's share of the node's
    gpus_per_node: int = 8


GPUS = {
    "h100": Gpu("H100 SXM 80 GB", 80e9, 989e12, 1979e12, 67e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 SXM 141 GB", 141e9, 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9),
}


@dataclass(frozen=True)
class Constants:
    """Shares of the data sheet that are reached, and fixed costs."""

    gemm: float = (
        0.78  # of the peak, beside the operands' traffic; fitted: three head matmuls of 16384 x 151936, 87.0 ms at 4096, 32.4 at 1536
    )
    attention: float = 0.50  # of the peak; assumed: cuDNN and FlashAttention-3, forward and backward together
    bandwidth: float = 0.886  # of the data sheet; fitted: copy 4254 of 4800 GB/s
    loss_bytes: float = 46.0  # per logit; fitted: megatron-core's fused cross-entropy, 32768 x 18992 in 6.75 ms
    own_loss_bytes: float = 6.3  # per logit; fitted: this project's vocab-parallel kernel at the same shape, 0.92 ms
    slack: float = 1.0  # everything between and beside those kernels; fitted in timing.py on one training step
    experts: float = 1.0  # time of the experts' part over what its arithmetic and traffic take; fitted in measured.py once it was measured
    own_experts: float = 1.0  # likewise for this engine
    nvlink: float = 0.80  # of the data sheet; assumed
    network: float = 0.85  # of the data sheet; assumed: fat tree without oversubscription
    tensor_exposed: float = 0.5  # share of tensor-parallel traffic not hidden behind matmuls; assumed
    host_s: float = (
        12.7e-6  # to give out one kernel; fitted: two chains of tiny ones, 43 in 0.476 ms and 40,960 in 589.7 ms (11.1 and 14.4 us)
    )
    layer_kernels: float = 110.0  # of a dense layer, forward and backward; counted in megatron-core 0.16.1 with this project's layers
    router_kernels: float = 24.0  # more with experts: routing and sorting; counted likewise
    expert_kernels: float = 6.0  # more for each expert on the GPU: three products of two matrices, as a grouped matmul gives them out
    own_expert_kernels: float = 2.0  # likewise for this engine: grouped, but for the gradients of the two weights of each
    tile: float = 128.0  # rows of a matmul's tile: the last one of every expert is half empty on average
    hop_s: float = 8e-6  # latency of one step of a ring between nodes; assumed


# One H200 step of Qwen2.5-1.5B, 4 x 4096 tokens, TransformerEngine layers, distributed optimizer, fused cross-entropy (mean of two runs)
ANCHOR_BF16_S = (0.3779 + 0.3618) / 2
ANCHOR_PEAK_BYTES = 80.6 * 2**30
