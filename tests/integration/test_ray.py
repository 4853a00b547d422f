"""Two Ray nodes on this machine: a node that is taken away loses no call, and a rank's death is an error by name."""

import importlib.util
import os
import threading
import time

import pytest

from terrella.core.errors import WorkerError
from terrella.data.trajectory import Invalid
from terrella.tests.integration.ray_jobs import Player

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
if importlib.util.find_spec("ray") is None:
    if "ray" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("ray is not installed, and TERRELLA_REQUIRE names ray", pytrace=False)
    pytest.skip("ray is not installed (requirements/ray.txt)", allow_module_level=True)

TAG = "SimpleSokoban"


@pytest.fixture
def cluster(monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    second = nodes.add_node(num_cpus=3)
    ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
    nodes.wait_for_nodes(timeout=60)
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()


def test_pool_gang_and_the_loss_of_a_node(cluster) -> None:
    """One cluster for all, as starting one costs most of the time."""
    from terrella.rl.ray_pool import Gang, Pool

    nodes, second = cluster
    gang = Gang(2, strategy="STRICT_SPREAD", cpus=1, start_s=120)
    assert len(set(gang.nodes)) == 2
    assert gang.run("terrella.tests.integration.ray_jobs:all_reduce", {}, deadline_s=120) == [3.0, 3.0]
    pool = Pool("terrella.tests.integration.ray_jobs:Player", {"tag": TAG, "slow_s": 0.05}, 4, cpus=1, strategy="SPREAD", start_s=120)
    assert len(set(pool.nodes)) == 2
    seeds = list(range(60))
    truth = [Player(TAG).play(seed) for seed in seeds]
    assert pool.map("play", [*seeds[:4], -1], deadline_s=60) == [*truth[:4], Invalid("ray: play: ValueError: a seed is not negative")]

    removing = threading.Thread(target=lambda: (time.sleep(0.4), nodes.remove_node(second)))
    held = {}

    def hold() -> None:
        begun = time.monotonic()
        try:
            held["value"] = gang.run("terrella.tests.integration.ray_jobs:all_reduce", {"hold_s": 60.0}, deadline_s=90)
        except Exception as error:
            held["value"], held["seconds"] = error, time.monotonic() - begun

    holding = threading.Thread(target=hold)
    holding.start()
    time.sleep(3.0)
    removing.start()
    assert pool.map("play", seeds, deadline_s=120) == truth  # every call once, none lost, none made up
    removing.join(60)
    holding.join(100)
    assert pool.reissued >= 1
    lost = gang.nodes.index(next(n for n in gang.nodes if n == second.node_id))
    assert isinstance(held["value"], WorkerError) and f"rank {lost} on node" in str(held["value"]), held
    assert held["seconds"] < 60
    pool.close()
    gang.close()
