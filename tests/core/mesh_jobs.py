"""Run on ranks by test_mesh.py."""

import time
from typing import Any

import torch.distributed as dist

from terrella.core.config import ParallelConfig
from terrella.core.mesh import Mesh


def slow_play() -> dict[str, Any]:
    """Two data ranks of two peers whose collectives must end within 1.8 s; one of them plays for four."""
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), ParallelConfig(tensor=2, timeout_minutes=0.03))
    played = mesh.from_leader(lambda: time.sleep(4 * mesh.data_rank) or mesh.data_rank)
    told = mesh.gather(played, patient=True)
    made = mesh.from_main(lambda: time.sleep(4) or "baselines")
    return {"played": told, "made": made, "after": mesh.gather(mesh.data_rank)}
