"""What `terrella check RECIPE` looks at: packages, layout, memory, disk, and what each stage needs from outside."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...core.by_path import ByPath
from ...core.config import ParallelConfig, check_layout
from ...core.errors import ConfigError, LengthError, TerrellaError, describe_error, missing_extra
from ...core.health import Check
from ...core.run import require_ours, require_same_settings
from ...models.geometry import adapter_parameters, count
from ...rl.environment import Split
from ...rl.hosted import CHECKING_S
from ...rl.own.config import DataEnvironment, OwnEnvironment
from ..extras import needed
from ..plan.layout import Work
from ..plan.memory import memory
from ..plan.of_recipe import layout_of
from ..recipe import Recipe
from ..recipe_warnings import find_warnings
from ..settings.base import Export, OnPolicy, dealt_evenly, needs_reference, retention_of
from ..settings.verbs import Collect, Reinforce, Score, Start, Tune
from ..worker import model_of, stage_check
from .check_env import SPLITS, check_for_run

SAVED = {"fp32": 4.0, "bf16": 2.0}  # bytes of a parameter
TRAINED = 12.0  # bytes of a trained parameter in a checkpoint: fp32 weight and two moments
MASTER = 4.0  # of these, of the weight
SAFE = 1.1  # of the disk that is foreseen


def look(recipe: Recipe, folder: Path) -> Iterator[Check]:
    """Everything that can be known before a run, one finding at a time; the quick ones first."""
    yield from _packages(recipe)
    yield from _layout(recipe)
    yield from _memory(recipe)
    yield _disk(recipe, folder)
    if (ours := guarded("--run", lambda: _require_ours(recipe, folder))).level == "fail":
        yield ours
        folder = folder / "another"  # nothing of that run is this recipe's, its tokenizer least of all
    yield from (Check("warn", where, warning) for where, warning in find_warnings(recipe))
    yield from _own_code(recipe)
    yield from _stages(recipe, alone(recipe, folder))


def _require_ours(recipe: Recipe, folder: Path) -> str:
    require_ours(folder)
    require_same_settings(folder, recipe)
    return ""


def guarded(what: str, function: Callable[[], str]) -> Check:
    """A finding from a function that says how things stand, or raises."""
    try:
        return Check("ok", what, function())
    except TerrellaError as error:
        return Check("fail", what, str(error))
    except ImportError as error:
        return Check("fail", what, str(missing_extra(error) or error))
    except Exception as error:
        return Check("fail", what, describe_error(error))


def _packages(recipe: Recipe) -> Iterator[Check]:
    try:
        wanted = needed(recipe)
    except TerrellaError as error:
        yield Check("fail", "packages", str(error))
        return
    for package, where in wanted.items():
        if importlib.util.find_spec(package) is None:
            yield Check("fail", where, str(missing_extra(ImportError(name=package))))
    have = sorted(package for package in wanted if importlib.util.find_spec(package) is not None)
    if have:
        yield Check("ok", "packages", f"{', '.join(have)} installed")


def _layout(recipe: Recipe) -> Iterator[Check]:
    p = recipe.parallel
    try:
        check_layout(p, world=recipe.ranks, **model_of(recipe).cut_sizes)
    except ConfigError as error:
        yield Check("fail", "layout", str(error))
        return
    copies = recipe.ranks // p.model_size
    cut = ", ".join(
        f"{name} {getattr(p, name)}" for name in ("tensor", "pipeline", "context", "expert") if getattr(p, name) > 1
    )
    ranks = f"{recipe.ranks} rank{'s' if recipe.ranks > 1 else ''}"
    yield Check(
        "ok", "layout", f"{ranks}: {cut + ', ' if cut else ''}{copies} cop{'ies' if copies > 1 else 'y'} of the model"
    )
    for stage in recipe.stages:
        for name in dealt_evenly(stage):
            number = getattr(stage, name)
            if number % copies:
                near = (
                    f"{number // copies * copies} or {(number // copies + 1) * copies}"
                    if number >= copies
                    else str(copies)
                )
                yield Check(
                    "fail",
                    f"stages.{stage.name}.{name}",
                    f"{number} does not divide over the {copies} data ranks",
                    f"set it to {near}",
                )


def _memory(recipe: Recipe) -> Iterator[Check]:
    """The fullest rank in the stage that takes most, by the estimates of `terrella plan`, with reference and critic."""
    trained = [stage for stage in recipe.stages if _microbatch(stage)]
    if not trained or recipe.ranks % recipe.parallel.model_size:
        return
    stage, parts = max(((s, _held(recipe, s)) for s in trained), key=lambda held: sum(held[1].values()))
    breakdown = ", ".join(f"{name} {_size(amount)}" for name, amount in parts.items())
    total = sum(parts.values())
    text = (
        f"about {_size(total)} on the fullest rank in stage '{stage.name}', beside what a sampler caches ({breakdown}; "
        f"{_microbatch(stage)} tokens at a time)"
    )
    device = _device_memory()
    if device is not None and total > 0.95 * device:
        fix = "more tensor or pipeline ranks, recompute: full, or a smaller microbatch"
        yield Check("fail", "memory", f"{text}; the GPU has {_size(device)}", fix)
        return
    yield Check("ok", "memory", text)


def _held(recipe: Recipe, stage: Any) -> dict[str, float]:
    """Bytes of what a rank holds while a stage trains."""
    model, layout = model_of(recipe), layout_of(recipe)
    used = memory(Work(model, _microbatch(stage), layout.data), layout)
    wide = SAVED[recipe.precision.params] / 2.0  # the estimate is for bf16
    parts = {"weights": used.weights * wide, "gradients": used.gradients, "optimizer": used.optimizer}
    if adapters := getattr(stage, "lora", None):
        own = adapter_parameters(model, adapters.rank) / (layout.tensor * layout.pipeline)  # experts have none
        parts |= {"gradients": 4.0 * own, "optimizer": 12.0 * own / (layout.data * layout.context)}
        if isinstance(stage, OnPolicy):
            parts["merged weights"] = parts["weights"]  # which the sampler reads
    parts["activations"] = (used.activations + used.working) * wide
    if isinstance(stage, OnPolicy) and needs_reference(stage):
        parts["reference"] = used.weights * wide
    if isinstance(stage, OnPolicy) and stage.critic is not None:
        parts["critic"] = used.weights * wide + used.gradients + used.optimizer
    return parts


def _microbatch(stage: Any) -> int:
    """Tokens of a microbatch."""
    inner = [stage, getattr(stage, "training", None)]
    return max((getattr(s, "microbatch_tokens", 0) or 0 for s in inner if s is not None), default=0)


def _device_memory() -> float | None:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _size(amount: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e12, "TB"), (1e9, "GB")) if amount >= unit / 10), (1e6, "MB"))
    return f"{amount / unit:.1f} {name}"


def disk_foreseen(recipe: Recipe) -> float:
    """Bytes of checkpoints and of the export when they take most; shards, rollouts and logs come to little beside them,
    or are small. A stage that trains has its checkpoints that stay and the one being written.
    """
    each, saved = count(model_of(recipe)).total, SAVED[recipe.precision.params]
    trained = [stage.name for stage in recipe.stages if retention_of(stage)]
    total = most = 0.0
    for stage in recipe.stages:
        retention = retention_of(stage)
        if isinstance(stage, Export | Start):
            total += each * saved
        elif retention is not None:
            adapters, best = getattr(stage, "lora", None), int(retention.best is not None)
            whole = each * (saved if adapters else TRAINED)
            whole *= 2 if getattr(stage, "critic", None) and isinstance(stage, OnPolicy) else 1
            most = max(most, total + (retention.keep + best + 1) * whole)
            if retention.finished == "whole" or stage.name == trained[-1]:
                total += (retention.keep + best) * whole
            else:
                total += (1 + best) * each * (saved if adapters else MASTER)
    return max(total, most)


def _disk(recipe: Recipe, folder: Path) -> Check:
    wanted = disk_foreseen(recipe)
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    text = f"about {_size(wanted)} of checkpoints and export in {folder}; {_size(free)} free"
    if SAFE * wanted > free:
        return Check("fail", "disk", text, "free space, or put the run elsewhere with --run")
    return Check("ok", "disk", text)


_IMPORT = """
import os, sys
from pathlib import Path
from terrella.core.by_path import load_object
from terrella.core.errors import ConfigError
said = "imported"
try:
    load_object(sys.argv[1], Path(), sys.argv[2])
