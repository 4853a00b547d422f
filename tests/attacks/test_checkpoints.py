"""A damaged checkpoint is never read: it is named, and the run goes on from the one before, or says how to."""

import json
from pathlib import Path

import pytest

from terrella.core.checkpoint import CheckpointReader
from terrella.core.errors import StorageError
from terrella.core.files import read_json
from terrella.core.metrics import MetricsFile
from terrella.tests.attacks.conftest import Victim, start
from terrella.tests.attacks.jobs import STOPPED_S, End
from terrella.tests.launch import tiny_run
from terrella.tests.parallel.pool import run_ranks


def flip(path: Path, place: int = -7) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_a_killed_run_ends_like_the_whole_one(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    left = run / "checkpoints" / "rlvr" / ".saving-step-000003-0123abcd"  # by a save that was killed
    left.mkdir()
    (left / "shard_00000.safetensors").write_bytes(bytes(1000))
    assert start(run).code == 0 and tiny_run.results(run) == victim.expected
    assert not list(run.glob("checkpoints/*/.*"))
    # of both starts; what came after the checkpoint was lost
    assert STOPPED_S < read_json(run / "stages" / "rlvr.json")["time/stage_s"] < 2 * STOPPED_S


@pytest.mark.parametrize("file", ["shard_00000.safetensors", "manifest.json", "extra.json"])
def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named(
    victim: Victim, tmp_path: Path, file: str
) -> None:
    run = victim.copy(tmp_path / "run")
    damaged = run / "checkpoints" / "rlvr" / "step-000002" / file
    if file == "manifest.json":  # another number where a number was
        damaged.write_text(damaged.read_text().replace('"updates": 2', '"updates": 7'))
    else:
        flip(damaged)
    end = start(run)
    assert end.code == 0 and f"{damaged}: damaged" in end.said and "resuming at 1 of 4" in end.said, end
    assert tiny_run.results(run) == victim.expected


def test_a_stage_whose_last_checkpoint_is_damaged_is_repeated_only_on_request(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    damaged = run / "checkpoints" / "pretrain" / "step-000004" / "shard_00000.safetensors"
    flip(damaged)
    end = start(run)
    assert end.code == 3 and f"{damaged}: damaged" in end.said and "--back-to pretrain" in end.said, end
    end = start(run, back="pretrain")
    assert end.code == 0 and "resuming at 2 of 4" in end.said, end
    assert tiny_run.results(run) == victim.expected
    # nothing was deleted
    assert (run / "set-aside" / "001" / "checkpoints" / "rlvr" / "step-000002" / "manifest.json").exists()


def test_no_whole_checkpoint_left_is_said_and_a_step_can_be_chosen(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    for step in (1, 2):
        flip(run / "checkpoints" / "rlvr" / f"step-{step:06d}" / "shard_00000.safetensors")
    end = start(run)
    assert end.code == 3 and "none of its checkpoints is complete" in end.said and "--back-to rlvr:0" in end.said, end
    wrong = start(run, back="rlvr:9")
    assert wrong.code == 2 and "are: 1, 2" in wrong.said, wrong
    assert start(run, back="rlvr:0").code == 0
    assert tiny_run.results(run) == victim.expected


def test_a_checkpoint_under_another_name_is_not_that_step(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    folder = run / "checkpoints" / "rlvr"
    (folder / "step-000002").rename(folder / "step-000003")
    end = start(run)
    assert end.code == 0 and "under another name" in end.said and tiny_run.results(run) == victim.expected, end


SELDOM = ("stages.rlvr.checkpoint_every=2",)


def start_writing(run: Path, how: str) -> End:
    return run_ranks("terrella.tests.attacks.jobs:start_writing", 1, folder=str(run), how=how, overrides=SELDOM)[0]


def test_training_goes_on_while_a_checkpoint_is_written(victim: Victim, tmp_path: Path) -> None:
    """The files of step 2 are written only once step 3 was trained, and the checkpoint is there and whole."""
    end = start_writing(tmp_path / "run", "late")
    assert end.code == 0 and tiny_run.results(tmp_path / "run") == victim.expected, end
    rows = [row for row in MetricsFile(tmp_path / "run" / "metrics.jsonl").rows() if row["stage"] == "rlvr"]
    stood = [row.get("time/saving_s", 0.0) for row in rows]  # none before the first save
    assert stood == sorted(stood) and stood[2] - stood[1] > stood[1] - stood[0]  # step 2 begins to save


def test_a_checkpoint_that_could_not_be_written_is_named_at_the_end_of_the_next_step(
    victim: Victim, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    end = start_writing(run, "full")
    assert end.code == 3 and "rlvr/.saving-step-000002" in end.said and "free space" in end.said, end
    assert [row["step"] for row in MetricsFile(run / "metrics.jsonl").rows() if row["stage"] == "rlvr"] == [1, 2, 3]
    assert not list(run.glob("checkpoints/rlvr/*"))
    assert start(run, overrides=SELDOM).code == 0 and tiny_run.results(run) == victim.expected


def test_merged_adapters_of_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    message = run_ranks("terrella.tests.attacks.jobs:merge_damaged_adapters", 1, folder=str(tmp_path))[0]
    assert "shard_00000.safetensors: damaged" in message and "--back-to tuned" in message


def test_a_manifest_of_the_first_format_is_read_and_one_that_lost_its_digest_is_not(
    victim: Victim, tmp_path: Path
) -> None:
    run = victim.copy(tmp_path / "run")
    path = run / "checkpoints" / "rlvr" / "step-000002" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    path.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="it has no digest"):
        CheckpointReader(path.parent)
    path.write_text(json.dumps({**content, "format": 1}))
    assert CheckpointReader(path.parent).manifest["updates"] == 2
