"""Several ranks on one GPU: right and slow, to try a layout with the real kernels before several GPUs are there.

NCCL refuses two ranks on one device, and gloo does not take CUDA tensors everywhere: every collective of theirs goes
through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_Needs = Callable[[torch.Tensor], bool]


class _Done:
    """A collective that is over, for callers that asked not to wait."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Staged:
    """A send or receive under way; what arrives is copied to the device when it is waited for."""

    def __init__(self, work: Any, host: torch.Tensor, into: torch.Tensor | None) -> None:
        self.work, self.host, self.into = work, host, into

    def wait(self, *args: Any) -> bool:
        self.work.wait(*args)
        if self.into is not None:
            self.into.detach().copy_(self.host)
            self.into = None
        return True

    def is_completed(self) -> bool:
        return self.into is None and self.work.is_completed()


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, in a type that gloo can add up."""
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.detach().to("cpu", torch.float32 if narrow else tensor.dtype, copy=True)


def _reduce(host: torch.Tensor, op: Any, group: Any) -> None:
    """Straight to the group: inside Megatron's blocks of coalesced collectives the public function would put it off
    to their end.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = op
    (group or dist.group.WORLD).allreduce([host], options).wait()


def _gather(host: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(host) for _ in range(dist.get_world_size(group))]
    (group or dist.group.WORLD).allgather([parts], [host]).wait()
    return parts


def _peer(op: Any) -> dict[str, int]:
    return {"group_dst" if op.op.__name__ == "isend" else "group_src": op.group_peer}


def install(needs: _Needs = lambda tensor: tensor.is_cuda) -> None:
    """Send what ranks tell one another through host memory, for tensors that `needs` names. Once, before Megatron is
    imported.
    """
    if getattr(dist.all_reduce, "staged", False):
        return
    replaced = ("all_reduce", "broadcast", "all_gather", "isend", "irecv")
    replaced += ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    plain = {name: getattr(dist, name) for name in replaced}

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not needs(tensor):
            return plain["all_reduce"](tensor, op, group, async_op)
        host = _host(tensor)
        _reduce(host, op, group)
        tensor.detach().copy_(host)
        return _Done() if async_op else None

    def broadcast(tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        if not needs(tensor):
            return plain["broadcast"](tensor, *args, async_op=async_op, **options)
        host = _host(tensor)
        plain["broadcast"](host, *args, **options)
        tensor.detach().copy_(host)
        return _Done() if async_op else None

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not needs(tensor):
            return plain["all_gather"](tensor_list, tensor, group, async_op)
        host = _host(tensor)
        for into, part in zip(tensor_list, _gather(host, group), strict=True):
            into.detach().copy_(part)
        return _Done() if async_op else None

    def all_gather_into_tensor(
        output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not needs(tensor):
            return plain["all_gather_into_tensor"](output, tensor, group, async_op)
        host = _host(tensor)
        output.detach().view(-1).copy_(torch.cat([part.view(-1) for part in _gather(host, group)]))
        return _Done() if async_op else None

    def reduce_scatter_tensor(
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not needs(tensor):
            return plain["reduce_scatter_tensor"](output, tensor, op, group, async_op)
        host = _host(tensor)
        _reduce(host, op, group)
        output.detach().view(-1).copy_(host.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return _Done() if async_op else None

    def all_to_all_single(
        output: torch.Tensor, tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any
    ) -> Any:
        if not needs(tensor):
            return plain["all_to_all_single"](output, tensor, *args, async_op=async_op, **options)
        host, into = _host(tensor), _host(output)
        plain["all_to_all_single"](into, host, *args, **options)
        output.detach().copy_(into)
        return _Done() if async_op else None

    def isend(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        host = tensor.detach().to("cpu", copy=True) if needs(tensor) else tensor
        return _Staged(plain["isend"](host, *args, **options), host, None)

    def irecv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu") if needs(tensor) else tensor
        return _Staged(plain["irecv"](host, *args, **options), host, tensor if host is not tensor else None)

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        """One after the other: coalesced by the group, what arrives would never be copied to the device."""
        return [op.op(op.tensor, group=op.group, tag=op.tag, **_peer(op)) for op in p2p_op_list]

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        isend(tensor, *args, **options).wait()

    def recv(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        irecv(tensor, *args, **options).wait()

    all_reduce.staged = True  # type: ignore[attr-defined]
    staged = (
        all_reduce,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_to_all_single,
        isend,
        irecv,
        batch_isend_irecv,
        send,
        recv,
    )
    for function in staged:
        for module in (dist, distributed_c10d):  # P2POp knows its operations by their place in the second
            setattr(module, function.__name__, function)
