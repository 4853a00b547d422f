"""`terrella launch` on a real SLURM: several nodes, requeue by signal, a lost node, chains, arrays, refusals before
submission.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import terrella
from terrella.benchmarks import record
from terrella.benchmarks.cluster import SMALL_EXPERTS, find_case
from terrella.core.files import read_json
from terrella.core.metrics import MetricsFile
from terrella.launch.commands.launch import launch as launch_command
from terrella.models.geometry import count
from terrella.tests.golden.observe import comparable
from terrella.tests.integration.slurm_cluster import Cluster, missing, running
from terrella.tests.launch import tiny_run
from terrella.tests.reap import is_running
from terrella.tests.sampling import in_turn

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

SETTINGS = ["stages.1.log_every=1", "stages.1.steps=60", "stages.1.checkpoint_every=7"]
BATCHES = [(1, "sequences_per_step"), (2, "prompts_per_step"), (3, "sequences_per_step")]  # of sokoban-tiny
PATIENCE_S = 600.0  # of a busy machine; an idle one needs a tenth


def require_slurm() -> None:
    reason = missing()
    if reason and "slurm" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and TERRELLA_REQUIRE names slurm")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    with running(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What an uninterrupted run on this machine, without SLURM, gives."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = tiny_run.train(folder, *SETTINGS, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return tiny_run.results(folder)


def launch(cluster: Cluster, run: Path, *options: str, sets: list[str] = SETTINGS) -> subprocess.CompletedProcess[str]:
    """`terrella launch` of the tiny recipe on CPU nodes."""
    words = [part for o in (*tiny_run.OVERRIDES, *sets) for part in ("--set", o)]
    command = [
        sys.executable,
        "-m",
        "terrella",
        "launch",
        "sokoban-tiny",
        "--gpus",
        "0",
        "--time",
        "30",
        "--run",
        str(run),
    ]
    environment = {**cluster.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [*command, *words, *options], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def job_ids(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)


def until(what: str, condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> None:
    limit = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < limit, f"no {what} after {deadline_s:.0f} s"
        time.sleep(0.2)


def reached(run: Path, stage: str, step: int) -> bool:
    return any(row["stage"] == stage and row["step"] >= step for row in MetricsFile(run / "metrics.jsonl").rows())


def last_step(run: Path) -> tuple[str, int] | None:
    return max(((row["stage"], row["step"]) for row in [*MetricsFile(run / "metrics.jsonl").rows()][-1:]), default=None)


def requeue_at(
    cluster: Cluster, run: Path, job: str, points: list[tuple[str, int]], deadline_s: float = PATIENCE_S
) -> None:
    """Warn the job by signal once it has come to each of the points, as SLURM does before a time limit, and see it
    requeued.
    """
    for start, (stage, step) in enumerate(points):
        # a step of this start too: the signal before may have come late, and a job that waits to start again hears none
        before = last_step(run)
        until(f"step {step} of {stage}", lambda: reached(run, stage, step) and last_step(run) != before, deadline_s)
        cluster.ask("scancel", "--batch", "--signal=USR1", job)
        until(f"requeue {start + 1}", lambda: int(cluster.job(job)["Restarts"]) > start, deadline_s)
    assert "no checkpoint in time" not in cluster.log(cluster.job(job))


@in_turn("two nodes requeued")
def test_two_nodes_requeued_by_signal_at_three_points_equal_one_machine(
    slurm: Cluster, whole: dict, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (job,) = job_ids(launch(slurm, run, "--nodes", "2", "--ranks-per-node", "1"))
    requeue_at(slurm, run, job, [("pretrain", 2), ("pretrain", 30), ("rlvr", 1)])
    known = slurm.wait(job, deadline_s=PATIENCE_S)
    assert known["Restarts"] == "3" and known["NumNodes"].startswith("2")
    assert tiny_run.results(run) == whole
    assert read_json(run / "lease.json")["incarnation"] == 4
    assert (run / "logs" / "rank-1.log").is_file() and slurm.log(known).count("asking for a checkpoint") == 3


def stand_in(folder: Path, body: str) -> Path:
    """A `terrella` that does the work of the real one by `body`, and knows where the job's shell functions are."""
    folder.mkdir()
    program = folder / "terrella"
    program.write_text(f'#!/bin/bash\n[ "$1" != launch ] || exec {sys.executable} -m terrella "$@"\n{body}\n')
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("mixed", [[], ["--rollout-partition", "debug"]], ids=["steps", "heterogeneous"])
def test_sampler_nodes_are_found_and_requeued_with_the_trainer(
    slurm: Cluster, tmp_path: Path, monkeypatch, mixed: list[str]
) -> None:
    """The job's shape on a real SLURM with a stand-in for the work; tests/integration/test_served.py does the work
    itself.
    """
    bin_folder = stand_in(
        tmp_path / "bin",
        """if [ "$1" = sampler-host ]; then
  mkdir -p "$2"; echo "$SLURMD_NODENAME" > "$2/new"; mv "$2/new" "$2/$SLURMD_NODENAME.json"; exec sleep 3600
fi
[ "${SLURM_RESTART_COUNT:-0}" = 1 ] && { echo "again on $SLURMD_NODENAME of $TERRELLA_NODES"; exit 0; }
trap 'exit 75' USR1
folder=${TERRELLA_SAMPLER_HOSTS%:*}
until [ -f "$folder"/*.json ]; do sleep 0.2; done
echo "trainer $SLURMD_NODENAME, sampler $(cat "$folder"/*.json)" > RUN/new; mv RUN/new RUN/met
while :; do sleep 0.2; done
""".replace("RUN", str(tmp_path)),
    )
    run = tmp_path / "run"
    options = [
        "--nodes",
        "1",
        "--ranks-per-node",
        "1",
        "--rollout-nodes",
        "1",
        *mixed,
        "--setup",
        f"export PATH={bin_folder}:$PATH",
    ]
    (job,) = job_ids(launch(slurm, run, *options, sets=["stages.2.rollouts={sampler: {kind: vllm}}"]))
    until("address of the sampler", (tmp_path / "met").exists)
    assert sorted((tmp_path / "met").read_text().replace(",", "").split()[1::2]) == ["n1", "n2"]
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    until("second start", lambda: slurm.job(job)["Restarts"] == "1")
    until("end of the job", lambda: slurm.job(job)["JobState"] == "COMPLETED")
    assert "again on n" in slurm.log(slurm.job(job))


