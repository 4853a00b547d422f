"""The machines, and the constants of the time model with where each comes from.

Fitted: measured by us on one H200 (torch 2.11, TransformerEngine 2.11, megatron-core 0.16.1), but for the one constant
in `PUBLISHED`, which only several GPUs show and published figures decide. Steps and the kernels seen in them are those
of run 20261115-fbcbbfc0 in benchmarks/results.csv. fp8 matmuls are assumed to reach the same share of their peak: in
the fp8 step of that run those of the layers took 0.55 of their time in bf16. Data sheet: the maker's number. Assumed:
neither measured here nor fitted; a topology's usual share of its data sheet.
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
    domain: int = 8  # GPUs that NVLink joins


# arithmetic without sparsity. A DGX A100 has 200 Gb/s a GPU, those with ConnectX-8 800, the others 400; an A100 has no
# fp8, and works in bf16 instead
GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 80e9, 312e12, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    "h20": Gpu("H20 96 GB", 96e9, 148e12, 296e12, 44e12, 4.0e12, 450e9, 50e9),
    "h100": Gpu("H100 SXM 80 GB", 80e9, 989e12, 1979e12, 67e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 SXM 141 GB", 141e9, 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu("B200 SXM 180 GB", 180e9, 2250e12, 4500e12, 75e12, 8.0e12, 900e9, 50e9),
    "b300": Gpu("B300 SXM 288 GB", 288e9, 2250e12, 4500e12, 75e12, 8.0e12, 900e9, 100e9),
    "gb200": Gpu("GB200 NVL72 186 GB", 186e9, 2500e12, 5000e12, 80e12, 8.0e12, 900e9, 50e9, 4, 72),
    "gb300": Gpu("GB300 NVL72 288 GB", 288e9, 2500e12, 5000e12, 80e12, 8.0e12, 900e9, 100e9, 4, 72),
}


@dataclass(frozen=True)
class Constants:
    """Shares of the data sheet that are reached, and fixed costs."""

    # of the peak, beside the operands' traffic; fitted: three head matmuls of 16384 x 151936, 87.0 ms at 4096, 32.4 at
    # 1536
    gemm: float = 0.78
    # fp32 operations for a query, a key and a head, in both passes, beside attention's products at the matmuls' share;
    # fitted: attention's kernels, 49.7 ms in the 1.5B step and 32.9 in that with experts (heads of 128), 7.0 in the
    # video model's (heads of 64)
    softmax: float = 61.0
    bandwidth: float = 0.886  # of the data sheet; fitted: copy 4254 of 4800 GB/s
    loss_bytes: float = 46.0  # per logit; fitted: megatron-core's fused cross-entropy, 32768 x 18992 in 6.75 ms
    own_loss_bytes: float = 6.3  # per logit; fitted: this project's vocab-parallel kernel at the same shape, 0.92 ms
    slack: float = 1.0  # everything between and beside those kernels; fitted in timing.py on megatron-core's dense step
    own_slack: float = 1.0  # likewise for this engine, on its dense step
    # time of the experts' part over what its arithmetic and traffic take; fitted in measured.py once it was measured
    experts: float = 1.0
    own_experts: float = 1.0  # likewise for this engine
    nvlink: float = 0.80  # of the data sheet; assumed
    network: float = 0.85  # of the data sheet; assumed: fat tree without oversubscription
    tensor_exposed: float = 0.5  # share of tensor-parallel traffic not hidden behind matmuls; assumed
    forward: float = 0.29  # of a layer's kernels; seen: 79 of 268 ms in the 1.5B step, and of 270 in megatron-core's
    # of the host for one pass of a layer, module by module; fitted: TransformerEngine's forward pass in the 1.5B step,
    # where each layer's kernels take 2.8 ms and the device then waits for 0.6, with megatron-core and with this engine
    # around it (in fp8: 2.3 and 1.8)
    layer_s: float = 3.4e-3
    # likewise for this engine's dense layer in halves; fitted: the video model's step of 44.2 ms
    own_layer_s: float = 1.25e-3
    # to give out one kernel; fitted: two chains of tiny ones, 43 in 0.476 ms and 40,960 in 589.7 ms (11.1 and 14.4 us)
    host_s: float = 12.7e-6
    # more with experts, in both passes: routing and sorting; counted in megatron-core 0.16.1
    router_kernels: float = 24.0
    # more for each expert on the GPU: three products of two matrices, as a grouped matmul gives them out
    expert_kernels: float = 6.0
    # likewise for this engine: grouped, but for the gradients of its two weights; seen: 1,024 such products in 4 layers
    # of 128 experts
    own_expert_kernels: float = 2.0
    # of this engine's step while the device has nothing to do, before and after the layers, and more for each weight;
    # fitted: a step less its kernels is 5.0 ms for the video model by graphs (75 weights) and 19.2 for that with
    # experts (1,055)
    own_step_s: float = 3.9e-3
    own_weight_s: float = 14.5e-6
    tile: float = 128.0  # rows of a matmul's tile: the last one of every expert is half empty on average
    hop_s: float = 8e-6  # latency of one step of a ring between nodes; assumed
    # of the device in a pass with experts on several GPUs, while the host reads how many tokens go where before it can
    # give out the rest; not where tokens are dropped, as their numbers are then known, nor with DeepEP and HybridEP,
    # whose kernels find them. Published figures decide it (`published.fit`): one GPU exchanges nothing
    count_s: float = 2.6e-3


PUBLISHED = ("count_s",)  # the constants that published figures decide


# One H200 step of Qwen2.5-1.5B, 4 x 4096 tokens, fp32 master weights: megatron-core with TransformerEngine's layers,
# and this engine
ANCHOR_S = 16384 / 44440.8
OWN_ANCHOR_S = 16384 / 49721.7