except ConfigError as error:
    said = str(error)
os.write(int(sys.argv[3]), said[:4000].encode())
os._exit(0)
"""


def _own_code(recipe: Recipe) -> Iterator[Check]:
    """Stages, algorithms, policies and judges of the user's run in the ranks: each is imported, in a process of its
    own, as it may hang or end it.
    """
    for stage in recipe.stages:
        parts = {name: getattr(stage, name, None) for name in ("algorithm", "judge")}
        parts |= {f"policies[{i}]": policy for i, policy in enumerate(getattr(stage, "policies", ()))}
        named = {f"stages.{stage.name}": stage} | {f"stages.{stage.name}.{name}": own for name, own in parts.items()}
        for what, own in named.items():
            if isinstance(own, ByPath):
                yield guarded(what, partial(_imported, own))


def _imported(own: ByPath) -> str:
    ours, theirs = os.pipe()
    with open(ours, "rb") as said:
        command = [sys.executable, "-c", _IMPORT, own.path, own.digest, str(theirs)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        try:
            code = child.wait(CHECKING_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{own.path}: importing it did not finish within {CHECKING_S:g} s; do such work when it is called"
            ) from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and what it started
            child.wait()
        text = said.read().decode(errors="replace")
    if text != "imported":
        raise ConfigError(text or f"{own.path}: importing it ended the process (code {code})")
    return f"{own.path} can be imported"


def _stages(recipe: Recipe, job: Any) -> Iterator[Check]:
    """What each stage checks of its own inputs before a run; an environment that one of them found at fault is not
    tried again, and what several miss is said once.
    """
    from ..stages.verbs import tokenizer_of

    faulty: list[Any] = []
    said: set[str] = set()
    for stage in recipe.stages:
        env = getattr(stage, "env", None) or recipe.env
        if isinstance(stage, ByPath) or (check := stage_check(stage.kind)) is None:
            continue  # a stage of the user's own was imported above

        def looked(check: Any = check, stage: Any = stage) -> str:
            check(stage, job)
            return f"what {stage.kind} needs from outside is there"

        if hasattr(stage, "env") and env in faulty:
            continue
        finding = guarded(f"stages.{stage.name}", looked)
        if hasattr(stage, "env") and finding.level == "fail":
            faulty.append(env)
        if finding.level == "fail":
            if finding.text in said:
                continue
            said.add(finding.text)
            if isinstance(stage, Start):  # those that read its tokenizer will miss it too
                said.add(guarded("tokenizer", lambda: str(tokenizer_of(job))).text)
        yield finding


def require_room(recipe: Recipe, folder: Path) -> None:
    """Refuse prompts and lessons that the recipe's own model has no room for: a rehearsal shortens answers, and would
    not meet them. What cannot be looked at, as data that is not there, the rehearsal has something else for.
    """
    from .check_preview import preview

    job, faulty = alone(recipe, folder), list[Any]()
    verbs = [stage for stage in recipe.stages if isinstance(stage, Collect | Tune | Reinforce | Score)]
    looks = [(stage.env or recipe.env, partial(stage_check(stage.kind), stage, job)) for stage in verbs]
    for env, one in (*looks, (recipe.env, partial(preview, recipe, job, drawn=True))):
        try:
            if env not in faulty:  # one that hangs is not waited for again
                one()
        except LengthError:
            raise
        except Exception:
            faulty.append(env)


def own_environments(recipe: Recipe) -> Iterator[Check]:
    """The tasks of the user's own environments, of the splits that the recipe's stages play."""
    played: list[tuple[Any, set[Split]]] = []

    def note(settings: Any, split: Split) -> None:
        splits = next((splits for known, splits in played if known == settings), None)
        if splits is not None:
            splits.add(split)
        elif isinstance(settings, DataEnvironment | OwnEnvironment):
            played.append((settings, {split}))

    for stage in recipe.stages:
        if isinstance(stage, Collect | Tune | Reinforce):
            note(stage.env or recipe.env, "train")
        if isinstance(stage, Score) or (isinstance(stage, Reinforce) and stage.validation):
            note(stage.env or recipe.env, "test")
        for arm in stage.arms if isinstance(stage, Score) else ():
            note(arm.env, "test")
    for settings, splits in played:
        yield guarded("env", partial(check_for_run, settings, [split for split in SPLITS if split in splits]))


def alone(recipe: Recipe, folder: Path) -> Any:
    """The job as its only rank would see it; nothing is written."""
    from ...core.mesh import Mesh
    from ...core.run import Run
    from ..job import Job

    return Job(recipe, Run(folder, ""), Mesh(0, 1, ParallelConfig()), model_of(recipe))
