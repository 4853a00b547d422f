"""States of a video tokenizer's training: a damaged one is named and never read; a full disk is named by its file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from terrella.core import run as runs
from terrella.core.by_path import ByPath, OwnFile
from terrella.core.config import OptimizerConfig
from terrella.core.errors import ConfigError, StorageError
from terrella.core.files import load_tensors, save_tensors
from terrella.core.mesh import Mesh
from terrella.launch import recipe as recipes
from terrella.launch.job import Job
from terrella.launch.settings.video import VideoReal2Sim
from terrella.launch.stages.verbs import require_same_files
from terrella.launch.stages.video_real2sim import (
    FIRST,
    TRUTH,
    keep_truth,
    load_truth,
    made_under,
    require_same_conditions,
)
from terrella.launch.stages.video_tokenizer import STATE, keep, resume, settle_state
from terrella.launch.worker import model_of
from terrella.models.video.config import TokenizerConfig, TokenizerLoss
from terrella.models.video.training import TokenizerTrainer
from terrella.rl.own.config import DataEnvironment, OwnEnvironment
from terrella.rl.worlds.tabletop import PLAIN, Table

CONFIG = TokenizerConfig(
    "frame", 16, 16, channels=(8, 8), groups=4, latent=8, levels=(4, 3), encoder_resnets=1, decoder_resnets=1
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    recipe = recipes.load("video-tiny", ())
    run, lease = runs.create(tmp_path / "run", recipe)
    (run.path / "stages" / "tokenizer").mkdir()
    yield Job(recipe, run, Mesh(), model_of(recipe))
    lease.release()


def fresh() -> TokenizerTrainer:
    return TokenizerTrainer(CONFIG, TokenizerLoss(lpips=0, adversary=0), OptimizerConfig(lr=1e-2), seed=1)


def trained(job: Job, steps: int) -> tuple[Path, TokenizerTrainer]:
    """A stage's folder after so many steps, each kept."""
    folder, trainer = job.stage_folder("tokenizer"), fresh()
    for step in range(1, steps + 1):
        job.run.metrics.append("tokenizer", step, trainer.step(torch.full((1, 1, 3, 16, 16), 0.1 * step)))
        settle_state(job, keep(job, "tokenizer", folder, trainer), wait=True)
    return folder, trainer


def states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*.pt"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.97])
def test_a_damaged_state_is_named_and_the_one_before_it_taken(
    job: Job, capsys: pytest.CaptureFixture, place: float
) -> None:
    folder, trainer = trained(job, 3)
    assert [int(STATE.fullmatch(p.name)[1]) for p in states(folder)] == [2, 3]  # type: ignore[index]
    newest = states(folder)[-1]
    flip(newest, int(place * newest.stat().st_size))
    other = fresh()
    assert resume(job, "tokenizer", folder, other) == 2 and f"{newest}: damaged" in capsys.readouterr().out
    assert [row["step"] for row in job.run.metrics.rows()] == [1, 2]
    other.step(torch.full((1, 1, 3, 16, 16), 0.1 * 3))
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), trainer.model.parameters(), strict=True))
    flip(states(folder)[0], -9)
    with pytest.raises(StorageError, match=r"none of its states is whole.*--back-to tokenizer"):
        resume(job, "tokenizer", folder, fresh())


def test_a_state_under_another_name_and_a_changed_record_are_said(job: Job, capsys: pytest.CaptureFixture) -> None:
    folder, _ = trained(job, 2)
    path = job.run.metrics.path
    path.write_text(path.read_text().replace('"l1": 0', '"l1": 9'))
    assert resume(job, "tokenizer", folder, fresh()) == 2
    assert f"{path}: rows were changed that stage tokenizer wrote" in capsys.readouterr().out
    newest = states(folder)[-1]
    newest.rename(folder / newest.name.replace("0000002", "0000009"))
    with pytest.raises(StorageError, match="is the state of step 2, under another name"):
        resume(job, "tokenizer", folder, fresh())


def test_a_state_of_an_earlier_release_is_read(job: Job) -> None:
    folder, _ = trained(job, 1)
    states(folder)[0].rename(folder / "state-0000001.pt")
    assert resume(job, "tokenizer", folder, fresh()) == 1


