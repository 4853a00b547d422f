"""`terrella doctor [PATH ...]`: this machine, or a run directory, checkpoint, export or shards; one line for each
finding, with the fix.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ...core import health
from ...core.environment import versions
from ...core.errors import TerrellaError
from ...core.files import read_json
from ...core.health import Check
from ...core.lease import RENEW_S, TIMEOUT_S
from ...core.run import Run

TESTED = {"torch": "2.", "megatron-core": "0.16."}  # major versions the engine is tested with
STUCK_S = 120.0


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Skip what reads or computes much: digests, shards, kernels.")
@click.option("--gpus", "gpus_only", is_flag=True, help="Only this machine's GPUs: memory errors, Xid errors, DCGM.")
def doctor(paths: tuple[Path, ...], quick: bool, gpus_only: bool) -> None:
    """Look for what is wrong: with this machine, or with each PATH (a run directory, a checkpoint, an export, a
    folder of shards).
    """
    failed = 0
    if gpus_only:
        checks = every_gpu()
    else:
        checks = [check for path in paths for check in look(path, quick)] if paths else this_machine(quick)
    for check in checks:
        click.echo(check.line())
        failed += check.level == "fail"
    if failed:
        host = f"node {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}: " if gpus_only else ""
        raise TerrellaError(f"{host}{failed} finding{'s' if failed > 1 else ''} to fix")


def every_gpu() -> Iterator[Check]:
    """What can be known of the GPUs without computing on them: the driver's counts, the kernel's log, DCGM. In a SLURM
    job none of those that it was given may be missing.
    """
    found = guarded("gpu", health.gpus)
    yield from found
    given, seen = os.environ.get("SLURM_GPUS_ON_NODE", ""), sum(check.what.startswith("gpu ") for check in found)
    parts = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")  # then SLURM counts parts of GPUs
    if given.isdigit() and seen < int(given) and not parts:
        yield Check(
            "fail", "gpus", f"the driver shows {seen} of the {given} that SLURM gave this job", "drain the node"
        )
    yield from guarded("xid", health.kernel_log)
    yield from guarded("dcgm", health.dcgm)


def guarded(what: str, function: Callable[[], Any]) -> list[Check]:
    """A check that cannot even run is a finding too."""
    try:
        checks = function()
    except Exception as error:
        return [Check("fail", what, f"{type(error).__name__}: {error}", "see the message")]
    return checks if isinstance(checks, list) else [checks]


def this_machine(quick: bool) -> Iterator[Check]:
    """Versions, host, GPUs, arithmetic, kernels."""
    yield from packages()
    yield from health.machine(Path("runs"))
    yield from guarded("gpu", health.gpus)
    if not quick:
        yield from guarded("arithmetic", health.matmul)
        yield from guarded("kernels", kernels)


def packages() -> list[Check]:
    """Whether what is installed is what the project is tested with."""
    have, found = versions(), []
    for name, start in TESTED.items():
        if name not in have:
            found.append(Check("fail", name, "not installed", "pip install -c requirements/constraints.txt -e ."))
        elif not have[name].startswith(start):
            found.append(
                Check(
                    "warn",
                    name,
                    f"{have[name]}, tested with {start}x",
                    "pip install -c requirements/constraints.txt -e .",
                )
            )
    others = ", ".join(f"{name} {version}" for name, version in have.items())
    return [*found, Check("ok", "versions", others)]


def kernels() -> Check:
    """The head's log-probs and their gradient against double precision."""
    import torch

    from ...kernels import linear_logprob, token_logprob

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = torch.randn(64, 32, generator=generator), torch.randn(200, 32, generator=generator)
    targets_N = torch.randint(0, 200, (64,), generator=generator)
    exact_N = torch.log_softmax(hidden_NH.double() @ weight_VH.double().T, -1).gather(1, targets_N[:, None])[:, 0]
    logits_NV = (hidden_NH.double() @ weight_VH.double().T).float()
    worst = 0.0
    for got_N, _ in (
        token_logprob(logits_NV.to(device), targets_N.to(device)),
        linear_logprob(hidden_NH.to(device), weight_VH.to(device), targets_N.to(device)),
    ):
        worst = max(worst, float((got_N.double().cpu() - exact_N).abs().max()))
    if not worst < 1e-3:
        return Check(
            "fail",
            "kernels",
            f"log-probs are off by {worst:.2g} on {device}",
            "run `pytest tests/kernels` and report it",
        )
    return Check("ok", "kernels", f"log-probs agree with double precision to {worst:.1g} on {device}")


