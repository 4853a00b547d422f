"""Rendering is byte-stable and readable by bash; settings, sweeps and cluster answers are judged before submission."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core.errors import ConfigError, DeadlineError, TerrellaError
from terrella.launch import recipe as recipes
from terrella.launch.launch import launch
from terrella.launch.slurm import cluster, ready, submit
from terrella.launch.slurm.render import Plan, cut, load, render, sweep_settings
from terrella.launch.slurm.settings import JobSettings, seconds
from terrella.launch.slurm.submit import fields

GOLDEN = Path(__file__).parent / "golden"
VLLM = "stages.2.rollouts={sampler: {kind: vllm}}"
CASES = {
    "two-nodes": ["--nodes", "2", "--partition", "h100", "--account", "lab", "--interface", "ib0", "--venv", "/shared/venv"],
    "chain-of-arrays": "--gpus 0 --split-after pretrain --sweep seed=[1,2] --sweep model.layers=[1,2] --at-once 2".split(),
    "pyxis": ["--container", "registry/terrella:1", "--mount", "/data:/data", "--setup", "module load slurm"],
    "apptainer": ["--container", "terrella.sif", "--runtime", "apptainer", "--mount", "/data", "--time", "1-00:00:00", "--cpus", "96"],
    "ray": ["--nodes", "2", "--ray", "--qos", "high", "--constraint", "h100"],
    "samplers": ["--nodes", "2", "--rollout-nodes", "1", "--set", VLLM],
    "heterogeneous": [
        "--nodes",
        "2",
        "-p",
        "h100",
        "--rollout-nodes",
        "4",
        "--rollout-partition",
        "l40s",
        "--rollout-gpus",
        "4",
        "--set",
        VLLM,
    ],
    "samplers-of-a-chain": ["--rollout-nodes", "1", "--split-after", "pretrain", "--split-after", "rlvr", "--set", VLLM],
}


def dry_run(*options: str) -> str:
    done = CliRunner().invoke(launch, ["sokoban-tiny", "--dry-run", *options])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_dry_run_is_byte_stable(name: str) -> None:
    text = dry_run(*CASES[name])
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("TERRELLA_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; look at it, and if it is right run this test with TERRELLA_WRITE_GOLDEN=1"
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30).stderr == ""


def test_ready_scripts_are_what_the_templates_give() -> None:
    made = dict(ready.files())
    found = {path.name: path.read_text() for path in ready.FOLDER.glob("*.sbatch")}
    assert found == made, "run python -m terrella.launch.slurm.ready"
    sizes = {name: item.nodes for name in recipes.shipped() if (item := ready.declared(name))}
    assert sizes["sokoban-tiny"] == [1, 2, 4, 8, 16, 32, 64] and len(made) == sum(map(len, sizes.values()))


def test_a_recipe_that_declares_sizes_wrongly_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    text = recipes.Path(recipes.__file__).parent.joinpath("recipes", "sokoban-tiny.yaml").read_text().replace("# cluster:", "#")
    for line, message in (("", None), ("# cluster: {nods: [1]}", "'nods'; it may have each, nodes"), ("# cluster: {each: {}}", "no nodes")):
        (tmp_path / "x.yaml").write_text(f"{line}\n{text}")
        if message is None:
            assert ready.declared("x") is None
            continue
        with pytest.raises(ConfigError, match=message):
            ready.declared("x")


def test_sweeps_are_all_combinations() -> None:
    assert sweep_settings(["a=[1, 2]", "b.c=[1e-3,x]"]) == [("a=1", "b.c=1e-3"), ("a=1", "b.c=x"), ("a=2", "b.c=1e-3"), ("a=2", "b.c=x")]
    assert sweep_settings(["a=[[1, 2], true]"]) == [("a=[1,2]",), ("a=true",)]
    for bad in ("a", "a=1", "a=[]", "=[1]", "a=[", "a=[x y]"):
        with pytest.raises(ConfigError, match="--sweep"):
            sweep_settings([bad])


def test_stages_are_cut_where_asked() -> None:
    config = load(Plan("sokoban-tiny", "run", ".", JobSettings(gpus=0)))
    names = tuple(stage.name for stage in config.stages)
    assert cut(config, []) == [names]
    assert cut(config, ["all"]) == [(name,) for name in names]
    assert cut(config, ["rlvr", "pretrain"]) == [names[:2], names[2:3], names[3:]]
    with pytest.raises(ConfigError, match="the recipe's stages are selfplay"):
        cut(config, ["sft"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"gpus": -1}, "--gpus"),
        ({"ranks_per_node": 0}, "--ranks-per-node"),
        ({"time": "four hours"}, "--time: 'four hours' is no SLURM time"),
        ({"time": "3"}, "leaves no room to save"),
        ({"container": "x", "venv": "y"}, "choose one"),
        ({"mounts": ("/a",)}, "needs --container"),
        ({"rollout_nodes": -1}, "--rollout-nodes"),
        ({"rollout_gpus": 4}, "need --rollout-nodes"),
        ({"rollout_nodes": 1, "rollout_gpus": 4, "ray": True}, "--ray: a Ray cluster spans one kind of node"),
    ],
)
def test_bad_settings_name_the_option(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobSettings(**settings)


def test_times_are_read_as_slurm_does() -> None:
    texts = ["90", "1:30", "1:30:00", "2-0", "1-2:30", "1-02:30:05"]
    assert [seconds(t) for t in texts] == [5400, 90, 5400, 172800, 95400, 95405]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("ranks=3",), "the allocation decides it"),
        (("parallel.tensor=3",), "does not divide"),
        (("stages.2.prompts_per_step=3",), r"rlvr.prompts_per_step = 3 .* --set stages.rlvr.prompts_per_step=8"),
        (("stages.2.promts=3",), "did you mean"),
    ],
)
def test_a_recipe_that_cannot_run_there_is_refused_before_submission(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(Plan("sokoban-tiny", "run", ".", JobSettings(), overrides))


def test_sampler_nodes_without_a_stage_that_samples_from_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rollout-nodes: no stage .* --set 'stages.rlvr.rollouts="):
        render(Plan("sokoban-tiny", "run", ".", JobSettings(rollout_nodes=1)))
    mixed = JobSettings(rollout_nodes=1, rollout_partition="l40s")
    with pytest.raises(ConfigError, match="no arrays of heterogeneous jobs"):
        render(Plan("sokoban-tiny", "run", ".", mixed, (VLLM,), sweeps=("seed=[1,2]",)))
    first, second, third = render(Plan("sokoban-tiny", "run", ".", JobSettings(rollout_nodes=1), (VLLM,), ("pretrain", "rlvr")))
    assert ["terrella sampler-host" in s.text for s in (first, second, third)] == [False, True, False]  # only where it is needed


def test_batch_shell_passes_the_warning_on_and_asks_for_a_requeue(tmp_path: Path) -> None:
    """The rendered script itself, with stand-ins for srun and scontrol: what a real SLURM does is in tests/integration."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text("#!/bin/bash\ntrap 'exit 75' USR1\necho ready\nwhile :; do sleep 0.05; done\n")
    (bin_folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\nkill -TERM $PPID\n')
    for path in bin_folder.iterdir():
        path.chmod(0o755)
    script = tmp_path / "job"
    script.write_text(dry_run("--gpus", "0", "--run", str(tmp_path / "run")))
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "1"}
    shell = subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
    shell.send_signal(signal.SIGUSR1)
    shell.wait(timeout=300)
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)  # the shell's own timer


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (2, 0), (6, 0), (7, 3), (137, 3)])
def test_crashes_are_requeued_a_few_times_and_settings_never(tmp_path: Path, code: int, requeues: int) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text(f"#!/bin/bash\nexit {code}\n")
    (bin_folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\nkill -TERM $PPID\n')
    for path in bin_folder.iterdir():
        path.chmod(0o755)
    script = tmp_path / "job"
    script.write_text(dry_run("--gpus", "0", "--run", str(tmp_path / "run")))
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "1"}
    starts = [subprocess.run(["bash", str(script)], env=environment, capture_output=True, timeout=300) for _ in range(requeues + 1)]
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert asked == ["requeue 12"] * requeues and starts[-1].returncode == code


