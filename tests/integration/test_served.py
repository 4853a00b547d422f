"""The tiny GRPO recipe, tensor and data parallel, with two real vLLM servers, one of them tensor parallel, on a machine
of their own: as a SLURM job over two trainer nodes, requeued by signal, and on Ray, losing a node.
"""

import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from terrella.core.checkpoint import CheckpointReader
from terrella.core.files import read_json
from terrella.core.metrics import MetricsFile
from terrella.launch import recipe as recipes
from terrella.rl.journal import Journal
from terrella.tests.integration.slurm_cluster import Cluster, missing, running
from terrella.tests.integration.test_slurm import job_ids, launch, reached, requeue_at, require_slurm, until
from terrella.tests.integration.test_vllm import CPU
from terrella.tests.launch import tiny_run
from terrella.tests.parallel.recipe_jobs import run_case
from terrella.tests.parallel.test_recipes import TOLERANCE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]
PATIENCE_S = 1200.0
# one sequence at a time: then nothing that a server computes depends on what else it was asked, and runs can be
# compared bit by bit
SETTINGS = [
    "parallel.tensor=2",
    "model.head_dim=32",  # the smallest that vLLM has a CPU kernel for
    "stages.1.steps=80",  # long enough for a signal to find it at work
    "stages.1.log_every=1",
    "stages.2.prompts_per_step=2",
    "stages.2.samples_per_prompt=2",
    "env.steps=2",
    "stages.2.rollouts={keep_samples: true, sampler: "
    '{kind: vllm, devices: ["0,1", ""], eager: true, max_length: 128, max_sequences: 1}}',
    # plain gradient descent, as in tests/parallel/test_recipes.py: AdamW would turn rounding into whole steps
    "stages.2.optimizer={lr: 1e4, eps: 1e6, betas: [1e-9, 0.95], clip_grad: 0.0}",
    "stages.4.sampler={kind: embedded}",  # a server less to start
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What an uninterrupted run gives whose server runs beside the trainer."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    command = tiny_run.command(folder, *SETTINGS, "ranks=4")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **CPU})
    assert done.returncode == 0, done.stdout + done.stderr
    return tiny_run.results(folder)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    with running(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


@pytest.mark.full
def test_ranks_of_trainer_and_server_share_a_key_head(tmp_path: Path) -> None:
    """Both are tensor parallel by two with one head: each rank sends the rows it holds, and the server's samples have
    the trainer's log-probs after every update.
    """
    changed = ["model.kv_heads=1", "stages.1.steps=8", "stages.2.optimizer={lr: 1e-3}", "ranks=2"]
    command = tiny_run.command(tmp_path / "run", *(s.replace('"0,1", ""', '"0,1"') for s in SETTINGS), *changed)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **CPU})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in MetricsFile(tmp_path / "run" / "metrics.jsonl").rows() if "logprob_drift/mean" in row]
    assert len(rows) > 2 and max(row["logprob_drift/mean"] for row in rows) <= 1e-5


@pytest.mark.full
def test_an_evaluation_brings_every_model_into_one_server(tmp_path: Path) -> None:
    """Two runs that differ in the evaluation's sampler alone: greedy, vLLM predicts what the embedded sampler does."""
    greedy = []
    for number, settings in enumerate((SETTINGS, SETTINGS[:-1])):
        run = tmp_path / str(number)
        changed = ["stages.2.optimizer={lr: 1e-2}", "stages.4.temperatures=[0]", "ranks=2"]
        command = tiny_run.command(run, *settings, *changed)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **CPU})
        assert done.returncode == 0, done.stdout + done.stderr
        greedy.append({path.name: path.read_text() for path in sorted((run / "rollouts").glob("evaluate-*.jsonl"))})
    assert len(set(greedy[0].values())) > 1  # the models differ
    assert greedy[0] == greedy[1]


