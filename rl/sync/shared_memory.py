"""A buffer that another process of this machine reads without a copy: CUDA IPC on a GPU, an anonymous memory file on
CPU (Linux).
"""

from __future__ import annotations

import base64
import os
from typing import Any

import torch

from ...core.errors import ConfigError


class Shared:
    """The owner's side. The buffer must not change until the reader is done; then call `close`."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat: torch.Tensor | None = flat
        self.file = -1
        if not flat.is_cuda:
            self.file = os.memfd_create("terrella")  # without a name that could outlive this process
            with open(self.file, "wb", closefd=False) as stream:
                stream.write(flat.numpy().data)

    def handle(self) -> dict[str, Any]:
        """What the reader needs, as JSON."""
        assert self.flat is not None
        if self.file >= 0:
            return {"path": f"/proc/{os.getpid()}/fd/{self.file}", "bytes": self.flat.numel()}
        from torch.multiprocessing.reductions import reduce_tensor

        arguments = list(reduce_tensor(self.flat)[1])
        uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
        # the places of handle, sizes and event in torch's recipe for a shared tensor; the rest is plain for a flat
        # buffer
        return {
            "gpu": uuid,
            "bytes": self.flat.numel(),
            "storage": [_encode(a) for a in arguments[7:10] + arguments[11:15]],
        }

    def close(self) -> None:
        """Release the buffer."""
        cuda = self.flat is not None and self.flat.is_cuda
        self.flat = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        if cuda:
            torch.cuda.ipc_collect()  # torch keeps a shared buffer until it has checked that the reader released it


def open_shared(handle: dict[str, Any]) -> torch.Tensor:
    """The reader's side: the same memory, not a copy."""
    size = handle["bytes"]
    if "path" in handle:
        return (
            torch.from_file(handle["path"], shared=False, size=size, dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.cuda.current_device()
    here = str(torch.cuda.get_device_properties(device).uuid)
    if here != handle["gpu"]:
        raise ConfigError(
            f"sampler.transport: ipc needs trainer and sampler on one GPU; the trainer is on {handle['gpu']}, vllm on "
            f"{here}"
        )
    memory, size_bytes, offset_bytes, counter, counter_offset, event, sync = map(_decode, handle["storage"])
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([size]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        memory,
        size_bytes,
        offset_bytes,
        False,
        counter,
        counter_offset,
        event,
        sync,
    )


def _encode(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
