"""Agents at scale, as SLURM jobs: the trainer tensor and data parallel over two nodes, two real vLLM servers, one of
them tensor parallel, on a third. SPA from self-play to multi-turn RL, and a phase of WebRL in Chromium.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from terrella.core.files import read_json
from terrella.core.metrics import MetricsFile
from terrella.data.shards import ShardSet
from terrella.launch import recipe as recipes
from terrella.rl.journal import Journal
from terrella.tests.integration.slurm_cluster import Cluster
from terrella.tests.integration.test_slurm import job_ids, require_slurm
from terrella.tests.integration.test_vllm import CPU
from terrella.tests.integration.test_web import missing
from terrella.tests.parallel.recipe_jobs import run_case
from terrella.tests.parallel.test_recipes import SGD, TOLERANCE

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3600)]
PATIENCE_S = 2400.0  # of a busy machine
DRIFT = 1e-4  # mean |sampler - trainer log-prob| in fp32
MODEL = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "ffn": 96}  # vLLM's smallest heads
PLAIN = {**SGD, "betas": list(SGD["betas"])}  # as in tests/parallel/test_recipes.py: AdamW turns rounding into steps
COMMON = {"model": MODEL, "precision": {"params": "fp32"}, "parallel": {"tensor": 2}}


def served(length: int) -> dict[str, Any]:
    """Rollouts from two servers, one of them over two ranks of its own."""
    sampler = {"kind": "vllm", "devices": ["0,1", ""], "eager": True, "max_length": length, "max_sequences": 8}
    return {"keep_samples": True, "sampler": sampler | {"start_s": 1800.0, "request_s": 900.0, "sync_s": 900.0}}


SPA = {
    "base": "spa-sokoban-tiny",
    "name": "spa-served",
    **COMMON,
    "stages": {
        "format": {"prompts": 48},
        "warmup": {"epochs": 12},
        "selfplay": {"prompts": 8, "env": {"only_tagged": False}, "rollouts": served(64)},
        "blanked": None,
        "sft": {"epochs": 2, "optimizer": PLAIN, "log_every": 1},
        "sft-blanked": None,
        "longer-warmup": None,
        "spa": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "optimizer": PLAIN}
        | {"checkpoint_every": 1, "rollouts": served(64)},
        "masked": None,
        "vanilla": None,
        "evaluate": None,
    },
}

TRAINING = {"optimizer": PLAIN, "sequences_per_step": 8, "log_every": 1}
# a critic that has learnt little: of a good one's advantages rounding is a part, since nearly equal values cancel
CRITIC = {**TRAINING, "optimizer": {**PLAIN, "lr": 1e2}}
WEBRL = {
    "base": "webrl-miniwob-tiny",
    "name": "webrl-served",
    **COMMON,
    "env": {"at_once": 2},
    "stages": {
        "demos": {"prompts": 12},
        "sft": {"epochs": 12},
        "first": {"prompts": 4},
        "orm": {"training": TRAINING},
        "phase": {"tasks": 8, "orm": "orm", "evaluated": False, "replay_low": 0.0, "replay_high": 1.0}
        | {"actor": TRAINING, "critic": CRITIC, "rollouts": served(320)},
        "export": {"model": "phase-1-actor"},
    },
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in CPU.items():
                patch.setenv(name, value)
            yield cluster.up()
    finally:
        cluster.down()


def run_job(cluster: Cluster, recipe: Path, run: Path) -> None:
    """A job of two nodes for the trainer and one for the servers, to its end in one start."""
    command = [sys.executable, "-m", "terrella", "launch", str(recipe), "--gpus", "0", "--time", "60"]
    command += ["--nodes", "2", "--ranks-per-node", "2", "--rollout-nodes", "1", "--run", str(run)]
    environment = {**cluster.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (job,) = job_ids(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600))
    known = cluster.wait(job, deadline_s=PATIENCE_S)
    assert known["Restarts"] == "0" and known["NumNodes"].startswith("3")


def both_served(run: Path, stage: str) -> None:
    """Both servers of a stage answered, and one of them was tensor parallel."""
    logs = [(run / "stages" / stage / "sampler" / f"vllm-0-{i}.log").read_text() for i in range(2)]
    assert ["'tensor_parallel_size': 2" in log for log in logs] == [True, False]
    assert all(log.count('/v1/completions HTTP/1.1" 200') for log in logs)


def sampled(run: Path, stage: str) -> int:
    """How many tokens the journal of a stage holds; every request is there once."""
    files = sorted((run / "stages" / stage / "journal").glob("samples-*.jsonl"))
    kept = Journal(run / "stages" / stage / "journal").samples(strict=True)
    assert len(kept) == sum(len(path.read_text().splitlines()) for path in files) > 0
    return sum(len(sample.ids) for sample in kept.values())


def lessons(run: Path, stage: str, part: str = "train") -> Counter[tuple[bytes, bytes]]:
    """What a collect stage wrote, whoever wrote it."""
    folder = run / "stages" / stage / part
    shards = ShardSet(folder) if any(folder.glob("*.tar")) else []
    rows = [shards[i] for i in range(len(shards))]
    return Counter((np.asarray(r["tokens.npy"]).tobytes(), np.asarray(r["roles.npy"]).tobytes()) for r in rows)


def rows_of(run: Path, stage: str) -> list[dict[str, Any]]:
    return [row for row in MetricsFile(run / "metrics.jsonl").rows() if row["stage"] == stage]


def compare_on_one_rank(recipe: Path, run: Path, folder: Path, stage: str, names: tuple[str, ...]) -> Path:
    """The stage again on one rank, from what the run left before it and on its samples: counts equal, the rest to
    rounding.
    """
    one = folder / "runs" / stage
    run_case(recipes.load(str(recipe)), one, source=run, stage=stage, samples=run)
    there, here = rows_of(run, stage), rows_of(one, stage)
    assert len(there) == len(here)
    for a, b in zip(there, here, strict=True):
        assert a.get("tokens") == b.get("tokens") and a.get("reward/mean") == b.get("reward/mean"), (stage, a, b)
        for name in names:
            assert abs(a[name] - b[name]) <= TOLERANCE * max(1.0, abs(b[name])), (stage, name, a, b)
            print(f"{stage} {a['step']} {name}: {a[name]:.9f} there, {b[name]:.9f} here")
    return one


def test_spa_from_selfplay_to_rl_in_one_job(slurm: Cluster, tmp_path: Path) -> None:
    recipe, run = tmp_path / "spa.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(SPA))
    run_job(slurm, recipe, run)
    for stage in ("selfplay", "spa"):
        both_served(run, stage)
        print(f"{stage}: {sampled(run, stage)} sampled tokens, {read_json(run / 'stages' / f'{stage}.json')}")
    rows = rows_of(run, "spa")
    assert len(rows) == 3 and rows[-1]["tokens"] == sampled(run, "spa")
    print("drift", [row["logprob_drift/mean"] for row in rows])
    assert max(row["logprob_drift/mean"] for row in rows) <= DRIFT
    trained = Journal(run / "stages" / "spa" / "journal").trained()
    assert len(trained) == 3 * 4 and set(trained.values()) == {1}
    one = compare_on_one_rank(recipe, run, tmp_path, "selfplay", ())
    assert lessons(one, "selfplay") == lessons(run, "selfplay")
    for stage in ("sft", "spa"):
        assert compare_on_one_rank(recipe, run, tmp_path, stage, ("loss", "grad_norm"))


def test_a_phase_of_webrl_in_chromium(slurm: Cluster, tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        missing("chromium is not installed (make system-deps)")
    recipe, run = tmp_path / "webrl.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(WEBRL))
    run_job(slurm, recipe, run)
    both_served(run, "phase-1-played")
    played, judged = (read_json(run / "stages" / f"phase-1-{part}.json") for part in ("played", "rollout"))
    print(f"played {sampled(run, 'phase-1-played')} tokens: {played}; judged: {judged}")
    assert played["trajectories"] == judged["trajectories"] == 8 and played["invalid"] == 0
    assert 0.0 < played["logprob_drift/mean"] <= DRIFT
    one = compare_on_one_rank(recipe, run, tmp_path, "phase-1-played", ())
    for part in ("train", "others"):
        assert lessons(one, "phase-1-played", part) == lessons(run, "phase-1-played", part)
    for stage in ("phase-1-replay", "phase-1-critic", "phase-1-actor"):
        one = compare_on_one_rank(recipe, run, tmp_path, stage, ("loss", "grad_norm"))
    told = [read_json(place / "stages" / "phase-1-actor.json") for place in (run, one)]
    assert told[0]["steps"] == told[1]["steps"] == len(rows_of(run, "phase-1-actor")) > 0