def test_a_full_disk_is_named_by_the_file(job: Job) -> None:
    folder, trainer = trained(job, 1)
    (folder / ".state.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"\.state\.partial: No space left on device.*disk is full"):
        settle_state(job, keep(job, "tokenizer", folder, trainer), wait=True)
    assert len(states(folder)) == 1


def test_weights_that_cannot_be_written_or_are_not_whole_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {"a": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(StorageError, match=r"weights\.safetensors: not a whole safetensors file"):
        load_tensors(path)
    with pytest.raises(StorageError, match=r"full\.safetensors"):
        save_tensors(Path("/proc/full.safetensors"), {"a": torch.zeros(1000)})


def test_the_record_of_what_the_rows_were_is_checked(job: Job, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    settings = DataEnvironment("data", train=OwnFile(str(rows)))
    require_same_files(settings, job.run)
    require_same_files(settings, job.run)
    record = job.run.path / runs.ROWS
    whole = record.read_text()
    for damaged in (whole.replace("rows.jsonl", "rowx.jsonl"), whole.replace('"digest"', '"digesu"'), "[1]"):
        record.write_text(damaged)
        with pytest.raises(StorageError, match=r"rows\.json: damaged"):
            require_same_files(settings, job.run)
    record.write_text(whole)
    rows.write_text('{"prompt": "b"}\n')
    check = replace(job, run=runs.Run(job.run.path, ""))
    for one in (job, check):
        with pytest.raises(ConfigError, match=r"rows\.jsonl: has changed since this run was started"):
            require_same_files(settings, one.run)
    (job.run.path / "stages" / "tokenizer").rmdir()  # nothing has begun, and the next start takes other rows
    require_same_files(settings, check.run)
    assert record.read_text() == whole


def test_modules_beside_a_reward_or_an_environment_are_those_of_the_start(job: Job, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("from grading import normalise\n")
    (tmp_path / "grading.py").write_text("def normalise(text): return text\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    own = f"{tmp_path / 'my.py'}:score"
    settings = (
        DataEnvironment("data", train=OwnFile(str(tmp_path / "rows.jsonl")), reward=ByPath(own)),
        OwnEnvironment(own),
    )
    for one in (*settings, *settings):
        require_same_files(one, job.run)
    (tmp_path / "grading.py").write_text("def normalise(text): return text.lower()\n")
    for one in settings:
        with pytest.raises(ConfigError, match=r"grading\.py: has changed since this run was started; restore it"):
            require_same_files(one, job.run)


def test_what_the_simulator_showed_is_checked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / FIRST, close=np.zeros((1, 2, 2, 3), np.uint8))
    rates = {"close/random": {"wins": 1, "judged": 1, "agree": 1}}
    made = VideoReal2Sim("video-real2sim", "sim", [], episodes=1, frames=4)
    keep_truth(tmp_path, 1, rates, made_under(made, PLAIN))
    kept = load_truth(str(tmp_path / TRUTH))
    assert kept["rates"] == rates
    require_same_conditions(kept, made, PLAIN)
    require_same_conditions({"episodes": 1}, made, Table(stride=3))  # of an earlier release
    for asked, table, key in (
        (replace(made, episodes=2), PLAIN, "episodes = 1"),
        (replace(made, frames=5), PLAIN, "frames_each = 4"),
        (replace(made, first_seed=7), PLAIN, "first_seed = 900000"),
        (made, Table(stride=3), "table = .*'stride': 1"),
    ):
        with pytest.raises(ConfigError, match=f"was made with {key}"):
            require_same_conditions(kept, asked, table)
    whole = (tmp_path / TRUTH).read_text()
    (tmp_path / TRUTH).write_text(whole.replace('"wins": 1', '"wins": 0'))
    with pytest.raises(StorageError, match=r"truth\.json: damaged"):
        load_truth(str(tmp_path / TRUTH))
    (tmp_path / TRUTH).write_text(whole)
    flip(tmp_path / FIRST, 60)
    with pytest.raises(StorageError, match=r"first\.npz: is not the one that .*truth\.json was written with"):
        load_truth(str(tmp_path / TRUTH))
