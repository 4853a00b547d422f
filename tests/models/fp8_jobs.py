"""What ranks run in the tests of our fp8 layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.errors import ConfigError
from terrella.kernels.batch_invariant import batch_invariant
from terrella.models import fp8
from terrella.models.gpt import build_gpt
from terrella.rl.objective import logprob_score
from terrella.tests.parallel import jobs


def measure(precision: str, steps: int, tied: bool = False, **parallel: Any) -> dict[str, Any]:
    """Loss, gradients and the losses of a few steps of the small model."""
    engine = jobs.make_engine(parallel, jobs.replace(jobs.DENSE, tied=tied), precision, lr=1e-2)
    items = jobs.batches(2)
    metrics = engine.accumulate(items, jobs.fused_loss)
    gradients = {name: value.cpu().clone() for name, value in engine.gradients()}
    results = [engine.step(items, jobs.fused_loss) for _ in range(steps)]
    return {
        "loss": metrics["loss"],
        "gradients": gradients,
        "norm": results[0].grad_norm,
        "losses": [r.metrics["loss"] for r in results],
    }


def count_products(products: str, skip: int, head: bool = False) -> dict[str, int]:
    """How often a step of two microbatches multiplies in fp8, how often it casts weights, and how often the head is in
    fp8.
    """
    counts: Counter[str] = Counter()
    multiply, cast = fp8.scaled_product, fp8.Weight.cast
    precision = PrecisionConfig("bf16", fp8=True, fp8_products=products, fp8_skip=skip, fp8_head=head)  # type: ignore[arg-type]
    engine = Engine(build_gpt(jobs.DENSE), ParallelConfig(), OptimizerConfig(lr=1e-3), precision, seed=3)
    items = jobs.batches(2)
    engine.step(items, jobs.fused_loss)

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        counts["products"] += 1
        return multiply(*args, **options)

    def counted_cast(self: Any, weight_NK: torch.Tensor) -> None:
        counts["casts"] += 1
        cast(self, weight_NK)

    def counted_loss(hidden_TH: torch.Tensor, head: Any, batch: Any) -> Any:
        if head.fp8 is not None:
            counts["head"] += 1
        return jobs.fused_loss(hidden_TH, head, batch)

    fp8.scaled_product, fp8.Weight.cast = counted, counted_cast
    try:
        engine.step(items, counted_loss)
    finally:
        fp8.scaled_product, fp8.Weight.cast = multiply, cast
    return dict(counts)


def added_gradients() -> list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """In each format: the layers' weight gradients of two microbatches in one step, and the sum of those of each."""
    out = []
    for precision in ("fp8", "fp8 all"):
        engine = jobs.make_engine({}, precision=precision)
        items = jobs.batches(2)
        found: list[dict[str, torch.Tensor]] = []
        for step in (items, items[:1], items[1:]):
            engine.accumulate(step, jobs.fused_loss)
            found.append({n: g.clone() for n, g in engine.gradients() if n.startswith("decoder") and g.dim() == 2})
        out.append((precision, found[0], {name: value + found[2][name] for name, value in found[1].items()}))
    return out


def scored() -> dict[str, tuple[float, float]]:
    """The loss of the first microbatch from training, and from the log-probs of the score that RL uses."""
    out = {}
    for precision in ("fp8", "fp8 head"):
        engine = jobs.make_engine({}, precision=precision)
        items = jobs.batches(1)
        assert items[0].ce_weight_T is not None
        loss = engine.accumulate(items, jobs.fused_loss)["loss"]
        logprob_T = engine.score(items, logprob_score(1.0))[0]["logprob"]
        out[precision] = (loss, -float((logprob_T * items[0].ce_weight_T).sum()))
    return out


def fresh_copies() -> dict[str, bool]:
    """Whether the copies are those of the weights after a step, after `load_weights` and after an offload."""
    engine = jobs.make_engine({}, precision="fp8 head")
    items = jobs.batches(2)

    def current() -> bool:
        engine.score(items, jobs.score)
        chunk: Any = engine.chunks[0]
        linears = [linear for layer in chunk.decoder.layers for linear in layer._linears()]
        weights = [linear.weight for linear in (*linears, chunk.output_layer)]
        fresh: Any = [fp8.cast_rows(w) for w in weights]
        kept: Any = [
            w.rows
            for layer in chunk.decoder.layers
            for w in (layer.low.qkv, layer.low.out, layer.low.up, layer.low.down)
        ] + [chunk.low_head.rows]
        return all(torch.equal(a.wide(), b.wide()) for a, b in zip(fresh, kept, strict=True))

    out = {"start": current()}
    engine.step(items, jobs.cross_entropy)
    out["step"] = current()
    engine.load_weights(lambda name: None)
    shapes = {p.name: p.param.shape for p in engine.local_parameters()}
    moved = ("linear_fc1.weight", "output_layer.weight")
    engine.load_weights(lambda name: torch.full(shapes[name], 0.01) if name.endswith(moved) else None)
    out["load_weights"] = current()
    engine.offload()
    chunk: Any = engine.chunks[0]
    out["dropped"] = chunk.low_head.rows is None and all(layer.low.up.rows is None for layer in chunk.decoder.layers)
    engine.reload()
    out["reload"] = current()
    return out


def refusals() -> dict[str, str]:
    """Messages of what our fp8 layers do not compute."""
    out = {}

    def message(name: str, call: Any) -> None:
        try:
            call()
            out[name] = ""
        except ConfigError as error:
            out[name] = str(error)

    message("experts", lambda: jobs.make_engine({}, model=jobs.MOE, precision="fp8"))
    message("lora", lambda: jobs.make_engine({}, lora=jobs.LORA, precision="fp8"))
    message("width", lambda: jobs.make_engine({}, model=jobs.replace(jobs.DENSE, ffn=40), precision="fp8"))
    message("gemma", lambda: jobs.make_engine({}, model=jobs.GEMMA, precision="fp8"))
    message("skip", lambda: fp8.check_fp8(jobs.DENSE, 1, False, PrecisionConfig("bf16", fp8=True, fp8_skip=2)))
    odd = jobs.replace(jobs.DENSE, vocab=40)
    message("vocab", lambda: jobs.make_engine({}, model=odd, precision="fp8 head"))
    engine = jobs.make_engine({}, precision="fp8")

    def invariant() -> None:
        with batch_invariant():
            engine.score(jobs.batches(1), jobs.score)

    message("batch_invariant", invariant)
    return out


def refuse_tensor() -> str:
    """On two ranks."""
    try:
        jobs.make_engine({"tensor": 2}, precision="fp8")
        return ""
    except ConfigError as error:
        return str(error)


def trained(graphs: bool) -> dict[str, Any]:
    """Losses of eight steps on a GPU, with the layers as CUDA graphs or without."""
    precision = PrecisionConfig("bf16", fp8=True, fp8_products="all")
    engine = Engine(build_gpt(jobs.WIDE), ParallelConfig(cuda_graphs=graphs), OptimizerConfig(lr=1e-3), precision, 3)
    items = jobs.batches(2, vocab=jobs.WIDE.vocab)
    losses = [engine.step(items, jobs.fused_loss).metrics["loss"] for _ in range(8)]
    chunk: Any = engine.chunks[0]
    return {"losses": losses, "captured": len(chunk.graphs.pairs) if graphs else 0}
