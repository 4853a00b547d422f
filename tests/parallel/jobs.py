"""What the pool's ranks run: small models, packed batches and plain losses of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from terrella.core.batch import PackedBatch
from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine, Head
from terrella.models.config import ModelConfig
from terrella.models.heads import ValueHead
from terrella.models.lora import LoraConfig

DENSE = ModelConfig(layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, qkv_bias=True)


def batches(count: int, vocab: int = 61, packed: bool = True, seed: int = 7) -> list[PackedBatch]:
    """Microbatches of a fixed global step: documents of mixed lengths, or of one length when not `packed`."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        lengths = [9 + i, 5, 14, 3] if packed else [16, 16]
        total = sum(lengths)
        tokens = torch.randint(0, vocab, (total,), generator=draw)
        targets = torch.randint(0, vocab, (total,), generator=draw)
        weight = torch.rand(total, generator=draw) / 100
        made.append(
            PackedBatch(
                tokens_T=tokens,
                targets_T=targets,
                positions_T=torch.cat([torch.arange(n) for n in lengths]),
                cu_seqlens_D1=torch.tensor([0, *lengths]).cumsum(0).int(),
                max_seqlen=max(lengths),
                ce_weight_T=weight,
            )
        )
    return made


def token_logprob(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> torch.Tensor:
    """Log-probabilities through a plain softmax over the gathered vocabulary; complete gradient on every tensor
    rank.
    """
    from megatron.core import tensor_parallel

    if head.group is not None:
        hidden_TH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_TH)
    logits = hidden_TH @ head.weight_VH.T
    if head.group is not None:
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    logits = logits[:, : head.vocab_size].float()
    return torch.log_softmax(logits, -1).gather(1, batch.targets_T[:, None]).squeeze(1)


