"""What users get wrong or disks do: one clear message, a non-zero code, and nothing lost."""

import subprocess
from pathlib import Path

import pytest

from terrella.tests.launch import tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


def only_error(done: subprocess.CompletedProcess) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("terrella: error: "), done.stderr
    return lines[0]


def test_a_corrupt_shard_is_named_and_training_refuses(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = tiny_run.command(run, "stages.1.microbatch_tokens=576")
    done = subprocess.run([*words, "--until", "selfplay"], capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    shard = next((run / "stages" / "selfplay" / "shards").glob("*.tar"))
    data = bytearray(shard.read_bytes())
    for at in range(600, len(data), 1024):
        data[at] ^= 0xFF
    shard.write_bytes(bytes(data))
    broken = tiny_run.train(run, "stages.1.microbatch_tokens=576")
    assert broken.returncode not in (0, 75)
    assert shard.name in only_error(broken)


def test_a_full_disk_in_the_middle_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        done = tiny_run.train(small / "run")
        assert done.returncode == 3, done.stdout + done.stderr
        assert "disk is full" in only_error(done) or "No space left" in only_error(done)
        assert subprocess.run(["mount", "-o", "remount,size=200m", str(small)]).returncode == 0
        healed = tiny_run.train(small / "run")
        assert healed.returncode == 0, healed.stdout + healed.stderr
    finally:
        subprocess.run(["umount", str(small)], check=False)
