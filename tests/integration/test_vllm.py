"""Real vLLM on CPU: its log-probs are the trainer's, weight sync is exact or stops by name, and a killed server
loses nothing.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from terrella.core.errors import ConfigError, SyncError
from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
from terrella.rl.rollout.vllm_config import VllmSettings
from terrella.tests.integration.vllm_jobs import MODELS
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.reap import is_running
from terrella.tests.sampling import in_turn

JOBS = "terrella.tests.integration.vllm_jobs:"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
if importlib.util.find_spec("vllm") is None:
    if "vllm" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("vllm is not installed, and TERRELLA_REQUIRE names vllm", pytrace=False)
    pytest.skip("vllm is not installed (requirements/vllm-cpu.txt)", allow_module_level=True)


def settings_of(folder, **more) -> VllmSettings:
    return VllmSettings(model=str(folder), dtype="float32", max_length=96, max_sequences=32, eager=True, **more)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    run_ranks(JOBS + "write_models", 1, 600, folders={name: str(folder) for name, folder in made.items()})
    return made


@pytest.fixture(scope="session")
def server(folders, tmp_path_factory):
    from terrella.rl.rollout.vllm_client import ServedVllm
    from terrella.rl.rollout.vllm_server import VllmServer

    settings = settings_of(folders["llama"])
    sampler = ServedVllm(
        settings, [VllmServer(settings, tmp_path_factory.mktemp("logs") / "vllm.log", environment=CPU)], request_s=600
    )
    try:
        sampler.start()
        yield sampler
    finally:
        sampler.close()


@pytest.fixture
def served(server, folders, tmp_path):
    """The server with the untrained weights, as version 0."""
    from safetensors.torch import load_file

    from terrella.rl.sync.publish import publish
    from terrella.rl.sync.transports import DiskTransport

    weights = load_file(folders["llama"] / "model.safetensors")
    publish(DiskTransport(tmp_path / "start"), server.targets, lambda: weights.items(), 0, timeout_s=300)
    return server


def requests(params: SamplingParams, n: int = 6) -> list[SampleRequest]:
    return [SampleRequest(tuple((7 * i + j) % 8 for j in range(3 + i % 3)), (1, i, 0, 0), params) for i in range(n)]


def largest_gap(asked, samples, name: str, steps: int, temperature: float = 1.0) -> float:
    """Between the sampler's log-probs and those of the trainer after `steps` steps, over sampled tokens."""
    rows = [r.ids + s.ids for r, s in zip(asked, samples, strict=True)]
    (scored,) = run_ranks(JOBS + "score", 1, 900, name=name, steps=steps, rows=rows, temperature=temperature)
    gaps = []
    for request, sample, logprobs in zip(asked, samples, scored, strict=True):
        for i, (logprob, given) in enumerate(zip(sample.logprobs, sample.given, strict=True)):
            if not given:
                gaps.append(abs(logprob - logprobs[len(request.ids) + i]))
    return max(gaps)


def test_llama_logprobs_are_the_trainers_through_a_server(served) -> None:
    sampler = served
    plain = requests(SamplingParams(12))
    forced = [SampleRequest(r.ids, (2, *r.key[1:]), r.params, ((3, (5, 6)), (7, (4,)))) for r in plain]
    cut = [
        SampleRequest(r.ids, (3, *r.key[1:]), SamplingParams(12, top_p=0.8, top_k=5, stop_ids=(1, 2, 3))) for r in plain
    ]
    greedy = [SampleRequest(r.ids, (4, *r.key[1:]), SamplingParams(12, temperature=0.0, allowed=(4, 7))) for r in plain]
    asked = plain + forced + cut + greedy
    samples = sampler.generate(asked)
    assert largest_gap(asked, samples, "llama", 0) <= 1e-5
    assert all(s.ids[3:5] == (5, 6) and s.ids[9] == 4 and len(s.ids) == 15 for s in samples[6:12])
    assert all((s.ids[-1] in (1, 2, 3)) == (s.finish == "stop") for s in samples[12:18])
    assert all(4 <= t < 7 for s in samples[18:] for t in s.ids)
    assert sampler.generate(asked) == samples  # the key alone decides
    with pytest.raises(ConfigError, match="processed"):
        sampler.generate(requests(SamplingParams(2, temperature=0.7)))


