"""What ranks run in the engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.errors import ConfigError
from terrella.core.profile import Profiler
from terrella.models.gpt import build_gpt
from terrella.tests.parallel import jobs


def nan_step() -> dict[str, Any]:
    """A loss that is not a number: the step is reported and changes nothing."""
    engine = jobs.make_engine({})
    mine = jobs.share(engine, jobs.batches(4))
    engine.step(mine, jobs.cross_entropy)
    before = {p.name: p.param.clone() for p in engine.local_parameters()}

    def broken(hidden_TH, head, batch):
        loss, sums = jobs.cross_entropy(hidden_TH, head, batch)
        return loss * float("nan") if engine.groups.data_rank == 0 else loss, sums

    result = engine.step(mine, broken)
    same = all(torch.equal(p.param, before[p.name]) for p in engine.local_parameters())
    after = engine.step(mine, jobs.cross_entropy)
    return {"skipped": result.skipped, "norm": result.grad_norm, "same": same, "after": after.skipped}


def offloaded(precision: str) -> dict[str, Any]:
    """Train, offload, reload and go on; beside an engine that never was offloaded."""
    traces = []
    for park in (False, True):
        engine = jobs.make_engine({}, precision=precision)
        loss = jobs.fused_loss if engine.precision.fp8_head else jobs.cross_entropy
        trace = []
        for i in range(4):
            result = engine.step(jobs.share(engine, jobs.batches(4, seed=i)), loss)
            trace.append((result.metrics["loss"], result.grad_norm))
            if park and i == 1:
                engine.offload()
                held = sum(p.untyped_storage().nbytes() for c in engine.chunks for p in c.parameters())
                assert held == 0, f"{held} bytes of parameters are still held"
                engine.reload()
        traces.append(trace)
    return {"plain": traces[0], "parked": traces[1]}


def refusals() -> dict[str, str]:
    """Messages of what must not run."""
    out = {}

    def message(name: str, call: Any) -> None:
        try:
            call()
            out[name] = ""
        except ConfigError as error:
            out[name] = str(error)

    scorer = Engine(build_gpt(jobs.DENSE), ParallelConfig(), None, PrecisionConfig())
    message("no optimizer", lambda: scorer.step(jobs.batches(1), jobs.cross_entropy))
    message("nothing", lambda: scorer.score([], jobs.score))
    message("other layout", lambda: jobs.make_engine({"tensor": 2}))
    message(
        "no GPU", lambda: Engine(build_gpt(jobs.DENSE), ParallelConfig(), None, PrecisionConfig("bf16", "te", fp8=True))
    )
    engine = jobs.make_engine({})

    def misnamed(hidden_TH, head, batch):
        return jobs.cross_entropy(hidden_TH, head, batch)[0], {f"x{engine.groups.data_rank}": torch.ones(())}

    message("names", lambda: engine.step(jobs.batches(1), misnamed))
    return out


def two_engines() -> bool:
    """An actor that trains and a reference that must not move."""
    actor = jobs.make_engine({})
    reference = Engine(build_gpt(jobs.DENSE), ParallelConfig(), None, PrecisionConfig(), seed=3)
    mine = jobs.batches(2)
    first = actor.score(mine, jobs.score)
    actor.step(mine, jobs.cross_entropy)
    kept = reference.score(mine, jobs.score)
    moved = actor.score(mine, jobs.score)
    assert all(torch.equal(a["logprob"], b["logprob"]) for a, b in zip(first, kept, strict=True))
    return all(not torch.equal(a["logprob"], b["logprob"]) for a, b in zip(first, moved, strict=True))


def masters() -> float:
    """bf16 parameters are their fp32 masters, rounded."""
    from terrella.core.mcore import optimizer as adam

    engine = jobs.make_engine({}, precision="bf16")
    for i in range(3):
        engine.step(jobs.share(engine, jobs.batches(4, seed=i)), jobs.cross_entropy)
    worst = 0.0
    for part in adam.state_parts(engine.optimizer):
        assert part.master.dtype == torch.float32
        model = part.param.detach().reshape(-1)[part.start : part.end]
        assert torch.equal(model, part.master.bfloat16())
        worst = max(worst, float((model.float() - part.master).abs().max()))
    return worst


def profiled(folder: str) -> None:
    engine = jobs.make_engine({})
    profiler = Profiler(Path(folder), rank=0, first=1, count=1)
    for _ in range(3):
        with profiler.step():
            engine.step(jobs.batches(1), jobs.cross_entropy)


def schedule() -> list[float]:
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=2, total_steps=4)
    engine = Engine(build_gpt(jobs.DENSE), ParallelConfig(), config, PrecisionConfig())
    return [engine.step(jobs.batches(1), jobs.cross_entropy).lr for _ in range(3)]


def _kernel_step(engine: Engine, seed: int) -> float:
    from terrella.core.mcore import optimizer as adam

    engine.accumulate(jobs.share(engine, jobs.batches(4, seed=seed)), jobs.cross_entropy)
    norm = adam.grad_norm(engine.optimizer)
    adam._update_by_kernel(engine.optimizer, norm, norm.clamp(min=1.0))
    adam.start_gather(engine._wrapped)
    return float(norm)


def kernel_resumes(folder: str, precision: str) -> bool:
    """Steps by the kernel after a checkpoint was loaded into an engine that had made other steps, and after an
    offload: bit for bit.
    """
    first, other = (jobs.make_engine({}, precision=precision) for _ in range(2))
    _kernel_step(first, 1)
    first.save(Path(folder))
    norms = [_kernel_step(first, seed) for seed in (2, 3)]
    _kernel_step(other, 7)
    other.load(Path(folder))
    again = [_kernel_step(other, 2)]
    other.offload()
    other.reload()
    again.append(_kernel_step(other, 3))
    pairs = zip(first.local_parameters(), other.local_parameters(), strict=True)
    return norms == again and all(torch.equal(a.param, b.param) for a, b in pairs)


def kernel_update(precision: str) -> float:
    """Two updates by the kernel that CUDA uses (here its plain form) against torch's own: the largest difference of
    any weight.
    """
    from terrella.core.mcore import optimizer as adam

    plain, other = jobs.make_engine({}, precision=precision), jobs.make_engine({}, precision=precision)
    for seed in (1, 2):
        expected = plain.step(jobs.share(plain, jobs.batches(4, seed=seed)), jobs.cross_entropy)
        norm = _kernel_step(other, seed)
        assert abs(norm - expected.grad_norm) <= 1e-4 * expected.grad_norm
    assert adam.update_count(other.optimizer) == 2
    pairs = zip(plain.local_parameters(), other.local_parameters(), strict=True)
    return max(float((a.param.float() - b.param.float()).abs().max()) for a, b in pairs)


def profiled_by_environment(folder: str) -> None:
    """What `terrella train --profile` does in each rank."""
    import os

    from terrella.core import profile

    os.environ[profile.PROFILE_VARIABLE] = folder
    engine = jobs.make_engine({})
    del os.environ[profile.PROFILE_VARIABLE]
    for _ in range(6):
        engine.step(jobs.batches(1), jobs.cross_entropy)