@pytest.mark.skipif(
    missing() is not None and "slurm" not in os.environ.get("TERRELLA_REQUIRE", ""), reason="SLURM is not installed"
)
def test_vllm_on_a_node_of_its_own_and_requeued_twice(slurm: Cluster, whole: dict, tmp_path: Path, monkeypatch) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    (job,) = job_ids(launch(slurm, run, "--nodes", "2", "--ranks-per-node", "2", "--rollout-nodes", "1", sets=SETTINGS))
    requeue_at(slurm, run, job, [("pretrain", 20), ("rlvr", 2)], PATIENCE_S)
    known = slurm.wait(job, deadline_s=PATIENCE_S)
    assert known["Restarts"] == "2" and known["NumNodes"].startswith("3")
    assert tiny_run.results(run) == whole
    # every start had addresses of its own; the settings did not change
    assert len(list((run / "samplers").iterdir())) == 3
    logs = [(run / "stages" / "rlvr" / "sampler" / f"vllm-0-{i}.log").read_text() for i in range(2)]
    assert ["'tensor_parallel_size': 2" in log for log in logs] == [True, False]
    assert all(log.count('/v1/completions HTTP/1.1" 200') for log in logs)  # both were asked
    assert read_json(run / "lease.json")["incarnation"] == 3
    trained = Journal(run / "stages" / "rlvr" / "journal").trained()
    assert len(trained) == 4 * 2 and set(trained.values()) == {1}  # four steps of two prompts, none twice
    compare_replay(run, tmp_path / "replay")


def compare_replay(run: Path, folder: Path, settings: list[str] = SETTINGS, stage: str = "rlvr") -> None:
    """The same samples on one rank of one machine: counts equal, the rest to rounding."""
    recipe = recipes.load("sokoban-tiny", [*tiny_run.OVERRIDES, *settings])
    run_case(recipe, folder / "runs" / "one", source=run, stage=stage, samples=run)
    rows = [
        [row for row in MetricsFile(place / "metrics.jsonl").rows() if row["stage"] == stage]
        for place in (run, folder / "runs" / "one")
    ]
    assert len(rows[0]) == len(rows[1]) == 4
    for there, here in zip(*rows, strict=True):
        assert there["tokens"] == here["tokens"] and there["reward/mean"] == here["reward/mean"]
        for name in ("loss", "grad_norm"):
            assert abs(there[name] - here[name]) <= TOLERANCE * max(1.0, abs(here[name])), (name, there, here)
    readers = [
        CheckpointReader(place / read_json(place / "stages" / f"{stage}.json")["checkpoint"])
        for place in (run, folder / "runs" / "one")
    ]
    for name in readers[1].names():
        there, here = (reader.full(name) for reader in readers)
        assert (there - here).norm() <= TOLERANCE * here.norm(), name


@pytest.mark.full
def test_ppo_with_its_critic_on_slurm(slurm: Cluster, tmp_path: Path, monkeypatch) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    critic = "{lr: 1e4, eps: 1e6, betas: [1e-9, 0.95], clip_grad: 0.0}"
    settings = [*SETTINGS, "stages.2.algorithm={kind: ppo, entropy_coef: 0.01}", f"stages.2.critic={critic}"]
    run, nodes = tmp_path / "run", ["--nodes", "2", "--ranks-per-node", "2", "--rollout-nodes", "1"]
    (job,) = job_ids(launch(slurm, run, *nodes, sets=settings))
    slurm.wait(job, deadline_s=PATIENCE_S)
    trained = Journal(run / "stages" / "rlvr" / "journal").trained()
    assert len(trained) == 4 * 2 and set(trained.values()) == {1}
    compare_replay(run, tmp_path / "replay", settings)


@pytest.mark.full
def test_a_lost_sampler_node_costs_only_steps_since_the_checkpoint(
    slurm: Cluster, whole: dict, tmp_path: Path, monkeypatch
) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    run, nodes = tmp_path / "run", ["--nodes", "2", "--ranks-per-node", "2", "--rollout-nodes", "1"]
    (job,) = job_ids(launch(slurm, run, *nodes, sets=SETTINGS))
    until("step 2 of rlvr", lambda: reached(run, "rlvr", 2), PATIENCE_S)
    # the last of three nodes; what runs there goes with it
    os.kill(slurm.pid("n3"), signal.SIGKILL)
    (host,) = [p for p in psutil.process_iter(["cmdline"]) if is_sampler_host(p, run)]
    host.kill()
    try:
        until("requeue", lambda: int(slurm.job(job)["Restarts"]) >= 1, PATIENCE_S)
    finally:
        slurm._run("/usr/sbin/slurmd", "-f", str(slurm.folder / "slurm.conf"), "-N", "n3")
    known = slurm.wait(job, deadline_s=PATIENCE_S)
    address = read_json(next((run / "samplers" / f"{job}-0").glob("*.json")))["url"]
    told = (run / "logs" / "rank-0.log").read_text() + slurm.log(known)
    assert f"sampler host {address}" in told  # what was lost is named
    assert tiny_run.results(run) == whole
    assert known["Restarts"] == "1" and read_json(run / "lease.json")["incarnation"] == 2
    trained = Journal(run / "stages" / "rlvr" / "journal").trained()
    assert len(trained) == 4 * 2 and set(trained.values()) == {1}  # four steps of two prompts, none twice