def cross_entropy(
    hidden_TH: torch.Tensor, head: Head, batch: PackedBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(token_logprob(hidden_TH, head, batch) * batch.ce_weight_T).sum()
    return loss, {"loss": loss, "tokens": (batch.ce_weight_T > 0).sum()}


def kernel_loss(
    hidden_TH: torch.Tensor, head: Head, batch: PackedBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same cross-entropy through the project's kernel."""
    from terrella.kernels import PolicySettings, PolicyTerms, linear_policy_loss

    terms = PolicyTerms(ce_weight=batch.ce_weight_T)
    out = linear_policy_loss(
        hidden_TH,
        head.weight_VH,
        batch.targets_T,
        terms,
        PolicySettings(),
        group=head.group,
        vocab_size=head.vocab_size,
    )
    return out.loss, {"loss": out.loss, "tokens": out.sums["tokens"]}


def value_loss(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As critics are trained: a regression of the value head on a function of the targets; no word has a loss."""
    _, sums = cross_entropy(hidden_TH, head, batch)
    assert head.values_T is not None
    loss = ((head.values_T - batch.targets_T / 61) ** 2 * batch.ce_weight_T).sum()
    return loss, {**sums, "loss": loss}


def score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    return {"logprob": token_logprob(hidden_TH, head, batch)}


MOE = ModelConfig(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=61,
    qk_norm=True,
    experts=4,
    experts_per_token=2,
    expert_ffn=24,
)
TIED = replace(DENSE, tied=True, qk_norm=True, qkv_bias=False)
INTERLEAVED = replace(DENSE, rotary_interleaved=True, rotary_fraction=0.5)
GEMMA = replace(
    DENSE, tied=True, qk_norm=True, qkv_bias=False, block="gemma", sliding_window=4, global_every=2, query_scale=0.3
)
ONE_KV = replace(DENSE, kv_heads=1)
LORA = LoraConfig(rank=4, alpha=8.0)


FORMATS = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig("bf16"),
    "fp8 forward": PrecisionConfig("bf16", fp8=True, fp8_products="forward"),
    "fp8": PrecisionConfig("bf16", fp8=True),
    "fp8 all": PrecisionConfig("bf16", fp8=True, fp8_products="all"),
    "fp8 head": PrecisionConfig("bf16", fp8=True, fp8_head=True),
}


def make_engine(
    parallel: dict[str, Any],
    model: ModelConfig = DENSE,
    precision: str = "fp32",
    lr: float = 1e-3,
    lora: LoraConfig | None = None,
    value_head: ValueHead = "none",
    balance: float = 0.0,
) -> Engine:
    from terrella.models.gpt import build_gpt, initial_weight

    build = build_gpt(model, lora=lora, value_head=value_head)
    optimizer = OptimizerConfig(lr=lr, balance=balance)
    engine = Engine(build, ParallelConfig(**parallel), optimizer, FORMATS[precision], seed=3)
    if lora is not None:  # adapters start at B = 0, where A has no gradient to compare
        shapes = {p.name: p.shard.full_shape(p.param.shape) for p in engine.local_parameters()}
        engine.load_weights(  # under another name: an adapter's own B is drawn as zeros
            lambda name: (
                initial_weight(name.replace(".lora.b", ".weight"), shapes[name], 3, 0.02)
                if name.endswith(".lora.b")
                else None
            )
        )
    return engine


def share(engine: Engine, items: list[Any]) -> list[Any]:
    return items[engine.groups.data_rank :: copies(engine)]


def copies(engine: Engine) -> int:
    return torch.distributed.get_world_size() // engine.parallel.model_size


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "kernel": {},
    "tied": {"model": TIED},
    "interleaved": {"model": INTERLEAVED},
    "gemma": {"model": GEMMA},
    "moe": {"model": MOE},
    "balance": {"model": MOE, "balance": 0.05},
    "lora": {"lora": LORA},
    "one-kv": {"model": ONE_KV},
    "one-kv-norms": {"model": replace(TIED, kv_heads=1)},
    "one-kv-moe": {"model": replace(MOE, kv_heads=1)},
    "one-kv-lora": {"model": ONE_KV, "lora": LORA},
    "value": {"value_head": "scalar"},
}


def measure_by_halves(parallel: dict[str, Any], kind: str, packed: bool) -> dict[str, Any]:
    """The same with layers as two functions each, which a CPU does not choose by itself; `taken` is how many layers
    ran that way.
    """
    from terrella.models import layers

    taken, inner = [], layers.Layer._by_halves
    layers.Layer.in_halves, layers.Layer._by_halves = True, lambda *args: taken.append(1) or inner(*args)
    try:
        return measure(parallel, kind, packed) | {"taken": len(taken)}
    finally:
        layers.Layer.in_halves, layers.Layer._by_halves = None, inner


def measure(parallel: dict[str, Any], kind: str = "dense", packed: bool = True) -> dict[str, Any]:
    """Loss, gradient norm, gradients and scores of one global step, then the weights after it."""
    import torch.distributed as dist

    engine = make_engine(parallel, **KINDS[kind])
    loss = value_loss if kind == "value" else kernel_loss if kind == "kernel" else cross_entropy
    mine = share(engine, batches(4, packed=packed))
    scores = engine.score(mine, score)
    metrics = engine.accumulate(mine, loss)
    gradients = {name: value.cpu().clone() for name, value in engine.gradients()}
    result = engine.step(mine, loss)
    weights = {name: value.cpu().clone() for name, value in engine.parameters()}
    everything: list = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (engine.groups.data_rank, [s["logprob"].cpu() for s in scores]))
    if dist.get_rank():
        return {}
    by_rank = dict(everything)
    ordered = [by_rank[i % copies(engine)][i // copies(engine)] for i in range(4)]
    return {
        "metrics": metrics,
        "norm": result.grad_norm,
        "gradients": gradients,
        "weights": weights,
        "scores": torch.cat(ordered),
    }


def scores(parallel: dict[str, Any], count: int) -> list[torch.Tensor]:
    """Log-probs of so many microbatches."""
    return [s["logprob"].cpu() for s in make_engine(parallel).score(batches(count), score)]


def two_steps(parallel: dict[str, Any], bucket: int | None = None) -> dict[str, Any]:
    """Losses and norms of two optimizer steps and the weights after them, with buckets of so many elements; also how
    many buckets there are, and how many were still on their way at most when a layer had waited for its own.
    """
    from functools import partial

    import megatron.core.distributed as distributed

    from terrella.core.mcore import optimizer as adam

    settings, waits = distributed.DistributedDataParallelConfig, adam._await
    groups: list[Any] = []
    under_way = [0]

    def awaited(buckets: list[Any]) -> None:
        waits(buckets)
        under_way.append(sum(group.param_gather_handle is not None for group in groups))

    distributed.DistributedDataParallelConfig = partial(settings, bucket_size=bucket)  # type: ignore[assignment,misc]
    adam._await = awaited
    try:
        engine = make_engine(parallel)
        groups += [group for chunk in engine._wrapped for group in chunk.bucket_groups]
        mine = share(engine, batches(4))
        results = [engine.step(mine, cross_entropy) for _ in range(2)]
        weights = {name: value.cpu().clone() for name, value in engine.parameters()}
    finally:
        distributed.DistributedDataParallelConfig, adam._await = settings, waits  # type: ignore[misc]
    trace = [(result.metrics["loss"], result.grad_norm) for result in results]
    return {"trace": trace, "weights": weights, "buckets": len(groups), "under way": max(under_way)}


def padded_lengths(parallel: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens of microbatches, and what the engine computes for them."""
    made = batches(4)
    return {"tokens": [b.num_tokens for b in made], "lengths": make_engine(parallel)._items(made)[1]}


WIDE = ModelConfig(
    layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1000, qkv_bias=True, tied=True
)


def fused_loss(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy through the kernel, the head's gradient added straight to its fp32 buffer, as the trainer does
    it.
    """
    from terrella.kernels import PolicySettings, PolicyTerms, linear_policy_loss

    out = linear_policy_loss(
        hidden_TH,
        head.weight_VH,
        batch.targets_T,
        PolicyTerms(ce_weight=batch.ce_weight_T),
        PolicySettings(),
        group=head.group,
        vocab_size=head.vocab_size,
        weight_grad_VH=head.weight_grad_VH,
        fp8=head.fp8,
    )
    return out.loss, {"loss": out.loss, "tokens": out.sums["tokens"]}


def measure_wide(
    layers: str,
    precision: str = "bf16",
    fp8: bool = False,
    packed: bool = True,
    steps: int = 1,
    vocab: int = WIDE.vocab,
    **formats: Any,
) -> dict[str, Any]:
    """Loss, gradients and the losses of a few steps of a model wide enough for every GPU kernel."""
    from terrella.models.gpt import build_gpt

    chosen = PrecisionConfig(precision, layers, fp8, **formats)  # type: ignore[arg-type]
    build = build_gpt(replace(WIDE, vocab=vocab))
    engine = Engine(build, ParallelConfig(), OptimizerConfig(lr=1e-3), chosen, seed=3)
    items = batches(4, vocab=vocab, packed=packed)
    metrics = engine.accumulate(items, fused_loss)
    gradients = {name: value.cpu().clone() for name, value in engine.gradients()}
    results = [engine.step(items, fused_loss) for _ in range(steps)]
    return {
        "loss": metrics["loss"],
        "gradients": gradients,
        "norm": results[0].grad_norm,
        "losses": [r.metrics["loss"] for r in results],
    }


WIDE_MOE = replace(
    WIDE, tied=False, qkv_bias=False, qk_norm=True, layers=2, experts=8, experts_per_token=2, expert_ffn=128
)


@contextmanager
def grouping(wanted: bool) -> Iterator[list[int]]:
    """Experts grouped wherever that can be computed, CPU included, or nowhere. The list has the rows of every
    grouped call.
    """
    from terrella.models import experts

    allowed, compute, calls = experts.can_group, experts.grouped_experts, []

    def counted(x_NH: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x_NH))
        return compute(x_NH, *rest)

    experts.can_group = lambda x_NH: wanted and (not x_NH.is_cuda or allowed(x_NH))
    experts.grouped_experts = counted
    try:
        yield calls
    finally:
        experts.can_group, experts.grouped_experts = allowed, compute


def measure_experts(grouped: bool, parallel: dict[str, Any], precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    """Loss, gradients, and the weights after a step of a model with experts; and how often they were grouped."""
    from terrella.models.gpt import build_gpt

    build = build_gpt(replace(WIDE_MOE, **changes))
    engine = Engine(build, ParallelConfig(**parallel), OptimizerConfig(lr=1e-3), PrecisionConfig(precision), seed=3)  # type: ignore[arg-type]
    mine = share(engine, batches(4, vocab=WIDE_MOE.vocab))
    with grouping(grouped) as calls:
        metrics = engine.accumulate(mine, fused_loss)
        gradients = {name: value.cpu().clone() for name, value in engine.gradients()}
        result = engine.step(mine, fused_loss)
    weights = {name: value.cpu().clone() for name, value in engine.parameters()}
    return {
        "loss": metrics["loss"],
        "norm": result.grad_norm,
        "gradients": gradients,
        "weights": weights,
        "calls": len(calls),
    }


def experts_in_place(parallel: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Whether each layer's experts are one tensor without a copy, and still are it after a step."""
    from terrella.models.gpt import build_gpt

    optimizer = OptimizerConfig(lr=1e-3) if trained else None
    engine = Engine(build_gpt(WIDE_MOE), ParallelConfig(**parallel), optimizer, PrecisionConfig(), seed=3)
    layers: list[Any] = [layer.mlp.experts for chunk in engine.chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]

    def views() -> list[bool]:
        found = []
        for experts in layers:
            lists, joined = experts._weights(), experts.joined()
            assert joined is not None
            for weights, view in zip(lists, joined, strict=True):
                shared = [part.data_ptr() == w.data_ptr() for part, w in zip(view, weights, strict=True)]
                found.append(all(shared) and torch.equal(view, torch.stack([w.detach() for w in weights])))
        return found

    before = views()
    if trained:
        engine.step(share(engine, batches(4, vocab=WIDE_MOE.vocab)), fused_loss)
    return {"layers": len(layers), "views": len(before) // 2, "equal": all(before), "after": all(views())}
