"""Two Ray nodes on this machine: a node that is taken away loses no call, and a rank's death is an error by name."""

import importlib.util
import os
import threading
from pathlib import Path

import pytest

from terrella.core.errors import WorkerError
from terrella.data.trajectory import Invalid
from terrella.tests.integration.ray_jobs import Player, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
if importlib.util.find_spec("ray") is None:
    if "ray" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("ray is not installed, and TERRELLA_REQUIRE names ray", pytrace=False)
    pytest.skip("ray is not installed (requirements/ray.txt)", allow_module_level=True)

TAG = "SimpleSokoban"
HOLD_S = 900.0  # far longer than the whole test


@pytest.fixture
def cluster(monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=3, include_dashboard=False)
        second = nodes.add_node(wait=False, num_cpus=3)
        nodes.wait_for_nodes(timeout=300)
        ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
        yield nodes, second
    finally:
        ray.shutdown()
        nodes.shutdown()


def test_pool_gang_and_the_loss_of_a_node(cluster, tmp_path: Path) -> None:
    """One cluster for all, as starting one costs most of the time."""
    from terrella.rl.ray_pool import Gang, Pool

    nodes, second = cluster
    gang = Gang(2, strategy="STRICT_SPREAD", cpus=1, start_s=300)
    assert len(set(gang.nodes)) == 2
    assert gang.run("terrella.tests.integration.ray_jobs:all_reduce", {}, deadline_s=300) == [3.0, 3.0]
    gate = tmp_path / "gate"
    options = {"tag": TAG, "gate": str(gate), "hold_s": HOLD_S}
    pool = Pool("terrella.tests.integration.ray_jobs:Player", options, 4, cpus=1, strategy="SPREAD", start_s=300)
    assert len(set(pool.nodes)) == 2
    seeds = list(range(60))
    truth = [Player(TAG).play(seed) for seed in seeds]
    assert pool.map("play", [*seeds[:4], -1], deadline_s=300) == [*truth[:4], Invalid("ray: play: ValueError: a seed is not negative")]

    def hold(key: str, call) -> threading.Thread:
        def run() -> None:
            try:
                held[key] = call()
            except Exception as error:
                held[key] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    held: dict = {}
    gate.mkdir()  # from now on calls wait in it, until it is gone
    job = {"folder": str(gate), "hold_s": HOLD_S}
    holding = hold("gang", lambda: gang.run("terrella.tests.integration.ray_jobs:all_reduce", job, deadline_s=2 * HOLD_S))
    playing = hold("pool", lambda: pool.map("play", seeds, deadline_s=HOLD_S))
    until("both ranks and four calls at work", lambda: len(list(gate.glob("rank-*"))) == 2 and len(list(gate.glob("call-*"))) == 4)
    nodes.remove_node(second)
    holding.join(300)  # the other rank would hold on for much longer
    assert not holding.is_alive()
    gate.rename(tmp_path / "open")
    playing.join(300)
    assert held["pool"] == truth  # every call once, none lost, none made up
    assert pool.reissued >= 1
    lost = gang.nodes.index(second.node_id)
    assert isinstance(held["gang"], WorkerError) and f"rank {lost} on node" in str(held["gang"]), held
    pool.close()
    gang.close()