@in_turn("ray")
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and "ray" not in os.environ.get("TERRELLA_REQUIRE", "").split(","),
    reason="ray is not installed (requirements/ray.txt)",
)
def test_ray_cluster_inside_the_allocation_trains_to_the_end(slurm: Cluster, whole: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (job,) = job_ids(launch(slurm, run, "--nodes", "2", "--ranks-per-node", "1", "--ray"))
    known = slurm.wait(job, deadline_s=PATIENCE_S)
    log = slurm.log(known)
    first, second = re.search(r"ray: start 1: trainer on (\w+), (\w+)", log).groups()
    assert first != second and "ray: start 2" not in log, log  # one rank on each of Ray's nodes
    assert tiny_run.results(run) == whole
    assert (run / "logs" / "ray-trainer-1.log").is_file() and known["NumNodes"].startswith("2")
    port = str(40000 + int(job) * 13 % 20000)
    until("end of Ray", lambda: not ray_daemons(port))


def ray_daemons(port: str) -> list[str]:
    """What is left on this machine of the Ray cluster whose head listens there."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if f":{port}" in line and ("raylet" in line or "gcs_server" in line)]


@in_turn("lost node")
def test_lost_node_goes_on_elsewhere_and_its_orphan_is_fenced(slurm: Cluster, whole: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # far too long to finish, so that the orphan is still training when the job starts anew on the other node
    endless = [*SETTINGS[:1], "stages.1.steps=100000", "stages.1.checkpoint_every=10"]
    (job,) = job_ids(launch(slurm, run, "--nodes", "1", "--ranks-per-node", "2", sets=endless))
    until("first checkpoint", lambda: reached(run, "pretrain", 12))
    first = slurm.job(job)["NodeList"]
    orphan = read_json(run / "lease.json")
    os.kill(slurm.pid(first), signal.SIGKILL)
    try:
        until("second start", lambda: read_json(run / "lease.json")["token"] != orphan["token"])
        known = slurm.job(job)
        assert known["Restarts"] == "1" and known["NodeList"] not in ("(null)", first)
        until("end of the orphan", lambda: not is_running(orphan["pid"]))
        assert "no longer owns the run directory" in (run / "logs" / "rank-0.log").read_text()
        at = max(row["step"] for row in MetricsFile(run / "metrics.jsonl").rows())
        until("step after the take-over", lambda: reached(run, "pretrain", at + 5))
    finally:
        slurm.ask("scancel", job)
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan["pid"], signal.SIGKILL)  # it has ended by itself unless the test failed
        slurm._run("/usr/sbin/slurmd", "-f", str(slurm.folder / "slurm.conf"), "-N", first)
    rows = comparable(MetricsFile(run / "metrics.jsonl").rows())
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))  # nothing twice, nothing lost
    assert rows[:60] == [row for row in whole["metrics"] if row["stage"] == "pretrain"]


def test_chain_of_jobs_is_followed_to_its_end(slurm: Cluster, whole: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = launch(slurm, run, "--ranks-per-node", "2", "--split-after", "pretrain", "--follow")
    first, second = job_ids(done)[:2]
    assert f"job {second}: completed" in done.stdout and "pretrain: 60/60" in done.stdout
    assert slurm.job(first)["JobState"] == slurm.job(second)["JobState"] == "COMPLETED"
    assert tiny_run.results(run) == whole


def test_array_sweeps_settings_each_in_its_own_run(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(
        slurm, tmp_path / "run", "--sweep", "seed=[1,7]", "--split-after", "selfplay", "--split-after", "pretrain"
    )
    jobs = job_ids(done)
    for task in ("0", "1"):
        slurm.wait(f"{jobs[1]}_{task}", deadline_s=PATIENCE_S)
    slurm.ask("scancel", jobs[2], check=False)  # it may have ended
    losses = [
        [r["loss"] for r in MetricsFile(tmp_path / "run" / task / "metrics.jsonl").rows()] for task in ("000", "001")
    ]
    assert len(losses[0]) == len(losses[1]) == 60 and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--partition", "gpu"], 2, "--partition: 'gpu' is no partition of this cluster; choose one of: debug, short"),
        (["--nodes", "4"], 2, "--nodes: 4 is more than the 2 nodes of partition 'debug'"),
        (["--gpus", "2"], 2, "--gpus: 2 is more than the 0 GPUs"),
        (["--partition", "short"], 2, "--time: 30 is beyond the limit of partition 'short' (10 minutes)"),
        (["--constraint", "h100"], 2, "sbatch would refuse this job: "),
        (["--run", "/dev/null/run"], 3, "a part of this path is a file"),
        (["--run", "my run"], 2, "my run' holds a blank"),
        (["--set", "name=a\nscancel"], 2, "--set: 'name=a\\nscancel' holds a line break"),
        (
            ["--set", "stages.2.prompts_per_step=3", "--ranks-per-node", "2"],
            2,
            "rlvr.prompts_per_step = 3 is no multiple",
        ),
    ],
)
def test_refused_before_submission(slurm: Cluster, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    done = launch(slurm, tmp_path / "run", *options)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not slurm.ask("squeue", "--noheader", "--states=PENDING,RUNNING", "--name=sokoban-tiny").strip()


def test_a_folder_that_is_not_there_is_missed_before_the_queue(slurm: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "terrella", "launch", "text-game-1gpu", "--gpus", "0", "--time", "30"]
    command += ["--run", str(tmp_path / "run"), "--set", f"stages.start.folder={tmp_path / 'model'}"]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and f"{tmp_path / 'model'}" in done.stderr, done.stderr
    assert not slurm.ask("squeue", "--noheader", "--states=PENDING,RUNNING", "--name=text-game-1gpu").strip()


def test_an_account_is_submitted_unchecked_where_the_cluster_keeps_none(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path / "run", "--account", "nope", "--setup", "exit 0")
    (job,) = job_ids(done)
    assert "note: --account nope: not checked" in done.stdout
    assert slurm.wait(job)["Account"] == "nope"


def test_every_script_is_accepted_by_a_cluster_of_64_nodes(tmp_path: Path, monkeypatch) -> None:
    require_slurm()
    cluster = Cluster(tmp_path, nodes=64, gpus=8)
    try:
        cluster.up()
        paths = sorted((Path(terrella.__file__).parent / "launch" / "sbatch").glob("*.sbatch"))
        assert paths
        for path in paths:
            text = path.read_text()
            written = int(re.search(r"--nodes=(\d+)", text)[1])
            for nodes in (written, 64) if "supervise" in text else (written,):
                command = ["sbatch", "--test-only", "-N", str(nodes), str(path)]
                done = subprocess.run(
                    command, env=cluster.environment, capture_output=True, text=True, timeout=PATIENCE_S
                )
                assert done.returncode == 0, f"{path.name}: {done.stderr}"
                assert f"using {64 * nodes if '--exclusive' in text else 8} processors" in done.stderr, done.stderr
        # from the command itself, which asks `sbatch --test-only` before it submits; held, so that none starts
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        for nodes in range(1, 65):
            sets = [part for i, key in BATCHES for part in ("--set", f"stages.{i}.{key}={8 * nodes}")]
            words = ["sokoban-tiny", "--nodes", str(nodes), "--run", str(tmp_path / f"run-{nodes}"), "--sbatch=--hold"]
            done = CliRunner().invoke(launch_command, [*words, *sets])
            assert done.exit_code == 0, f"{nodes} nodes: {done.output} {done.exception}"
        queued = cluster.ask("squeue", "--noheader", "--format=%D %r").splitlines()
        assert sorted(queued) == sorted(f"{nodes} JobHeldUser" for nodes in range(1, 65))
    finally:
        cluster.down()


def test_a_node_with_a_broken_gpu_is_named_before_the_ranks_start(tmp_path_factory) -> None:
    """GPUs are names here, and nvidia-smi is a stand-in that counts memory errors on the second node."""
    tmp_path = tmp_path_factory.mktemp("gpu")  # short: SLURM's sockets lie in it, and their paths may have 107 letters
    require_slurm()
    work = f'[ "$1" != doctor ] || exec {sys.executable} -m terrella "$@"\necho "trained on $SLURMD_NODENAME"'
    bin_folder = stand_in(tmp_path / "bin", work)
    smi = bin_folder / "nvidia-smi"
    smi.write_text(
        f"""#!/bin/bash
[ "$1" != --list-gpus ] || exit 0
errors=0; [ "$SLURMD_NODENAME" = n2 ] && [ -f {tmp_path}/broken ] && errors=4
for i in 0 1 2 3 4 5 6; do echo "$i, NVIDIA H100, 81559, 3, 31, 0, P0"; done
echo "7, NVIDIA H100, 81559, 3, 31, $errors, P0"
"""
    )
    smi.chmod(0o755)
    cluster = Cluster(tmp_path / "slurm", nodes=2, gpus=8)
    options = ["--nodes", "2", "--gpus", "8", "--ranks-per-node", "1", "--sbatch=--gres=gpu:8", "--check-gpus"]
    try:
        cluster.up()
        for number, (end, trained) in enumerate((("COMPLETED", 2), ("FAILED", 0))):
            setup = ["--setup", f"export PATH={bin_folder}:$PATH"]
            (job,) = job_ids(launch(cluster, tmp_path / f"run-{number}", *options, *setup))
            known = cluster.wait(job, (end,), PATIENCE_S)
            log = cluster.log(known)
            assert log.count("trained on n") == trained and log.count("ok    xid") + log.count("warn  gpu at") == 2, log
            (tmp_path / "broken").touch()
        assert "node n2: 1 finding to fix" in log and "node n1" not in log and "--exclude=NODE" in log, log
        assert known["ExitCode"] == "2:0"
    finally:
        cluster.down()


def test_a_printed_script_runs_on_as_many_nodes_as_sbatch_asks_for(slurm: Cluster, tmp_path: Path) -> None:
    """The job's shape on a real SLURM with a stand-in for the work; the script was rendered for one node."""
    bin_folder = stand_in(tmp_path / "bin", 'echo "$SLURMD_NODENAME of $TERRELLA_NODES: $*"')
    done = launch(
        slurm,
        tmp_path / "run",
        "--ranks-per-node",
        "2",
        "--dry-run",
        "--setup",
        f"export PATH={bin_folder}:$PATH",
        sets=[],
    )
    script = tmp_path / "job.sbatch"
    script.write_text(done.stdout)
    job = slurm.ask("sbatch", "--parsable", "-N", "2", str(script), "--until", "pretrain", cwd=tmp_path).strip()
    log = [line for line in slurm.log(slurm.wait(job)).splitlines() if not line.startswith("srun: ")]
    assert sorted(line.split(":")[0] for line in log) == ["n1 of 2", "n2 of 2"], log
    assert all(" --set ranks=4 " in line and line.endswith(" --until pretrain") for line in log), log


def test_the_cluster_benchmark_counts_what_it_trains_samples_and_sends(slurm: Cluster, tmp_path: Path) -> None:
    """The shipped script on gloo ranks: one node trains in tensor halves, the ranks of the other take the weights."""
    script = Path(terrella.__file__).parent / "launch" / "sbatch" / "bench-cluster.sbatch"
    small = {"MODEL": "small-experts", "LAYOUTS": "2,1,1,1,2,1", "BATCH": "4", "SEQUENCE": "32", "OUT": "out.csv"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["--steps", "1", "--warmup", "0", "--samples", "4", "--prompt-tokens", "8", "--new-tokens", "6"]
    done = subprocess.run(
        ["sbatch", "--parsable", "--ntasks-per-node=2", "--gpus-per-node=0", str(script), *words],
        env={**slurm.environment, **small, "PATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = slurm.log(slurm.wait(done.stdout.strip(), deadline_s=PATIENCE_S))
    assert "0 of 1 cases failed" in log and "published, seconds of a whole step of RL:" in log, log[-3000:]
    rows = record.read(tmp_path / "out.csv")
    (case,) = {find_case(row.case) for row in rows}
    assert case is not None and (case.gpus, case.nodes, case.receivers, case.tensor, case.expert) == (2, 1, 2, 2, 2)
    value = {row.metric: row.value for row in rows}
    payload = 4 * count(SMALL_EXPERTS).total  # without norms, in fp32
    assert value["tokens"] == 4 * 32 and value["sampled"] == 4 * 6 and value["step"] > 0 and value["sync"] > 0
    # each byte once from the trainer, and at every receiver the whole model
    assert 1.0 <= value["sync sent"] / payload < 1.02
    assert value["sync arrived"] == pytest.approx(2 * payload, rel=0.02)