def look(path: Path, quick: bool) -> Iterator[Check]:
    """A path by what it holds."""
    if not path.exists():
        yield Check("fail", str(path), "no such file or folder", "check the path")
    elif (path / "config.yaml").exists() or (path / "lease.json").exists():
        yield from run_directory(path, quick)
    elif (path / "manifest.json").exists():
        yield from guarded(str(path), lambda: checkpoint(path, quick))
    elif (path / "export_proof.json").exists():
        yield from guarded(str(path), lambda: export(path, quick))
    elif path.suffix == ".tar" or list(path.glob("*.tar")):
        yield from guarded(str(path), lambda: shards(path, quick))
    else:
        yield Check(
            "warn",
            str(path),
            "neither a run directory, nor a checkpoint, nor a proven export, nor shards",
            "name one of those",
        )


def checkpoint(path: Path, quick: bool) -> Check:
    """A checkpoint's files, by their stated sizes and digests."""
    from ...core.checkpoint import CheckpointReader

    reader = CheckpointReader(path, verify=not quick)
    size = sum(stated["bytes"] for stated in reader.manifest["files"].values())
    return Check(
        "ok", str(path), f"checkpoint of {size / 1e6:.1f} MB" + ("" if quick else ", every byte as it was written")
    )


def export(path: Path, quick: bool) -> Check:
    """An exported model against the proof that lies beside it."""
    if quick:
        return Check("ok", str(path), "an export with its proof, not read")
    from ...models.folder import verify_export

    proof = verify_export(path)
    return Check(
        "ok",
        str(path),
        f"export of {len(proof['tensors']) or len(proof['files'])} proven parts, every byte as it was written",
    )


def shards(path: Path, quick: bool) -> Check:
    """Shards, every member of them."""
    if quick:
        return Check("ok", str(path), f"{len(list(path.glob('*.tar')))} shards, not read")
    from ...data.shards.verify import verify

    report = verify(str(path), quarantine=False, tell=lambda done, total: None)
    if report.problems:
        fix = f"terrella shards verify --quarantine {path}"
        return Check("fail", str(path), f"{len(report.problems)} problems, the first: {report.problems[0]}", fix)
    return Check("ok", str(path), f"{report.samples} samples in {report.shards} shards, all whole")


def run_directory(path: Path, quick: bool) -> Iterator[Check]:
    """Why a run is stopped, stuck, slow or diverging."""
    from ..report.health import check_metrics
    from ..report.load import load_run
    from .watch import slow_ranks

    run = load_run(path)
    held = yield from owner(path)
    for problem in run.problems:
        yield Check("warn", "record", problem, "restore the file from a backup, or start the stage anew")
    yield from guarded("logs", lambda: list(ended(path)))
    yield from pace(run.metrics, path, held)
    yield from guarded("ranks", lambda: list(ranks(path, held)))
    for text in slow_ranks(path) if held else ():
        yield Check(
            "warn",
            "slow rank",
            text,
            "nvidia-smi and top on that host: heat, another program; drain the node if it lasts",
        )
    for finding in check_metrics(run.metrics, run.samples, run.finished):
        level = {"error": "fail", "warning": "warn", "note": "ok"}[finding.level]
        fix = "docs/troubleshooting.md names causes" if level != "ok" else ""
        yield Check(level, "numbers", finding.text, fix)  # type: ignore[arg-type]
    yield from guarded(
        "finished stages", lambda: finished(path, [str(stage.get("name")) for stage in run.config.get("stages", ())])
    )
    for folder in sorted((path / "checkpoints").glob("*/step-*")):
        yield from guarded(str(folder), lambda folder=folder: checkpoint(folder, quick))
    for folder in sorted(p for p in (path / "stages").glob("*/shards") if p.is_dir()):
        yield from guarded(str(folder), lambda folder=folder: shards(folder, quick))
    if (path / "export" / "export_proof.json").exists():
        yield from guarded(str(path / "export"), lambda: export(path / "export", quick))
    yield health.machine(path)[0]


def finished(path: Path, stages: list[str]) -> list[Check]:
    """What finished stages left, by the sums that they left with it."""
    changed = Run(path, "").verify(stages)
    fix = "restore the file from a backup"
    return [Check("warn", "record", text, fix) for text in changed] or [
        Check("ok", "finished stages", "all as they were left")
    ]