def is_sampler_host(process: psutil.Process, run: Path) -> bool:
    words = process.info["cmdline"] or []
    return "sampler-host" in words and any(word.startswith(str(run)) for word in words) and "python" in words[0]


def is_server(process: psutil.Process, run: Path) -> bool:
    words = process.info["cmdline"] or []
    return "terrella.rl.rollout.vllm_server" in words and any(word.startswith(str(run)) for word in words)


@pytest.mark.full
def test_a_lost_server_costs_only_the_step(slurm: Cluster, whole: dict, tmp_path: Path, monkeypatch) -> None:
    """Its host starts it again, the ranks of the trainer send it their parts of the weights, and the job goes on."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    run, nodes = tmp_path / "run", ["--nodes", "2", "--ranks-per-node", "2", "--rollout-nodes", "1"]
    (job,) = job_ids(launch(slurm, run, *nodes, sets=SETTINGS))
    until("step 1 of rlvr", lambda: reached(run, "rlvr", 1), PATIENCE_S)
    server, *_ = [p for p in psutil.process_iter(["cmdline"]) if is_server(p, run)]
    server.kill()
    known = slurm.wait(job, deadline_s=PATIENCE_S)
    assert known["Restarts"] == "0" and read_json(run / "lease.json")["incarnation"] == 1
    told = (run / "logs" / "rank-0.log").read_text()
    assert re.search(r"vllm server http://\S+ was restarted in", told), told[-3000:]
    assert tiny_run.results(run) == whole
    journal = Journal(run / "stages" / "rlvr" / "journal")
    assert set(journal.trained().values()) == {1} and len(journal.trained()) == 4 * 2
    issued = [event["step"] for event in journal.events() if event["event"] == "issued"]
    assert sorted(issued) == sorted([*range(4)] * 2)  # each step once by each data rank


@pytest.mark.full  # CI has Ray inside an allocation (test_slurm.py)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (requirements/ray.txt)")
def test_ray_places_trainer_and_samplers_and_a_lost_node_costs_only_the_step(
    whole: dict, tmp_path: Path, monkeypatch
) -> None:
    from ray.cluster_utils import Cluster as RayCluster

    for name, value in {**CPU, "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    run, said = tmp_path / "run", tmp_path / "driver.log"
    nodes, driver = RayCluster(), None
    try:
        nodes.add_node(num_cpus=2, include_dashboard=False)
        second = nodes.add_node(wait=False, num_cpus=2)
        nodes.wait_for_nodes(timeout=300)
        words = [*tiny_run.command(run, *SETTINGS, "ranks=4"), "--ray", "--sampler-hosts", "1"]
        with open(said, "wb") as stream:
            driver = subprocess.Popen(
                words, env={**os.environ, "RAY_ADDRESS": nodes.address}, stdout=stream, stderr=stream
            )
        until("step 1 of rlvr", lambda: driver.poll() is not None or reached(run, "rlvr", 1), PATIENCE_S)
        assert driver.poll() is None and second.node_id[:8] in said.read_text(), said.read_text()
        nodes.remove_node(second)
        assert driver.wait(PATIENCE_S) == 0, said.read_text()
    finally:
        if driver and driver.poll() is None:
            driver.kill()
        nodes.shutdown()
    text = said.read_text()
    assert f"on node {second.node_id[:8]} is lost" in text and "ray: start 2: trainer on" in text, text
    assert tiny_run.results(run) == whole
    assert read_json(run / "lease.json")["incarnation"] == 2