def stand_in(folder: Path, **programs: str) -> dict[str, str]:
    """Programs that answer as a cluster with accounts would; such a cluster needs a database that the test machine has not."""
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_accounts_are_checked_where_the_cluster_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, sacctmgr="echo lab; echo other")["PATH"])
    cluster.check_account(JobSettings(account="lab"))
    cluster.check_account(JobSettings())
    with pytest.raises(ConfigError, match="may not use 'nobody'; choose one of: lab, other"):
        cluster.check_account(JobSettings(account="nobody"))
    stand_in(tmp_path, sacctmgr="exit 0", scontrol="echo 'AccountingStorageEnforce = associations,limits'")
    for account in (None, "lab"):
        with pytest.raises(ConfigError, match="wants an account and user"):
            cluster.check_account(JobSettings(account=account))
    # what SLURM 22.05 says without a database: nothing is refused, and nothing is claimed
    stand_in(tmp_path, sacctmgr="echo 'You are not running a supported accounting_storage plugin' >&2; exit 1")
    assert cluster.check_account(JobSettings()) is None
    assert "--account nope: not checked" in (cluster.check_account(JobSettings(account="nope")) or "")


def test_partitions_of_several_kinds_of_node_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "echo 'gpu*|up|6|1-00:00:00|gpu:h100:8(S:0-1)'; echo 'gpu*|up|2|1-00:00:00|gpu:h100:4'; echo 'old|down|3|infinite|(null)'"
    monkeypatch.setenv("PATH", stand_in(tmp_path, sinfo=answer)["PATH"])
    gpu, old = cluster.partitions()
    assert (gpu.nodes, gpu.gpus, gpu.default, gpu.limit_s) == (8, 8, True, 86400) and (old.up, old.gpus, old.limit_s) == (False, 0, None)
    with pytest.raises(ConfigError, match="'old' is not up"):
        cluster.check_partition(JobSettings(partition="old", gpus=0))
    with pytest.raises(ConfigError, match="beyond the limit"):
        cluster.check_partition(JobSettings(time="2-0"))


def test_without_slurm_the_error_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TerrellaError, match="run this on a SLURM login node, or use --dry-run"):
        fields("1")
    assert shutil.which("bash") is None


def test_a_controller_that_turns_a_caller_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    busy = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    once = f'[ -f {tmp_path}/asked ] || {{ touch {tmp_path}/asked; {busy}; }}; echo "JobId=1 JobState=RUNNING"'
    monkeypatch.setenv("PATH", stand_in(tmp_path, scontrol=once)["PATH"])
    assert fields("1") == {"JobId": "1", "JobState": "RUNNING"}
    stand_in(tmp_path, scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert fields("1") == {}
    stand_in(tmp_path, scontrol=busy)
    monkeypatch.setattr(submit, "SILENT_S", 0.05)
    with pytest.raises(DeadlineError, match="no answer about job 1"):
        fields("1")