def owner(path: Path) -> Iterator[Check]:
    """Who writes the run; returns whether somebody does."""
    lease = read_json(path / "lease.json")
    if not lease or lease.get("released"):
        yield Check("ok", "owner", "nobody writes this run now")
        return False
    silent = time.time() - (path / "lease.json").stat().st_mtime
    who = f"process {lease['pid']} on {lease['host']}"
    if silent > TIMEOUT_S:
        fix = "it is dead or cut off: start the same command again"
        yield Check("fail", "owner", f"{who} has given no sign for {silent:.0f} s", fix)
        return False
    late = silent > 2 * RENEW_S
    yield Check(
        "warn" if late else "ok",
        "owner",
        f"{who}, last sign {silent:.0f} s ago",
        "look at the file system's speed" if late else "",
    )
    return True


def ended(path: Path) -> Iterator[Check]:
    """Messages that workers left when they ended, and crashes that the cluster job counted."""
    for file in sorted((path / "logs").glob("rank-*.error.json"))[:8]:
        error = read_json(file)
        yield Check(
            "fail",
            file.name.removesuffix(".error.json"),
            error["message"],
            f"exit code {error['exit_code']}; docs/troubleshooting.md",
        )
    crashes = path / "logs" / "crashes"
    lines = crashes.read_text().splitlines() if crashes.exists() else []
    if lines:
        yield Check(
            "warn",
            "restarts",
            f"{len(lines)} crashes of cluster jobs, the last with code {lines[-1].split()[-1]}",
            "read logs/*.log",
        )


def pace(metrics: list[dict[str, Any]], path: Path, held: bool) -> Iterator[Check]:
    """Whether steps still come, and whether they come as fast as before."""
    if not metrics:
        yield Check("ok", "steps", "none recorded yet")
        return
    stage = metrics[-1]["stage"]
    rows = [r for r in metrics if r["stage"] == stage and isinstance(r.get("time/step_s"), float)]
    age = time.time() - (path / "metrics.jsonl").stat().st_mtime
    if not rows:
        yield Check("ok", "steps", f"{stage} at step {metrics[-1]['step']}")
        return
    typical, last = statistics.median(r["time/step_s"] for r in rows), rows[-1]
    every = last["step"] - rows[-2]["step"] if len(rows) > 1 else 1
    text = f"{stage} at step {last['step']}, {typical:.2f} s each (median), last one recorded {age:.0f} s ago"
    if held and age > max(STUCK_S, 10 * typical * every):
        yield Check(
            "fail", "steps", text, "it is stuck: see the ranks below; if it lasts, stop the job and start it again"
        )
    elif len(rows) >= 10 and statistics.median(r["time/step_s"] for r in rows[-5:]) > 1.5 * typical:
        yield Check(
            "warn",
            "steps",
            text + "; the last ones are 1.5 x slower",
            "look for longer rollouts, a hot GPU or a busy host",
        )
    else:
        yield Check("ok", "steps", text)
    rollout = [
        r["time/rollout_s"] / r["time/step_s"]
        for r in rows
        if isinstance(r.get("time/rollout_s"), float) and r["time/step_s"] > 0
    ]
    if rollout and statistics.median(rollout) > 0.7:
        share = 100 * statistics.median(rollout)
        yield Check(
            "warn",
            "time",
            f"{share:.0f} % of a step is sampling",
            "add sampler GPUs, shorten answers, or sample ahead of training",
        )


def ranks(path: Path, held: bool) -> Iterator[Check]:
    """Where each rank's main thread is; a rank that waits for another stands in a collective, the other does not."""
    beats = {int(p.stem.split("-")[1].split(".")[0]): read_json(p) for p in (path / "logs").glob("rank-*.alive.json")}
    if not held or not beats:
        return
    now = time.time()
    silent = [rank for rank, beat in beats.items() if now - beat["time"] > 5 * health.BEAT_S]
    if silent:
        hosts = ", ".join(sorted({beats[rank]["host"] for rank in silent}))
        yield Check(
            "fail",
            "ranks",
            f"{sorted(silent)} on {hosts} gave no sign for {5 * health.BEAT_S:.0f} s",
            "their node or file system hangs",
        )
    places: dict[str, list[int]] = {}
    for rank, beat in sorted(beats.items()):
        if rank not in silent and now - beat["since"] > STUCK_S:
            places.setdefault(beat["at"], []).append(rank)
    for place, members in places.items():
        many = f"{len(members)} ranks, first {members[0]}" if len(members) > 1 else f"rank {members[0]}"
        yield Check(
            "warn",
            many,
            f"at {place} for over {STUCK_S:.0f} s",
            "the rank that stands elsewhere than the others holds them up",
        )
