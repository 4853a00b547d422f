"""The entry point of one rank. It alone installs the CPU shim, joins the process group and runs the recipe's stages
in order.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core import health, schema
from ..core import lease as leases
from ..core import run as runs
from ..core.errors import (
    ProgramError,
    StorageError,
    TerrellaError,
    WorkerError,
    describe_error,
    is_transient,
    missing_extra,
)
from ..core.files import write_json
from ..core.process import PARENT_VARIABLE, die_with_parent
from ..core.progress import say
from ..core.sinks import open_sinks
from ..models.config import ModelConfig
from .recipe import Recipe
from .recipe_warnings import find_warnings
from .settings.base import dealt_evenly
from .supervise import FINISHED, STOPPED, error_file
from .terminal import stage_line

# kind of stage -> module under launch/stages with a function `run(stage, job) -> outcome`, and perhaps `check(stage,
# job)`, which refuses what the stage would miss later, such as weights that are not there: it is called before the
# run's first stage
STAGES = {
    "export": "export",
    "start": "start",
    "collect": "collect",
    "sft": "sft",
    "rl": "rl",
    "eval": "eval",
    "path": "own",
    "video-tokenizer": "video_tokenizer",
    "video-real2sim": "video_real2sim",
    "web-tasks": "web_tasks",
    "web-judge": "web_judge",
    "web-orm": "web_orm",
    "web-replay": "web_replay",
    "web-critic": "web_critic",
    "web-actor": "web_actor",
    "web-plan": "web_plan",
}


def start_logging(folder: Path, rank: int) -> None:
    """This rank's log file; TERRELLA_LOG=debug makes it talk."""
    logging.basicConfig(
        filename=folder / f"rank-{rank}.log",
        level=os.environ.get("TERRELLA_LOG", "info").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)


def examine_nodes(rank: int) -> None:
    """Before work is given to several machines: every rank computes right, none is slow, the links carry."""
    own = health.matmul()
    if own.level == "fail":
        raise WorkerError(f"{socket.gethostname()}: {own.line()}")
    for check in (health.pace(), health.links()):
        logging.getLogger("terrella").info(check.line())
        if rank == 0 and check.level != "ok":
            print(check.line(), flush=True)


def _module(kind: str) -> Any:
    return importlib.import_module(f".stages.{STAGES[kind]}", __package__)


def stage_check(kind: str) -> Any:
    """The check of a kind of stage, None where it has none."""
    return getattr(_module(kind), "check", None)


def check_stages(stages: list[Any], job: Any) -> None:
    """Refuse now what one of these stages would only find missing when its turn comes."""
    for stage in stages:
        for key in dealt_evenly(stage):
            job.mesh.require_even(getattr(stage, key), f"stages: {stage.name}.{key}")
        if check := stage_check(stage.kind):
            check(stage, job)


def model_of(recipe: Recipe) -> ModelConfig:
    """The model, with the vocabulary of video codes where it has them."""
    if (layout := getattr(recipe.env, "layout", None)) is not None:
        return replace(recipe.model.sizes, vocab=layout.vocab)
    return recipe.model.sizes


def choose_kernels(*settings: Any) -> None:
    """Fix whether this process multiplies through oneDNN, by what a stage is set to compute in.

    On a CPU without bf16 torch turns oneDNN off for the rest of the process at its first large bf16 product: what came
    after it, and a resumed run, would differ in the last digit from what a fresh process gives.
    """
    import torch

    if torch.backends.mkldnn.is_available():
        lacking = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        torch.backends.mkldnn.enabled = not (lacking and any(_has_bf16(schema.to_plain(part)) for part in settings))


def _has_bf16(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("bf16") is True or any(map(_has_bf16, value.values()))
    return any(map(_has_bf16, value)) if isinstance(value, list) else value == "bf16"


def run_stages(path: Path, rank: int, ranks: int, until: str | None = None) -> int:
    """Join the other ranks and run what is left of the recipe, or of its stages up to `until`."""
    import torch

    from ..core.mcore import setup, shim
    from ..core.mesh import Mesh
    from .job import Job, StopRequested, log

    recipe = schema.load(Recipe, path / "config.yaml")
    run = runs.attach(path, open_sinks(recipe.sinks, path, recipe.name) if rank == 0 else ())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not torch.cuda.is_available():
        shim.install()
    setup.start_process_group(recipe.parallel.timeout_minutes)
    job = Job(recipe, run, Mesh(rank, ranks, recipe.parallel), model_of(recipe))
    job.listen()
    health.Heartbeat(path / "logs" / f"rank-{rank}.alive.json", lambda: leases.holds(path, run.token)).start()
    if int(os.environ["LOCAL_WORLD_SIZE"]) < ranks:
        examine_nodes(rank)
    names = [stage.name for stage in recipe.stages]
    wanted = recipe.stages[: names.index(until) + 1 if until else None]
    left = [stage for stage in wanted if not job.mesh.any_rank(run.outcome(stage.name) is not None)]
    check_stages(left, job)
    for where, warning in find_warnings(recipe):
        job.warn(f"{where}: {warning}")
    try:
        for stage in left:
            if job.mesh.any_rank(job.stop_asked):
                raise StopRequested
            log.info("stage %s starts", stage.name)
            if job.mesh.is_main:
                say(stage_line(recipe, stage.name, {name: run.outcome(name) for name in names}))
            choose_kernels(recipe.precision, recipe.env, stage)
            job.start_stage()
            outcome: dict[str, Any] = _module(stage.kind).run(stage, job)
            if job.mesh.is_main:
                run.finish(stage.name, {**outcome, **job.spent()})
            job.mesh.barrier()
    except StopRequested:
        log.info("saved and stopped on request")
        return STOPPED
    finally:
        for sink in run.sinks:  # the process ends without the handlers that would do it
            sink.close()
    return 0


def main() -> None:
    """Run as `python -m terrella.launch.worker RUN [LAST_STAGE]`; started by the supervisor with RANK and WORLD_SIZE
    set.
    """
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    faulthandler.enable()
    path = Path(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_logging(path / "logs", rank)
    try:
        code = run_stages(path, rank, ranks, *sys.argv[2:3]) or FINISHED
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        if isinstance(error, ImportError):
            error = missing_extra(error) or error
        left = {"message": str(error), "order": time.time()}
        if not isinstance(error, TerrellaError):
            left |= {"message": describe_error(error), "passing": is_transient(error)}
        code = getattr(error, "exit_code", 1 if is_transient(error) else ProgramError.exit_code)
        with contextlib.suppress(StorageError):  # a full disk may take not even this; the code tells then
            write_json(error_file(path, rank), {**left, "exit_code": code})
        with contextlib.suppress(OSError):
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # a peer's death may have left collectives that never end; there is nothing more to save


if __name__ == "__main__":
    main()
