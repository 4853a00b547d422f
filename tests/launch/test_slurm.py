"""Rendering is byte-stable and readable by bash; settings, sweeps and cluster answers are judged before submission."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core import run as runs
from terrella.core.errors import ConfigError, DeadlineError, TerrellaError
from terrella.launch import recipe
from terrella.launch.commands.launch import check_inputs, launch
from terrella.launch.slurm import cluster, submit
from terrella.launch.slurm.render import JOB_SHELL, Plan, cut, load, render, sweep_settings
from terrella.launch.slurm.settings import SIGNAL_S, JobSettings, seconds
from terrella.launch.slurm.submit import Submitted, follow, records

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = sorted((Path(__file__).resolve().parents[2] / "launch" / "sbatch").glob("*.sbatch"))
COMMAND = re.compile(r"^# Rendered by: terrella launch (.*)$", re.MULTILINE)
VLLM = "stages.2.rollouts={sampler: {kind: vllm}}"
CASES = {
    "two-nodes": [
        "--nodes",
        "2",
        "--partition",
        "h100",
        "--account",
        "lab",
        "--interface",
        "ib0",
        "--venv",
        "/shared/venv",
    ],
    "chain-of-arrays": (
        "--gpus 0 --split-after pretrain --sweep seed=[1,2] --sweep model.layers=[1,2] --at-once 2"
    ).split(),
    "pyxis": ["--container", "registry/terrella:1", "--mount", "/data:/data", "--setup", "module load slurm"],
    "apptainer": [
        "--container",
        "terrella.sif",
        "--runtime",
        "apptainer",
        "--mount",
        "/data",
        "--time",
        "1-00:00:00",
        "--cpus",
        "96",
    ],
    "checked": ["--nodes", "2", "--check-gpus", "--sbatch=--gres=gpu:h100:8", "--sbatch=--reservation=course"],
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
    "samplers-of-a-chain": [
        "--rollout-nodes",
        "1",
        "--split-after",
        "pretrain",
        "--split-after",
        "rlvr",
        "--set",
        VLLM,
    ],
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
    assert text == path.read_text(), (
        f"{path.name} differs; look at it, and if it is right run this test with TERRELLA_WRITE_GOLDEN=1"
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30).stderr == ""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_script_is_short_and_what_its_command_renders(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30).stderr == ""
    command = COMMAND.search(text)
    if path.stem == "bench-cluster":  # no recipe: a sweep of its own
        assert command is None and "python -m terrella.benchmarks.cluster --slurm" in text
        return
    if path.stem in ("bench", "convert"):  # no recipe: one command, and nothing to go on with after a signal
        assert command is None and f"srun terrella {path.stem} " in text
        return
    assert command is not None
    done = CliRunner().invoke(launch, [*shlex.split(command[1]), "--dry-run"])
    if os.environ.get("TERRELLA_WRITE_GOLDEN"):
        path.write_text(done.stdout)
    assert done.stdout == text, f"write it anew: terrella launch {command[1]} --dry-run > launch/sbatch/{path.name}"
    # the batch is the recipe's, whatever the number of nodes
    assert command[1].split()[0] == path.stem and "_per_step" not in text and "SLURM_JOB_NUM_NODES" in text


def test_every_published_experiment_has_a_script() -> None:
    rlvr_world = {
        "text-game-sft",
        "text-game-rlvr-binary",
        "web-page-sft",
        "web-page-rlvr",
        "video-rt1",
        "video-rt1-single",
    }
    others = {
        "spa-sokoban",
        "webrl-webarena-lite",
        "webrl-webarena-lite-70b",
        "grpo",
        "bench",
        "bench-cluster",
        "convert",
    }
    assert rlvr_world | others <= {path.stem for path in SHIPPED}


def test_the_warning_leaves_time_to_save_before_the_job_gives_up() -> None:
    assert f"{SIGNAL_S} s before" in JOB_SHELL.read_text() and f"sleep {SIGNAL_S - 30} &&" in JOB_SHELL.read_text()


def test_sweeps_are_all_combinations() -> None:
    assert sweep_settings(["a=[1, 2]", "b.c=[1e-3,x]"]) == [
        ("a=1", "b.c=1e-3"),
        ("a=1", "b.c=x"),
        ("a=2", "b.c=1e-3"),
        ("a=2", "b.c=x"),
    ]
    assert sweep_settings(["a=[[1, 2], true]"]) == [("a=[1,2]",), ("a=true",)]
    for bad in ("a", "a=1", "a=[]", "=[1]", "a=[", "a=[x y]"):
        with pytest.raises(ConfigError, match="--sweep"):
            sweep_settings([bad])


def test_stages_are_cut_where_asked() -> None:
    config = load(Plan("sokoban-tiny", "run", JobSettings(gpus=0)))
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
        ({"gpus": 0, "check_gpus": True}, "--check-gpus: with --gpus 0 there are none"),
        ({"rollout_nodes": -1}, "--rollout-nodes"),
        ({"rollout_gpus": 4}, "need --rollout-nodes"),
        ({"rollout_nodes": 1, "rollout_gpus": 4, "ray": True}, "--ray: a Ray cluster spans one kind of node"),
        ({"partition": "h100\nrm -rf x"}, r"--partition: 'h100\\nrm -rf x' is no word that SLURM takes"),
        ({"rollout_nodes": 1, "rollout_constraint": "a b"}, "--rollout-constraint: 'a b' is no word"),
        ({"setup": ("module load a\nrm -rf x",)}, "--setup: .* holds a line break"),
        ({"sbatch": ("--mem=0\nrm -rf x",)}, "--sbatch: .* holds a line break"),
        ({"sbatch": ("rm -rf x",)}, "--sbatch: 'rm -rf x' is no option of sbatch"),
        ({"venv": "/my venv"}, "--venv: '/my venv' holds a blank"),
        ({"container": "x", "mounts": ("/my data",)}, "--mount: '/my data' holds a blank"),
    ],
)
def test_bad_settings_name_the_option(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobSettings(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "name=x\nrm -rf y"], "name: the name 'x rm -rf y' must be a file name"),
        (["--set", "model.family=llama\n# rm -rf y"], r"--set: 'model.family=llama\\n# rm -rf y' holds a line break"),
        (["--set", "name=x; rm -rf y"], "name: the name 'x; rm -rf y' must be a file name"),
        (["--sweep", "seed=[1,\n2]"], "--sweep: .* holds a line break"),
        (["--at-once", "2"], "--at-once: needs --sweep"),
        (["--run", "my run"], "--run: 'my run' holds a blank"),
        (["--run", "run\nrm -rf y"], "--run: .* holds a line break"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(launch, ["sokoban-tiny", "--dry-run", *options])
    assert isinstance(done.exception, ConfigError) and re.search(message, str(done.exception)), done.exception


def test_a_job_with_one_gpu_shares_its_node_and_further_options_are_passed_on() -> None:
    text = dry_run("--gpus", "1", "--sbatch=--reservation=course", "--sbatch=--exclude=n[7-9]")
    assert "--exclusive" not in text and "--mem" not in text
    assert "#SBATCH --reservation=course\n#SBATCH --exclude=n[7-9]\n" in text
    assert "--gpus-per-node" in text and "--gpus-per-node" not in dry_run("--sbatch=--gres=gpu:h100:8")


def test_ray_is_asked_for_its_nodes_where_it_is_installed() -> None:
    """In the container, which SLURM alone can start under Pyxis."""
    asked = "python -c 'import ray"
    for runtime, inside in (("pyxis", "alive=$(srun --overlap "), ("apptainer", "alive=$(apptainer exec ")):
        text = dry_run("--nodes", "2", "--ray", "--container", "image", "--runtime", runtime)
        (line,) = [line for line in text.splitlines() if asked in line]
        assert line.strip().startswith(inside) and "image" in line.partition(asked)[0]


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
        render(Plan("sokoban-tiny", "run", JobSettings(), overrides))


def test_a_recipe_for_any_task_is_not_submitted_without_one(tmp_path: Path) -> None:
    swept = ("env.train=[one.jsonl,two.jsonl]",)
    plan = Plan("grpo", str(tmp_path / "run"), JobSettings(container="x"), ("env.reward=exact",), sweeps=swept)
    with pytest.raises(ConfigError, match=r"task of your own; add --set model\.folder=FOLDER$"):
        check_inputs(plan)


def test_a_run_folder_of_other_settings_is_refused_before_submission(tmp_path: Path) -> None:
    """Also one of an array's tasks."""

    def begun(folder: Path, *overrides: str) -> Path:
        run, lease = runs.create(folder, recipe.load("sokoban-tiny", (*overrides, "ranks=2")))
        lease.release()
        (run.path / "metrics.jsonl").write_text("")
        return run.path

    settings = JobSettings(gpus=0, ranks_per_node=2)
    one = begun(tmp_path / "one")
    assert check_inputs(Plan(str(one / "config.yaml"), str(one), settings)) is None
    begun(tmp_path / "many" / "001", "seed=7")
    swept = Plan("sokoban-tiny", str(tmp_path / "many"), settings, sweeps=("seed=[5,6]",))
    for plan in (Plan(str(one / "config.yaml"), str(one), settings, ("seed=6",)), swept):
        with pytest.raises(ConfigError, match=r"started with other settings \(seed: \d+ then, 6 now\)"):
            check_inputs(plan)
    text = CliRunner().invoke(launch, [str(one / "config.yaml"), "--dry-run"], catch_exceptions=False).output
    assert f"run={one}\n" in text


