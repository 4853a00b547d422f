"""Seconds of one optimizer step: matmuls, attention, memory traffic, communication, pipeline bubble, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from ...models.geometry import GEOMETRIES, count, flops_per_token, mlp_width
from .layout import Layout, Work
from .machine import ANCHOR_S, GPUS, OWN_ANCHOR_S, Constants, Gpu
from .measured import Measured, expert_steps
from .memory import parameters_here


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go, on the slowest pipeline stage."""

    compute: float
    tensor: float  # exposed tensor-parallel traffic
    expert: float  # exposed token exchange
    context: float
    stages: float  # exposed activations between pipeline stages
    bubble: float
    data: float  # exposed gradient and weight traffic
    optimizer: float
    tokens_per_gpu: float  # of one step
    flops_per_gpu: float

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.tensor
            + self.expert
            + self.context
            + self.stages
            + self.bubble
            + self.data
            + self.optimizer
        )

    @property
    def tokens_per_s(self) -> float:
        """Per GPU."""
        return self.tokens_per_gpu / self.total

    def mfu(self, gpu: Gpu) -> float:
        """Of the bf16 peak, whatever the precision."""
        return self.flops_per_gpu / self.total / gpu.bf16


@cache
def fitted() -> Constants:
    """The constants with those that training steps on an H200 decide: two dense, and one with experts where the
    record holds one.
    """
    constants, one = Constants(), Layout(gpus=1, microbatch=4)
    for name, own, seconds in (("slack", False, ANCHOR_S), ("own_slack", True, OWN_ANCHOR_S)):
        work = Work(GEOMETRIES["qwen2.5-1.5b"], sequence=4096, batch=4, own=own)
        constants = replace(constants, **{name: _factor(name, work, one, seconds, constants)})
    for step in expert_steps():
        constants = replace(constants, **{step.constant: expert_factor(step, constants)})
    return constants


def expert_factor(step: Measured, constants: Constants) -> float:
    """The factor of the experts' part that gives the measured time; 1 where the host is slower than the device, as
    that tells nothing.
    """
    return _factor(step.constant, step.work, step.layout, step.seconds, constants)


def _factor(name: str, work: Work, layout: Layout, measured_s: float, constants: Constants) -> float:
    low, high = 0.1, 100.0

    def seconds(factor: float) -> float:
        return step_time(work, layout, GPUS["h200"], replace(constants, **{name: factor})).total

    if seconds(0.95) == seconds(1.0) or not seconds(low) < measured_s < seconds(high):
        return 1.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < measured_s else (low, middle)
    return high


def step_time(work: Work, layout: Layout, gpu: Gpu, constants: Constants | None = None) -> StepTime:
    """The time model. Everything is per GPU and per optimizer step."""
    c = constants or fitted()
    m = work.model
    tokens = layout.microbatch * work.sequence / layout.context  # of a microbatch on this GPU before tensor parallelism
    micro = max(1, layout.microbatches(work))
    layers = m.layers / layout.pipeline
    layer, tensor, expert, ring = _layer(work, layout, gpu, c, tokens)
    head = _matmul(tokens, m.hidden, m.padded_vocab / layout.tensor, gpu, c)
    head += (
        tokens
        * m.padded_vocab
        / layout.tensor
        * (c.own_loss_bytes if work.own else c.loss_bytes)
        / (c.bandwidth * gpu.bandwidth)
    )
    head *= _slack(work, c)
    each = layer + tensor + expert + ring
    mean = layers * each + head / layout.pipeline  # the head sits on the last stage: the others wait for it
    bubble = micro * (layers * each + head - mean) + (layout.pipeline - 1) * mean / layout.virtual
    return StepTime(
        compute=micro * (layers * layer + head / layout.pipeline),
        tensor=micro * layers * tensor,
        expert=micro * layers * expert,
        context=micro * layers * ring,
        stages=micro * _between_stages(work, layout, gpu, c, tokens, layers * each),
        bubble=bubble,
        # interleaved stages sum a chunk's gradients while the others' last microbatches still run
        data=_data(
            work, layout, gpu, c, (layers * each + head) * (layout.pipeline if layout.virtual > 1 else 1), micro
        ),
        optimizer=_optimizer(work, layout, gpu, c),
        tokens_per_gpu=work.batch * work.sequence / layout.gpus,
        flops_per_gpu=flops_per_token(m, work.sequence) * work.batch * work.sequence / layout.gpus,
    )


def _slack(work: Work, c: Constants) -> float:
    return c.own_slack if work.own else c.slack


