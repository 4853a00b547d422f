"""The receiving half of weight sync: a vLLM worker extension. It loads through the worker's public `reload_weights`.

Every tensor's checksum is compared on arrival. After a damaged or broken transfer the worker has no version, and the sampler
refuses to generate until a clean one came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .checksum import checksum
from .transports import MANIFEST, broadcast, make_group


class WeightReceiver:
    """Mixed into vLLM's worker by `worker_extension_cls`; every method is called through `collective_rpc`."""

    device: Any
    rank: int
    model_runner: Any
    terrella_version: int | None
    terrella_group: Any
    terrella_store: Any

    def terrella_state(self) -> dict[str, Any]:
        """The version this worker serves; None before the first and after a failed sync."""
        return {"version": getattr(self, "terrella_version", None), "rank": self.rank}

    def terrella_load_disk(self, folder: str, version: str) -> dict[str, Any]:
        """Load a folder that DiskTransport wrote."""
        from safetensors import safe_open

        path = Path(folder)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, list[dict[str, Any]]] = {}
        for entry in manifest["tensors"]:
            files.setdefault(entry["file"], []).append(entry)

        def arriving() -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
            for file, entries in files.items():
                with safe_open(path / file, framework="pt") as stream:
                    for entry in entries:
                        yield entry, stream.get_tensor(entry["name"])

        return self._terrella_load(arriving(), int(version))

    def terrella_join(self, host: str, port: str, first: str, world: str, backend: str, timeout_s: str) -> dict[str, Any]:
        """Enter the sender's process group; `first` is the group rank of this engine's first worker."""
        from torch.distributed import TCPStore

        seconds = float(timeout_s)
        self.terrella_store = TCPStore(host, int(port), None, False, timedelta(seconds=seconds))
        self.terrella_group = make_group(self.terrella_store, int(first) + self.rank, int(world), backend, seconds)
        self.terrella_timeout_s = seconds
        return {"rank": self.rank}

    def terrella_receive(self, prefix: str, version: str) -> dict[str, Any]:
        """Take part in one broadcast: headers come through the store, bytes through the group."""
        device = self.device if torch.device(self.device).type == "cuda" else torch.device("cpu")

        def arriving() -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
            number = 0
            while header := json.loads(self.terrella_store.get(f"{prefix}/{number}")):
                sizes = [_bytes_of(entry) for entry in header]
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                broadcast(self.terrella_group, flat, self.terrella_timeout_s)
                for entry, part in zip(header, flat.split(sizes), strict=True):
                    # a copy: a view into the flat bytes may not be aligned to its dtype
                    yield entry, part.clone().view(getattr(torch, entry["dtype"])).view(entry["shape"])
                number += 1

        return self._terrella_load(arriving(), int(version))

    def terrella_load_tensors(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """Copy from tensors of this very process; there is no transfer to check."""
        return self._terrella_load((({"name": name, "checksum": None}, tensor) for name, tensor in weights), int(version))

    def _terrella_load(self, arriving: Iterator[tuple[dict[str, Any], torch.Tensor]], version: int) -> dict[str, Any]:
        damaged: list[str] = []
        tensors = 0
        self.terrella_version = None

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal tensors
            for entry, tensor in arriving:
                if entry["checksum"] is not None and checksum(tensor) != entry["checksum"]:
                    damaged.append(entry["name"])
                tensors += 1
                yield entry["name"], tensor

        self.model_runner.reload_weights(weights_iterator=checked())
        if not damaged:
            self.terrella_version = version
        return {"version": self.terrella_version, "damaged": damaged, "tensors": tensors, "rank": self.rank}


def _bytes_of(entry: dict[str, Any]) -> int:
    size = torch.empty(0, dtype=getattr(torch, entry["dtype"])).element_size()
    for extent in entry["shape"]:
        size *= extent
    return size