PUBLISHED = {
    **{name: [] for name in ("text-game-sft", "text-game-rlvr-binary", "text-game-rlvr-task", "web-page-rlvr")},
    **{name: [] for name in ("video-rt1", "video-rt1-single", "webrl-webarena-lite", "webrl-webarena-lite-glm4")},
    **{f"spa-{world}": [] for world in ("sokoban", "frozenlake", "sudoku", "countdown", "qa", "webshop")},
    "web-page-sft": ["--set", "parallel.tensor=2"],  # eight sequences a step, as published
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_batches_can_be_dealt_over_two_nodes(name: str) -> None:
    done = CliRunner().invoke(launch, [name, "--dry-run", "--nodes", "2", *PUBLISHED[name]], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_a_layout_larger_than_the_nodes_is_refused_with_how_many_it_needs() -> None:
    large = "webrl-webarena-lite-70b"
    with pytest.raises(ConfigError, match=r"does not divide the 16 ranks of 2 nodes; use --nodes 8 or a multiple"):
        render(Plan(large, "run", JobSettings(nodes=2)))
    assert render(Plan(large, "run", JobSettings(nodes=8)))


def test_a_batch_smaller_than_the_ranks_is_refused_with_a_layout_that_keeps_it() -> None:
    with pytest.raises(ConfigError, match=r"use fewer nodes, --set parallel\.tensor=2 \(the batch stays\), or --set"):
        render(Plan("web-page-sft", "run", JobSettings(nodes=2)))


def test_sampler_nodes_without_a_stage_that_samples_from_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rollout-nodes: no stage .* --set 'stages.rlvr.rollouts="):
        render(Plan("sokoban-tiny", "run", JobSettings(rollout_nodes=1)))
    mixed = JobSettings(rollout_nodes=1, rollout_partition="l40s")
    with pytest.raises(ConfigError, match="no arrays of heterogeneous jobs"):
        render(Plan("sokoban-tiny", "run", mixed, (VLLM,), sweeps=("seed=[1,2]",)))
    first, second, third = render(
        Plan("sokoban-tiny", "run", JobSettings(rollout_nodes=1), (VLLM,), ("pretrain", "rlvr"))
    )
    # only where it is needed: the evaluation of the last job samples as the RL stage does
    assert ["terrella sampler-host" in s.text for s in (first, second, third)] == [False, True, True]
    alone = (VLLM, "stages.evaluate.sampler={kind: embedded}")
    parts = render(Plan("sokoban-tiny", "run", JobSettings(rollout_nodes=1), alone, ("pretrain", "rlvr")))
    assert ["terrella sampler-host" in s.text for s in parts] == [False, True, False]
    evaluated = ("stages.evaluate.sampler={kind: vllm}",)
    parts = render(Plan("sokoban-tiny", "run", JobSettings(rollout_nodes=1), evaluated, ("pretrain", "rlvr")))
    assert ["terrella sampler-host" in s.text for s in parts] == [False, False, True]
    # self-play by a model samples too; where nothing but the random policy plays there is nothing to serve
    played = ("stages.selfplay.rollouts={sampler: {kind: vllm}}",)
    parts = render(
        Plan("spa-sokoban-tiny", "run", JobSettings(gpus=1, rollout_nodes=1), played, ("warmup", "selfplay"))
    )
    assert ["terrella sampler-host" in s.text for s in parts] == [False, True, False]
    random = ("stages.format.rollouts={sampler: {kind: vllm}}",)
    with pytest.raises(ConfigError, match="--rollout-nodes: no stage"):
        render(Plan("spa-sokoban-tiny", "run", JobSettings(gpus=1, rollout_nodes=1), random))


def inside_a_job(programs: Path, nodes: int = 1) -> dict[str, str]:
    """What SLURM sets in a batch shell, with `programs` before any others."""
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": str(nodes)}


def test_batch_shell_passes_the_warning_on_and_asks_for_a_requeue(tmp_path: Path) -> None:
    """The rendered script itself, with stand-ins for srun and scontrol: what a real SLURM does is in
    tests/integration.
    """
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text("#!/bin/bash\ntrap 'exit 75' USR1\necho ready\nwhile :; do sleep 0.05; done\n")
    (bin_folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\nkill -TERM $PPID\n')
    for path in bin_folder.iterdir():
        path.chmod(0o755)
    script = tmp_path / "job"
    script.write_text(dry_run("--gpus", "0", "--run", str(tmp_path / "run")))
    environment = inside_a_job(bin_folder)
    shell = subprocess.Popen(
        ["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
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
    environment = inside_a_job(bin_folder)
    starts = [
        subprocess.run(["bash", str(script)], env=environment, capture_output=True, timeout=300)
        for _ in range(requeues + 1)
    ]
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert asked == ["requeue 12"] * requeues and starts[-1].returncode == code


def test_the_nodes_of_the_job_decide_the_ranks_and_further_words_reach_the_command(tmp_path: Path) -> None:
    """`sbatch -N 4 SCRIPT --set ...`: the script was rendered for one node."""
    stand_in(tmp_path, srun='echo "$@"')
    script = next(path for path in SHIPPED if path.stem == "text-game-sft")
    done = subprocess.run(
        ["bash", str(script), "--set", "seed=3"],
        env=inside_a_job(tmp_path, nodes=4),
        capture_output=True,
        text=True,
        timeout=300,
    )
    words = done.stdout.split()
    assert words[:2] == ["--nodes=4", "--ntasks=4"], done.stdout + done.stderr
    assert words[-8:] == ["--set", "ranks=32", "--run", "runs/text-game-sft", "--wait", "120", "--set", "seed=3"]


def stand_in(folder: Path, **programs: str) -> dict[str, str]:
    """Programs that answer as a cluster with accounts would; such a cluster needs a database that the test machine
    has not.
    """
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
    answer = (
        "echo 'gpu*|up|6|1-00:00:00|gpu:h100:8(S:0-1)'; echo 'gpu*|up|2|1-00:00:00|gpu:h100:4'; echo "
        "'old|down|3|infinite|(null)'; echo 'mixed|up|1|infinite|lscratch:9(S:0),gpu:a100:4(S:0-1),gpu:mig:2(S:0)'"
    )
    monkeypatch.setenv("PATH", stand_in(tmp_path, sinfo=answer)["PATH"])
    gpu, old, mixed = cluster.partitions()
    assert (gpu.nodes, gpu.gpus, gpu.default, gpu.limit_s) == (8, 8, True, 86400) and (
        old.up,
        old.gpus,
        old.limit_s,
    ) == (False, 0, None)
    assert mixed.gpus == 6
    with pytest.raises(ConfigError, match="'old' is not up"):
        cluster.check_partition(JobSettings(partition="old", gpus=0))
    with pytest.raises(ConfigError, match="beyond the limit"):
        cluster.check_partition(JobSettings(time="2-0"))


def test_without_slurm_the_error_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TerrellaError, match="run this on a SLURM login node, or use --dry-run"):
        records("1")
    assert shutil.which("bash") is None


def test_a_controller_that_turns_a_caller_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    busy = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    once = f'[ -f {tmp_path}/asked ] || {{ touch {tmp_path}/asked; {busy}; }}; echo "JobId=1 JobState=RUNNING"'
    monkeypatch.setenv("PATH", stand_in(tmp_path, scontrol=once)["PATH"])
    assert records("1") == [{"JobId": "1", "JobState": "RUNNING"}]
    stand_in(tmp_path, scontrol="echo 'JobId=1 HetJobOffset=0'; echo 'JobId=2 HetJobOffset=1'")
    assert [record["JobId"] for record in records("1")] == ["1"]
    stand_in(tmp_path, scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert records("1") == []
    stand_in(tmp_path, scontrol=busy)
    monkeypatch.setattr(submit, "SILENT_S", 0.05)
    with pytest.raises(DeadlineError, match="no answer about job 1"):
        records("1")


def test_a_log_is_followed_line_by_line_whatever_its_bytes(tmp_path: Path) -> None:
    log, said = tmp_path / "job.log", []
    read = submit._tail(log, 0, said.append)
    for part in (b"step 1\n\xff\xfe broken\n", b"50 %\rhalf", b" a line\r\n", "größer\n".encode()):
        with log.open("ab") as stream:
            stream.write(part)
        read = submit._tail(log, read, said.append)
    assert said == ["step 1", "\ufffd\ufffd broken", "50 %", "half a line", "größer"] and read == log.stat().st_size


def test_an_array_is_followed_until_its_last_task_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller forgets ended tasks one by one."""
    tasks = ["JobId=11 JobState=COMPLETED ExitCode=0:0", "JobId=12 JobState=RUNNING", "JobId=10 JobState=PENDING"]
    failed, passed = "JobId=12 JobState=FAILED ExitCode=3:0", "JobId=10 JobState=COMPLETED ExitCode=0:0"
    answers = [tasks, [tasks[0], failed, tasks[2]], [failed, "JobId=10 JobState=RUNNING"], [passed]]
    for number, answer in enumerate(answers):
        (tmp_path / str(number)).write_text("\n".join(answer) + "\n")
    count = f"n=$(cat {tmp_path}/n 2> /dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n; cat {tmp_path}/$n"
    monkeypatch.setenv("PATH", stand_in(tmp_path, scontrol=count)["PATH"])
    said: list[str] = []
    assert follow(Submitted("10", tmp_path / "script", tmp_path / "log", 3), said.append, 0.01) == 3
    assert said[0] == "job 10: completed and running and pending" and (tmp_path / "n").read_text() == "4\n"
    assert said[-1] == "job 10: completed"