def _matmul(
    rows: float, inner: float, columns: float, gpu: Gpu, c: Constants, *, fp8: bool = False, weights: float = 1.0
) -> float:
    """Forward and both backward products; `weights` matrices share the rows. The operands' traffic is not hidden."""
    operand = 1.0 if fp8 else 2.0
    moved = operand * (rows * inner + weights * inner * columns) + 2.0 * rows * columns
    return 3.0 * (
        2.0 * rows * inner * columns / (c.gemm * (gpu.fp8 if fp8 else gpu.bf16)) + moved / (c.bandwidth * gpu.bandwidth)
    )


def _layer(work: Work, layout: Layout, gpu: Gpu, c: Constants, tokens: float) -> tuple[float, float, float, float]:
    """Compute, and exposed tensor, expert and context traffic, of one layer and one microbatch, forward and
    backward.
    """
    m, counts = work.model, count(work.model)
    bandwidth = c.bandwidth * gpu.bandwidth
    shard = tokens / layout.tensor
    passes = 4.0 / 3.0 if layout.recompute == "full" else 1.0
    q, kv, wide, fp8, tp = (
        m.heads * m.head_dim,
        m.kv_heads * m.head_dim,
        mlp_width(m),
        work.precision == "fp8",
        layout.tensor,
    )
    matmul = _matmul(tokens, m.hidden, (q + 2 * kv) / tp, gpu, c, fp8=fp8) + _matmul(
        tokens, q / tp, m.hidden, gpu, c, fp8=fp8
    )
    if not m.experts:
        matmul += _matmul(tokens, m.hidden, 2 * m.ffn / tp, gpu, c, fp8=fp8) + _matmul(
            tokens, m.ffn / tp, m.hidden, gpu, c, fp8=fp8
        )
    pairs = shard * work.sequence * m.heads * (9.0 / 7.0 if layout.recompute == "full" else 1.0)
    attention = pairs * (7.0 * m.head_dim / (c.gemm * gpu.bf16) + c.softmax / gpu.fp32)
    traffic = shard * (60.0 * m.hidden + (20.0 if layout.recompute == "selective" else 16.0) * wide) * passes
    # gradients are added up in fp32
    traffic += 8.0 * (counts.attention + (0 if m.experts else counts.mlp)) / layout.tensor
    if fp8:  # inputs and gradients of every matmul are read, and written in two layouts
        traffic += (
            4.0 * shard * (2.0 * m.hidden + 2.0 * q + 2.0 * kv + (0.0 if m.experts else 2.0 * m.hidden + 3.0 * wide))
        )
    compute = matmul * passes + attention + traffic / bandwidth
    if m.experts:
        compute += _experts(work, layout, gpu, c, shard) * (c.own_experts if work.own else c.experts)
    compute *= _slack(work, c)
    forward, issue = c.forward * compute / passes, _issue(work, layout, c)
    compute = max(forward, issue) + max(compute - forward, issue * (2.0 if layout.recompute == "full" else 1.0))
    tensor = 0.0
    if layout.tensor > 1:
        width = (5.0 if m.experts else 10.0) * m.hidden
        width += 2.0 * (q + 2 * kv) if layout.tensor > m.kv_heads else 0.0  # ranks that share key heads
        tensor = (
            passes
            * tokens
            * width
            * 2.0
            * (layout.tensor - 1)
            / layout.tensor
            / (c.nvlink * gpu.nvlink)
            * c.tensor_exposed
        )
    ring = 0.0
    if layout.context > 1:
        speed = c.nvlink * gpu.nvlink if layout.tensor * layout.context <= gpu.domain else c.network * gpu.network
        moved = 3.0 * tokens * 4.0 * kv / layout.tensor * (layout.context - 1)
        ring = max(0.0, moved / speed - attention * _slack(work, c))
    return compute, tensor, _exchange(work, layout, gpu, c, shard, compute), ring


def _experts(work: Work, layout: Layout, gpu: Gpu, c: Constants, shard: float) -> float:
    """Router, sorting and the experts themselves in one layer, forward and backward, with the load balanced."""
    m, fp8 = work.model, work.precision == "fp8"
    copies, local = shard * m.experts_per_token, m.experts / layout.expert
    passes = 4.0 / 3.0 if layout.recompute == "full" else 1.0
    rows = copies + local * c.tile / 2.0
    matmul = _matmul(rows, m.hidden, 2 * m.expert_ffn, gpu, c, fp8=fp8, weights=local)
    matmul += _matmul(rows, m.expert_ffn, m.hidden, gpu, c, fp8=fp8, weights=local)
    matmul += 6.0 * shard * m.hidden * m.experts / (c.gemm * gpu.fp32)  # the router's product, in fp32
    # copies of a token read, written in the experts' order and added up; with an exchange also sent, received and
    # sorted, both ways
    traffic = (12.0 if layout.expert == 1 else 40.0) * copies * m.hidden * passes
    traffic += 8.0 * count(m).mlp / layout.expert  # gradients are added up in fp32
    if work.own:  # each pass copies the experts' weights side by side for its grouped products
        traffic += 8.0 * count(m).mlp / layout.expert * passes
    if fp8:
        traffic += 4.0 * copies * (2.0 * m.hidden + 3.0 * m.expert_ffn)
        if not layout.drop:  # rows are copied to and from places of a size that fp8 matmuls take
            traffic += 16.0 * copies * m.hidden * passes
    return matmul * passes + traffic / (c.bandwidth * gpu.bandwidth)


