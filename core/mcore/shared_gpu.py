"""Several ranks on one GPU: right and slow, to try a layout with the real kernels before several GPUs are there.

NCCL refuses two ranks on one device. gloo takes CUDA tensors in every collective that is used here but not in sends between two ranks,
which a pipeline makes: those go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class _Staged:
    """A send or receive under way; what arrives is copied to the device when it is waited for."""

    def __init__(self, work: Any, host: torch.Tensor, into: torch.Tensor | None) -> None:
        self.work, self.host, self.into = work, host, into

    def wait(self, *args: Any) -> bool:
        self.work.wait(*args)
        if self.into is not None:
            self.into.copy_(self.host)
            self.into = None
        return True

    def is_completed(self) -> bool:
        return self.into is None and self.work.is_completed()


def install(stages: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
    """Send and receive tensors that `stages` names through host memory, in this process. Done once, before Megatron is imported."""
    if getattr(dist.isend, "staged", False):
        return
    isend, irecv = dist.isend, dist.irecv

    def staged_isend(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        host = tensor.detach().to("cpu", copy=True) if stages(tensor) else tensor
        return _Staged(isend(host, *args, **options), host, None)

    def staged_irecv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu") if stages(tensor) else tensor
        return _Staged(irecv(host, *args, **options), host, tensor if host is not tensor else None)

    def staged_send(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        staged_isend(tensor, *args, **options).wait()

    def staged_recv(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        staged_irecv(tensor, *args, **options).wait()

    staged_isend.staged = True  # type: ignore[attr-defined]
    for module in (dist, distributed_c10d):  # P2POp knows its operations by their place in the second
        module.isend, module.irecv, module.send, module.recv = staged_isend, staged_irecv, staged_send, staged_recv
