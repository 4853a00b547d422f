"""What a rank of the pool runs in the attacks: a tiny recipe in this very process, so that a start costs a second
and not ten.
"""

from __future__ import annotations

import importlib
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RECIPE = Path(__file__).with_name("attacked.yaml")
STOPPED_S = 1000.0
OWN = Path(__file__).with_name("attacked_own.yaml")


@dataclass(frozen=True)
class End:
    """How a start of the run ended: the exit code, and what was said. 'unnamed' holds the traceback of an error that
    is not ours.
    """

    code: int
    said: str
    unnamed: str = ""


def start(
    folder: str,
    overrides: tuple[str, ...] = (),
    back: str | None = None,
    stop_after: tuple[str, int] | None = None,
    recipe: str = str(RECIPE),
) -> End:
    """`terrella train` in this process; `stop_after` asks for a stop once a stage has done so many steps."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code, message, unnamed = _start(recipe, Path(folder), overrides, back, stop_after)
    return End(code, said.getvalue() + message, unnamed)


def start_writing(folder: str, how: Literal["late", "full"], overrides: tuple[str, ...]) -> End:
    """As `start`, with a disk that does not take the files of the second RL step's checkpoint before the third step is
    trained, or is full for them.
    """
    import errno
    import os
    import time

    from terrella.core import checkpoint
    from terrella.core.files import storage_errors
    from terrella.core.metrics import MetricsFile

    write = checkpoint.write_shard

    def trained(step: int) -> bool:
        rows = MetricsFile(Path(folder) / "metrics.jsonl").rows()
        return any(row["stage"] == "rlvr" and row["step"] == step for row in rows)

    def write_shard(to: Path, *args: Any) -> dict[str, Any]:
        if to.parent.name == "rlvr" and to.name.startswith(".saving-step-000002"):
            end = time.monotonic() + 60
            while how == "late" and not trained(3):
                assert time.monotonic() < end, "training waits for the checkpoint"
                time.sleep(0.01)
            with storage_errors(to):
                if how == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
        return write(to, *args)

    checkpoint.write_shard = write_shard
    try:
        return start(folder, overrides)
    finally:
        checkpoint.write_shard = write


def _start(
    path: str, folder: Path, overrides: tuple[str, ...], back: str | None, stop_after: tuple[str, int] | None
) -> tuple[int, str, str]:
    from terrella.core import run as runs
    from terrella.core.errors import TerrellaError
    from terrella.core.mesh import Mesh
    from terrella.launch import recipe as recipes
    from terrella.launch.job import Job, StopRequested
    from terrella.launch.rewind import back_to
    from terrella.launch.worker import STAGES

    lease = None
    try:
        recipe = recipes.load(path, overrides)
        run, lease = runs.create(folder, recipe)
        if back is not None:
            back_to(run, [stage.name for stage in recipe.stages], back)
        for warning in run.verify([stage.name for stage in recipe.stages]):
            print(f"warning: {warning}")
        job = Job(recipe, run, Mesh(), recipe.model.sizes)
        for stage in recipe.stages:
            if run.outcome(stage.name) is not None:
                continue
            if stop_after is not None and stage.name == stop_after[0]:
                _stop_in(job, stop_after[1])
            job.start_stage()
            outcome = importlib.import_module(f"terrella.launch.stages.{STAGES[stage.kind]}").run(stage, job)
            run.finish(stage.name, {**outcome, **job.spent()})
    except StopRequested:
        return 75, "saved and stopped on request", ""
    except TerrellaError as error:
        return error.exit_code, str(error), ""
    except Exception as error:
        return 1, repr(error), traceback.format_exc()
    finally:
        if lease is not None:
            lease.release()
    return 0, "", ""


def _stop_in(job: Any, steps: int) -> None:
    """Ask for a stop at the end of the step `steps` of the stage that begins now, which then has taken STOPPED_S
    more.
    """
    ends = [0]

    def end_of_step(ready: bool = True) -> tuple[bool, bool]:
        ends[0] += 1
        job.started_at -= STOPPED_S if ends[0] == steps else 0.0
        return ends[0] >= steps, ready

    job.end_of_step = end_of_step


def merge_damaged_adapters(folder: str) -> str:
    """Save an engine with adapters, flip a bit of the file, and merge it as a later stage would; returns the
    refusal.
    """
    from types import SimpleNamespace

    from terrella.core.engine import Engine
    from terrella.core.errors import StorageError
    from terrella.launch.settings.base import Lora
    from terrella.launch.stages.common import load_final
    from terrella.models.config import ModelConfig
    from terrella.models.gpt import build_gpt
    from terrella.models.lora import LoraConfig
    from terrella.tests.parallel import jobs

    model = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=32)
    plain = jobs.make_engine({})
    parts = plain.parallel, None, plain.precision, 0
    Engine(build_gpt(model, lora=LoraConfig(2, 4.0)), *parts).save(Path(folder) / "step-000001", {})
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(stages=[SimpleNamespace(name="tuned", lora=Lora(rank=2, alpha=4.0))]),
        run=SimpleNamespace(path=Path(folder)),
        model=model,
        outcome=lambda stage: {"checkpoint": "step-000001"},
    )
    target = Engine(build_gpt(model), *parts)
    load_final(job, target, "tuned", plain=True)  # whole: merges
    shard = Path(folder) / "step-000001" / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-2] ^= 64
    shard.write_bytes(bytes(data))
    try:
        load_final(job, target, "tuned", plain=True)
    except StorageError as error:
        return str(error)
    return "loaded"


def drop_beside_a_slow_reader(folder: str) -> tuple[bool, bool]:
    """Two ranks take a finished stage's weights, one of them slowly, and begin the next stage, which drops the rest.
    Whether there were moments before and after.
    """
    from types import SimpleNamespace

    import torch.distributed as dist

    from terrella.core.checkpoint import CheckpointReader, has_moments
    from terrella.core.mesh import Mesh
    from terrella.core.metrics import MetricsFile
    from terrella.launch.settings.base import Retention
    from terrella.launch.stages.common import Checkpoints, load_final
    from terrella.tests.parallel import jobs

    run, kept = Path(folder), {"first": {"checkpoint": "checkpoints/first/step-000001"}}
    engine = jobs.make_engine({})
    engine.step(jobs.share(engine, jobs.batches(4)), jobs.cross_entropy)
    engine.save(run / kept["first"]["checkpoint"], {})
    before = has_moments(run / kept["first"]["checkpoint"])
    stages = [SimpleNamespace(name=name, checkpoints=Retention()) for name in ("first", "second")]
    metrics = MetricsFile(run / "metrics.jsonl")
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(stages=stages),
        run=SimpleNamespace(path=run, outcome=kept.get, guard=lambda: None, metrics=metrics),
        mesh=Mesh(dist.get_rank(), dist.get_world_size()),
        outcome=kept.__getitem__,
        checkpoints=lambda stage: run / "checkpoints" / stage,
        later=lambda stage: (),
    )
    index, slow = CheckpointReader.index, [1.0] if dist.get_rank() == 1 else []
    look: Any = property(lambda reader: (time.sleep(slow.pop()) if slow else None) or index.fget(reader))
    CheckpointReader.index = look
    try:
        load_final(job, engine, "first", plain=True)
    finally:
        CheckpointReader.index = index  # ranks serve other tests too
    Checkpoints(job, "second", 1, 1, Retention()).resume(engine)
    return before, has_moments(run / kept["first"]["checkpoint"])


def start_with_faults(folder: str, failing: str, overrides: tuple[str, ...] = ()) -> End:
    """A start whose sampler fails for good on some requests: `one` of each batch of six, or `all` of them."""
    from terrella.data.trajectory import Invalid
    from terrella.launch.stages import session

    opened = session.open_sampler

    class Faulty:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def generate(self, requests: list[Any]) -> list[Any]:
            answers = self.inner.generate(requests)
            hit = [failing == "all" or (r.key[2] == 1 and r.key[1] % 2 == 0) for r in requests]
            return [Invalid("server unplugged") if bad else answer for bad, answer in zip(hit, answers, strict=True)]

    def open_faulty(*words: Any, **more: Any) -> Any:
        found = opened(*words, **more)
        found.sampler = Faulty(found.sampler)
        return found

    session.open_sampler = open_faulty
    try:
        return start(folder, overrides)
    finally:
        session.open_sampler = opened
