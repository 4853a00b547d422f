"""The vocabulary split over two gloo ranks gives what one process gives: values, gradients, one gather of four
numbers a token.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from terrella.tests.kernels.vocab_parallel_cases import SETTINGS, on_one_gpu, rank_main, whole


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, args=(2, folder / "rendezvous", folder), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one(ranks, name):
    want = whole(name)
    for rank, results in enumerate(ranks):
        got = results[name]
        assert got["gathers"] == [4]
        for key in ("logprob", "entropy", "dh", "loss", "policy_logprob", "policy_dh"):
            torch.testing.assert_close(got[key], want[key], atol=1e-12, rtol=1e-10, msg=f"{key} on rank {rank}")
        part = slice(rank * 10, (rank + 1) * 10)
        for key in ("dw", "policy_dw"):
            torch.testing.assert_close(got[key], want[key][part], atol=1e-12, rtol=1e-10, msg=f"{key} on rank {rank}")
        torch.testing.assert_close(got["dlogits"], want["dlogits"][:, part], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_agree_to_the_bit(ranks, name):
    for key in ("logprob", "entropy", "loss", "dh", "policy_dh"):
        assert torch.equal(ranks[0][name][key], ranks[1][name][key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_nccl_with_one_rank(name, tmp_path):
    """The Triton side with a group: its merge and its collectives, on the one GPU there is."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        results = [on_one_gpu(name, group) for group in (dist.group.WORLD, None)]
    finally:
        dist.destroy_process_group()
    for key, want in results[1].items():
        torch.testing.assert_close(results[0][key], want, atol=1e-6, rtol=1e-5, msg=key)
