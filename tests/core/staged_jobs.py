"""Collectives through host memory, as ranks that share a GPU use them, on two ranks without one. Helper module, not
a test.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def check(rank: int, store: str) -> None:
    """Every collective with staging against what it must give, alone and inside a block of coalesced ones."""
    from terrella.core.mcore import shared_gpu

    shared_gpu.install(lambda tensor: True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine, both = torch.arange(4.0) + 10 * rank, torch.arange(4.0) * 2 + 10

    def reduce_scatter() -> torch.Tensor:
        into = torch.zeros(2)
        dist.reduce_scatter_tensor(into, mine)
        return into

    with dist.distributed_c10d._coalescing_manager(None):  # as Megatron reduces its buckets
        inside = reduce_scatter()
    assert torch.equal(inside, both.chunk(2)[rank]) and torch.equal(reduce_scatter(), both.chunk(2)[rank])
    whole = torch.zeros(8)
    assert dist.all_gather_into_tensor(whole, mine, async_op=True).wait()
    assert torch.equal(whole, torch.cat([torch.arange(4.0), torch.arange(4.0) + 10]))
    narrow = mine.bfloat16()
    dist.all_reduce(narrow)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow.float(), both)
    parts = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(parts, mine)
    assert torch.equal(parts[1], torch.arange(4.0) + 10)
    told = mine.clone()
    dist.broadcast(told, src=1)
    assert torch.equal(told, torch.arange(4.0) + 10)
    swapped = torch.zeros(4)
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(swapped, torch.cat([torch.arange(4.0).chunk(2)[rank], (torch.arange(4.0) + 10).chunk(2)[rank]]))
    into = torch.zeros(4, requires_grad=True)  # as a pipeline receives
    ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
    for work in dist.batch_isend_irecv(ops if rank else ops[::-1]):
        work.wait()
    assert torch.equal(into.detach(), torch.arange(4.0) + 10 * (1 - rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    check(int(sys.argv[1]), str(Path(sys.argv[2])))
