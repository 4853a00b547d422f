"""Sampler hosts: addresses by file, requests only from who knows the token, one server for every tensor-parallel
group of GPUs.
"""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError, DeadlineError, WorkerError
from terrella.rl.rollout.config import Vllm
from terrella.rl.rollout.hosts import Host, HostAddress, find_hosts, hosted_servers
from terrella.rl.rollout.open import own_gpus
from terrella.rl.rollout.vllm_config import VllmSettings

SETTINGS = VllmSettings(model="m", dtype="float32", tensor=2)


@pytest.fixture
def host(tmp_path: Path):
    made = Host("127.0.0.1", gpus=5)
    made.announce(tmp_path / "samplers")
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join(120)
    assert not thread.is_alive()


def test_a_host_is_found_and_gives_every_server_an_address_of_its_own(host: Host, tmp_path: Path) -> None:
    (found,) = find_hosts(f"{tmp_path / 'samplers'}:1", 60)
    assert found == host.address and (tmp_path / "samplers").stat().st_mode & 0o077 == 0
    servers = hosted_servers([found], SETTINGS, [("", 2)], tmp_path / "rlvr" / "sampler", 60.0)
    assert len({s.url for s in servers}) == 2 and all(s.url.startswith("http://127.0.0.1:") for s in servers)
    placed = [host.servers[s.name] for s in servers]
    assert [p.environment["CUDA_VISIBLE_DEVICES"] for p in placed] == ["0,1", "2,3"] and placed[0].settings == SETTINGS
    assert [p.log.name for p in placed] == ["vllm-0-0.log", "vllm-0-1.log"]
    assert not servers[0].alive() and not servers[0].healthy(1.0)  # it has its place but was not started
    servers[0].stop()


def test_a_host_without_gpus_has_the_servers_that_the_recipe_lists(tmp_path: Path) -> None:
    host = Host("127.0.0.1", gpus=0)
    thread = threading.Thread(target=host.serve)
    thread.start()
    try:
        shares = Vllm(devices=["0,1", ""]).shares()
        servers = hosted_servers([host.address], replace(SETTINGS, tensor=1), shares, tmp_path, 60.0)
        assert [host.servers[s.name].settings.tensor for s in servers] == [2, 1]
    finally:
        host.stop()
        thread.join(120)
    with pytest.raises(ValueError, match="tensor: 2 is not what every entry of devices names"):
        Vllm(devices=["0,1", "2"], tensor=2)


def test_strangers_and_unknown_calls_are_refused(host: Host) -> None:
    with pytest.raises(WorkerError, match="403"):
        replace(host.address, token="guess").ask("/state", {"name": "x"})
    for path, body in (("/run", {}), ("/state", {"name": "x"}), ("/place", {"name": "x"})):
        with pytest.raises(WorkerError, match="500"):
            host.address.ask(path, body)


def test_a_host_that_is_gone_is_a_dead_server(tmp_path: Path) -> None:
    gone = HostAddress("http://127.0.0.1:9", "t", 0)
    with pytest.raises(WorkerError, match=r"sampler host http://127.0.0.1:9/place"):
        hosted_servers([gone], SETTINGS, [("", 2)], tmp_path, 1.0)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"0 of 2 sampler hosts wrote their address to .* within 0 s"):
        find_hosts(f"{tmp_path}:2", 0.1)
    for bad in ("folder", ":2", "folder:0", "folder:two"):
        with pytest.raises(ConfigError, match="must be FOLDER:COUNT"):
            find_hosts(bad, 0.1)
    with pytest.raises(ConfigError, match=r"sampler.tensor: 2 is more than the 1 GPUs"):
        hosted_servers([HostAddress("http://n1:1", "t", 1)], SETTINGS, [("", 2)], tmp_path, 1.0)


def test_what_a_server_takes_follows_whether_its_gpus_are_its_own() -> None:
    assert own_gpus(["1", "2,3"], ["0"]) and own_gpus(["4"], ["0", "1"])
    assert not own_gpus(["0", "1"], ["0"]) and not own_gpus(["1,2"], ["0", "2"])
    assert not own_gpus([""], ["0"])  # as the trainer sees them
    own, shared = Vllm(devices=["1"]).resolved(True, cuda=True), Vllm().resolved(False, cuda=True)
    assert (own.gpu_memory, own.max_sequences, own.backend) == (0.9, 1024, "nccl")
    assert (shared.gpu_memory, shared.max_sequences, shared.backend) == (0.5, 256, "gloo")
    assert Vllm(devices=["1"]).resolved(True, cuda=False).backend == "gloo"  # a trainer without a GPU
    given = Vllm(gpu_memory=0.3, max_sequences=8, backend="gloo")
    assert given.resolved(True, cuda=True) == given
    for share, requests in ((0.0, 1), (1.5, 1), (0.5, 0)):
        with pytest.raises(ValueError, match="gpu_memory"):
            Vllm(gpu_memory=share, max_sequences=requests)
