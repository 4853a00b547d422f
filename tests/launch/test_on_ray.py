"""What a run on Ray decides without a cluster; tests/integration/test_slurm.py starts a real one."""

import re
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from terrella.core.errors import ConfigError
from terrella.launch.commands.train import train
from terrella.launch.on_ray import FINAL, Launcher
from terrella.launch.slurm.render import JOB_SHELL
from terrella.launch.supervise import STOPPED


def test_what_another_start_would_not_change_is_the_same_as_in_a_cluster_job() -> None:
    found = re.search(r"^ *([\d |]+)\) exit \"\$code\"", JOB_SHELL.read_text(), re.MULTILINE)
    assert found is not None
    assert {int(code) for code in found[1].split("|")} == {*FINAL} - {0, STOPPED}


def test_settings_of_the_machine_reach_the_run_and_the_place_of_another_start_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TERRELLA_SERVER_KEY", "TERRELLA_NODES", "TERRELLA_NODE_RANK", "TERRELLA_LEASE", "SLURM_NODEID")
    for name in names:
        monkeypatch.setenv(name, "outer")
    launcher = Launcher()
    launcher.start(["--version"], {"TERRELLA_NODES": "2"}, str(tmp_path / "logs" / "log"))
    assert launcher.process is not None
    seen = psutil.Process(launcher.process.pid).environ()
    assert launcher.process.wait(120) == 0
    assert {name: seen[name] for name in names if name in seen} == {
        "TERRELLA_SERVER_KEY": "outer",
        "TERRELLA_NODES": "2",
    }


def test_sampler_hosts_that_nothing_would_place_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(train, ["sokoban-tiny", "--sampler-hosts", "1", "--run", str(tmp_path / "run")])
    assert isinstance(done.exception, ConfigError) and "--sampler-hosts: needs --ray" in str(done.exception)
    assert not (tmp_path / "run").exists()