@pytest.mark.parametrize("way", ["disk", "broadcast"])
def test_after_a_step_and_a_sync_the_new_weights_answer(served, tmp_path, way) -> None:
    sampler = served
    steps = {"disk": 1, "broadcast": 2}[way]
    folder = str(tmp_path) if way == "disk" else None
    where = {"url": sampler.targets[0].name, "key": sampler.targets[0].server.key}
    (report,) = run_ranks(JOBS + "send", 1, 900, name="llama", steps=steps, folder=folder, **where)
    with pytest.raises(SyncError, match=rf"holds version \['{steps}'\], not 0; who else writes to it"):
        sampler.generate(requests(SamplingParams(2)))  # the server is asked, and nothing is sampled
    sampler.targets[0].version = steps
    asked = requests(SamplingParams(12))
    samples = sampler.generate(asked)
    assert largest_gap(asked, samples, "llama", steps) <= 1e-5
    assert largest_gap(asked, samples, "llama", steps - 1) > 1e-3
    assert {s.weight_version for s in samples} == {steps} and report["tensors"] > 15


def test_a_damaged_tensor_is_sent_again_and_then_stops_the_run_by_name(served, folders, tmp_path) -> None:
    from safetensors.torch import load_file

    from terrella.rl.sync.publish import publish
    from terrella.rl.sync.transports import DiskTransport

    class Damaging(DiskTransport):
        """Flips one bit of one tensor on its way, for the first `times` sends."""

        times = 1

        def write(self, weights, version):
            path = super().write(weights, version)
            if self.times:
                self.times -= 1
                file = path / "weights-00000.safetensors"
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(bytes(data))
            return path

    sampler = served
    weights = load_file(folders["llama"] / "model.safetensors")
    transport = Damaging(tmp_path)
    assert publish(transport, sampler.targets, lambda: weights.items(), 7, timeout_s=300).attempts == 2
    transport.times = 99
    last = max(
        json.loads((tmp_path / "version-00000007" / "manifest.json").read_text())["tensors"], key=lambda t: t["name"]
    )["name"]
    with pytest.raises(SyncError, match=f"failed 3 times: .*tensor {last} arrived damaged"):
        publish(transport, sampler.targets, lambda: weights.items(), 8, timeout_s=300)
    with pytest.raises(ConfigError, match="publish one to all"):
        sampler.generate(requests(SamplingParams(2)))
    transport.times = 0
    publish(transport, sampler.targets, lambda: weights.items(), 0, timeout_s=300)
    assert largest_gap(requests(SamplingParams(6)), sampler.generate(requests(SamplingParams(6))), "llama", 0) <= 1e-5


@in_turn("server killed")
def test_a_server_killed_mid_batch_is_restarted_and_its_requests_are_asked_again(tmp_path) -> None:
    (result,) = run_ranks(JOBS + "killed", 1, 1500, folder=str(tmp_path), environment=CPU)
    assert result["same"] and result["restarts"] == 1 and result["reissued"] >= 1
    # the new server has the trained weights, not those it started with
    assert result["versions"] == [2] and result["gap"] <= 1e-5


@pytest.mark.full
def test_a_server_killed_while_weights_are_sent_to_it_costs_one_more_attempt(tmp_path) -> None:
    main, other = run_ranks(JOBS + "killed_in_sync", 2, 1500, folder=str(tmp_path), environment=CPU)
    assert main["restarts"] == 1 and main["attempts"] == other["attempts"] == 2
    assert main["same"] and main["versions"] == [2, 2]


