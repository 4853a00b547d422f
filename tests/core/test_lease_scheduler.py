"""A scheduler that starts its job again has the last word on who owns a run directory."""

from pathlib import Path

import pytest

from terrella.core import lease as leases
from terrella.core.errors import LeaseError


def test_a_restarted_job_takes_the_lease_of_its_earlier_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "test")
    first = leases.Lease.acquire(tmp_path)  # this very process: as alive as can be
    with pytest.raises(LeaseError, match="in use"):
        leases.Lease.acquire(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    second = leases.Lease.acquire(tmp_path)
    assert not leases.holds(tmp_path, first.token) and second.incarnation == 2
    with pytest.raises(LeaseError, match="no longer owns"):
        leases.require(tmp_path, first.token)
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # another job has no such right
    with pytest.raises(LeaseError, match="in use"):
        leases.Lease.acquire(tmp_path)
    second.release()
