"""Which checkpoints stay: the newest and the best of a stage that trains, and of a finished one its weights."""

import json
import shutil
from pathlib import Path

import pytest

from terrella.core.checkpoint import CheckpointReader, drop_moments, has_moments
from terrella.core.errors import ConfigError
from terrella.core.metrics import MetricsFile
from terrella.launch import recipe
from terrella.launch.extend import extend
from terrella.tests.attacks.conftest import Victim, start
from terrella.tests.attacks.jobs import RECIPE
from terrella.tests.attacks.test_checkpoints import flip
from terrella.tests.launch import tiny_run
from terrella.tests.parallel.pool import run_ranks

JOB = "terrella.tests.attacks.jobs:drop_beside_a_slow_reader"
WEIGHTS = "stages.pretrain.checkpoints.finished=weights"
STEPS = "stages.rlvr.steps=5"
KEEP = ("stages.rlvr.checkpoints={keep: 1, best: entropy, lowest: true}",)


def steps(run: Path, stage: str) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints" / stage).glob("step-*"))


def test_the_optimizer_of_a_finished_stage_is_dropped_when_a_later_one_trains(victim: Victim, tmp_path: Path) -> None:
    run, how = tmp_path / "run", {"overrides": (WEIGHTS,)}
    assert start(run, **how).code == 0 and tiny_run.results(run) == victim.expected
    final = run / "checkpoints" / "pretrain" / "step-000004"
    assert steps(run, "pretrain") == [4] and not has_moments(final) and not list(final.glob("moments_*"))
    kinds = {kind for _, kind in CheckpointReader(final).index}  # which verifies what is left
    assert kinds == {"master"}
    assert steps(run, "rlvr") == [3, 4] and has_moments(run / "checkpoints" / "rlvr" / "step-000004")
    with pytest.raises(ConfigError, match=r"the optimizer's state of stage 'pretrain' .* --back-to pretrain:0"):
        extend(run, recipe.load(str(RECIPE), (WEIGHTS, "stages.pretrain.steps=6")))
    assert not (run / "set-aside").exists()
    longer = extend(Path(shutil.copytree(run, tmp_path / "longer")), recipe.load(str(RECIPE), (WEIGHTS, STEPS)))
    assert longer == ["rlvr"]
    end = start(tmp_path / "longer", overrides=(WEIGHTS, STEPS))
    assert end.code == 0 and "resuming at 4 of 5" in end.said, end
    flip(final / "shard_00000.safetensors")
    end = start(run, back="rlvr:0", **how)
    assert end.code == 3 and "shard_00000.safetensors: damaged" in end.said and "--back-to pretrain" in end.said, end
    end = start(run, back="pretrain", **how)
    assert end.code == 3 and "--back-to pretrain:0" in end.said, end
    assert start(run, back="pretrain:0", **how).code == 0 and tiny_run.results(run) == victim.expected


def test_a_slow_rank_has_read_the_weights_before_anything_is_dropped(tmp_path: Path) -> None:
    assert run_ranks(JOB, 2, folder=str(tmp_path)) == [(True, False)] * 2


def test_training_does_not_go_on_from_weights_alone(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    for step in (1, 2):
        drop_moments(run / "checkpoints" / "rlvr" / f"step-{step:06d}")
    end = start(run)
    assert end.code == 2 and "step-000002: holds weights alone" in end.said and "--back-to rlvr:0" in end.said, end
    assert start(run, back="rlvr:0").code == 0 and tiny_run.results(run) == victim.expected


def test_a_kill_while_the_optimizer_is_dropped_leaves_a_whole_checkpoint(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    path = run / "checkpoints" / "rlvr" / "step-000002"
    moments = (path / "moments_00000.safetensors").read_bytes()
    drop_moments(path)
    (path / "moments_00000.safetensors").write_bytes(moments)  # the manifest was written, and nothing deleted yet
    CheckpointReader(path)
    drop_moments(path)
    assert not (path / "moments_00000.safetensors").exists()


def test_the_best_checkpoint_stays_beside_the_newest(victim: Victim, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(run, overrides=KEEP).code == 0
    rows = [row for row in MetricsFile(run / "metrics.jsonl").rows() if row["stage"] == "rlvr"]
    value, best = min((row["entropy"], -row["step"]) for row in rows)
    assert steps(run, "rlvr") == sorted({-best, 4})
    told = json.loads((run / "stages" / "rlvr.json").read_text())
    assert told["best"] == {"checkpoint": f"checkpoints/rlvr/step-{-best:06d}", "step": -best, "value": value}
    end = start(tmp_path / "wrong", overrides=("stages.rlvr.checkpoints.best=entropie",))
    assert end.code == 0 and "stages: rlvr.checkpoints.best: no row of the record has 'entropie'" in end.said, end