@pytest.mark.full
def test_a_server_killed_when_only_other_ranks_sample_is_started_again(tmp_path) -> None:
    main, other = run_ranks(JOBS + "killed_for_others", 2, 1500, folder=str(tmp_path), environment=CPU)
    assert main["same"] and other["same"] and main["sent"] == other["sent"] == 2
    assert main["seconds"] < 500  # sooner than request_s


def test_grpo_learns_the_same_through_vllm_and_embedded(served) -> None:
    sampler, job = served, JOBS + "learn_letters"
    arguments = {"settings": sampler.settings, "steps": 25, "episodes": 1024, "seed": 5}
    (vllm,) = run_ranks(job, 1, 1500, url=sampler.targets[0].name, key=sampler.targets[0].server.key, **arguments)
    (embedded,) = run_ranks(job, 1, 1500, url=None, **arguments)
    assert vllm["drift"] <= 1e-5 and vllm["first"] < 0.4
    assert abs(vllm["success"] - embedded["success"]) <= 0.03 and vllm["success"] > 0.9, (vllm, embedded)


def test_a_killed_trainer_leaves_no_engine_behind(folders, tmp_path) -> None:
    """An engine of the trainer's own, colocated with it: vLLM's does not notice that its owner is gone."""
    code = """
import sys, time
from pathlib import Path
from terrella.rl.rollout.vllm_local import LocalVllm
from terrella.tests.integration.test_vllm import settings_of
if __name__ == "__main__":
    sampler = LocalVllm(settings_of(sys.argv[1]))
    Path(sys.argv[2]).write_text(" ".join(str(child.pid) for child in sampler.children))
    time.sleep(600)
"""
    (tmp_path / "trainer.py").write_text(code)
    shown, log = tmp_path / "engines", (tmp_path / "log").open("w")
    command = [sys.executable, str(tmp_path / "trainer.py"), str(folders["qwen2"]), str(shown)]
    trainer = subprocess.Popen(command, env=os.environ | CPU, stdout=log, stderr=log)
    end = time.monotonic() + 900
    while not (shown.exists() and shown.read_text()) and trainer.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    trainer.kill()
    trainer.wait()
    engines = [int(pid) for pid in shown.read_text().split()]
    assert engines
    end = time.monotonic() + 30
    while any(is_running(pid) for pid in engines) and time.monotonic() < end:
        time.sleep(0.2)
    left = [pid for pid in engines if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@in_turn("engine as a child")
def test_qwen2_as_a_child_of_this_process(folders, monkeypatch) -> None:
    from safetensors.torch import load_file

    from terrella.rl.rollout.vllm_local import LocalVllm
    from terrella.rl.sync.publish import publish
    from terrella.rl.sync.transports import IpcTransport

    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampler = LocalVllm(settings_of(folders["qwen2"], logprobs="processed"))
    asked = requests(SamplingParams(10, temperature=0.7)) + requests(SamplingParams(10))
    samples = sampler.generate(asked)
    assert largest_gap(asked[:6], samples[:6], "qwen2", 0, temperature=0.7) <= 1e-5
    assert largest_gap(asked[6:], samples[6:], "qwen2", 0) <= 1e-5
    weights = load_file(folders["qwen2"] / "model.safetensors")
    changed = {name: tensor * 1.25 if name.endswith("o_proj.weight") else tensor for name, tensor in weights.items()}
    publish(IpcTransport(), [sampler], lambda: changed.items(), 3)
    other = sampler.generate(asked)
    assert {s.weight_version for s in other} == {3} and [s.logprobs for s in other] != [s.logprobs for s in samples]
    publish(IpcTransport(), [sampler], lambda: weights.items(), 4)
    assert [s.logprobs for s in sampler.generate(asked)] == [pytest.approx(s.logprobs, abs=1e-6) for s in samples]
    sampler.close()