def _issue(work: Work, layout: Layout, c: Constants) -> float:
    """Seconds the host needs for one pass of a layer; the device waits for it where the kernels are many and small."""
    experts, each = work.model.experts, c.own_expert_kernels if work.own else c.expert_kernels
    if work.own and layout.tensor == 1 and not experts and work.precision == "bf16":  # in halves
        return c.own_layer_s
    return c.layer_s + (c.host_s * (c.router_kernels + each * experts / layout.expert) / 2.0 if experts else 0.0)


def _exchange(work: Work, layout: Layout, gpu: Gpu, c: Constants, shard: float, hide_s: float) -> float:
    """Tokens to their experts and back, forward and backward: over NVLink as far as it reaches, the rest over the
    network. And the wait for their numbers.
    """
    m = work.model
    if not m.experts or layout.expert == 1:
        return 0.0
    moved, top = 8.0 * shard * m.hidden, m.experts_per_token
    nodes = max(1.0, layout.expert / gpu.domain)
    away = top * (1.0 - 1.0 / nodes)  # experts of a token on other nodes; a copy goes to each
    if layout.once_a_node:
        away = (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** top)  # other nodes that it visits
    inside = moved * top * (1.0 - 1.0 / min(layout.expert, gpu.domain)) / (c.nvlink * gpu.nvlink)
    seconds = max(inside, moved * away / (c.network * gpu.network))
    waits = 0.0 if layout.drop or layout.once_a_node else 2.0 if layout.recompute == "full" else 1.0
    return (max(0.0, seconds - hide_s) if layout.overlap_experts else seconds) + waits * c.count_s


def _between_stages(work: Work, layout: Layout, gpu: Gpu, c: Constants, tokens: float, hide_s: float) -> float:
    """Activations to the next stage and gradients back, for one microbatch; interleaved stages send while they
    compute.
    """
    if layout.pipeline == 1:
        return 0.0
    speed = c.nvlink * gpu.nvlink if layout.gpus <= gpu.domain else c.network * gpu.network
    seconds = 2.0 * 2.0 * tokens / layout.tensor * work.model.hidden / speed * layout.virtual
    return max(0.0, seconds - hide_s) if layout.virtual > 1 else seconds


def _data(work: Work, layout: Layout, gpu: Gpu, c: Constants, hide_s: float, micro: int) -> float:
    """Gradients summed in fp32 and weights gathered in bf16; the published systems hide it behind a microbatch, this
    engine does not.
    """
    dense, expert = parameters_here(work, layout)
    copies, expert_copies = layout.data * layout.context, max(1, layout.gpus // (layout.pipeline * layout.expert))
    if copies == 1 and expert_copies == 1:
        return 0.0
    speed = c.nvlink * gpu.nvlink if layout.gpus <= gpu.domain else c.network * gpu.network
    moved = 6.0 * (dense * (1 - 1 / copies) + expert * (1 - 1 / expert_copies))
    hops = 2 * math.log2(max(2, layout.gpus / gpu.domain)) * c.hop_s
    if layout.fsdp:  # weights are gathered twice and gradients summed in every microbatch, behind its compute
        return micro * max(0.0, (2.0 + 2.0 + 4.0) * dense / speed + hops - hide_s)
    seconds = moved / speed + hops
    return seconds if work.own else max(0.0, seconds - hide_s)


def _optimizer(work: Work, layout: Layout, gpu: Gpu, c: Constants) -> float:
    """Adam on this GPU's share, the norm and zeroing of all gradients here, and what the host does alone at both
    ends of a step.
    """
    dense, expert = parameters_here(work, layout)
    share = dense / (layout.data * layout.context) + expert / max(1, layout.gpus // (layout.pipeline * layout.expert))
    here = share if layout.fsdp else dense + expert
    seconds = (30.0 * share + 8.0 * here) / (c.bandwidth * gpu.bandwidth)
    if work.own:
        weights = work.model.layers / layout.pipeline * (6 + 2 * work.model.experts / layout.expert)
        seconds += c.own_step_s + c.own_weight_s * weights
    return seconds
