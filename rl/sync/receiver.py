"""The receiving side of weight sync: a vLLM worker extension. It loads through the worker's public `reload_weights`, as
a checkpoint; or, if vLLM's parameters equal the checkpoint's except for joined linears, directly into the parameters,
which is much faster.

Every tensor's checksum is verified on arrival. After a damaged or broken transfer the worker has no version, and the
sampler refuses to generate until a complete one arrives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ...core.process import end_with
from .direct_load import Plan, joined, plan_copies
from .flat_buffer import Entry, checksum, checksums, view
from .sharded import Assembly
from .shared_memory import open_shared
from .transports import MANIFEST, broadcast, make_group

# one bucket: entries as sent, tensors as they arrived, and the checksums of those
Arrival = tuple[list[Entry], list[torch.Tensor], list[str]]


class WeightReceiver:
    """Added to vLLM's worker by `worker_extension_cls`; its methods are called through `collective_rpc`."""

    device: Any
    rank: int
    model_runner: Any
    terrella_version: int | None
    terrella_group: Any
    terrella_store: Any
    terrella_senders: list[tuple[Any, Any]]

    def terrella_state(self) -> dict[str, Any]:
        """The version this worker serves; None before the first and after a failed sync."""
        return {"version": getattr(self, "terrella_version", None), "rank": self.rank}

    def terrella_end_with(self, pid: str) -> None:
        """Die with the trainer, which cannot end its own engine when it is killed."""
        end_with(int(pid))

    def terrella_load_disk(self, folder: str, version: str) -> dict[str, Any]:
        """Load a folder that DiskTransport wrote."""
        from safetensors import safe_open

        path = Path(folder)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, list[Entry]] = {}
        for entry in manifest["tensors"]:
            files.setdefault(entry["file"], []).append(entry)

        def arriving() -> Iterator[Arrival]:
            for file, entries in files.items():
                with safe_open(path / file, framework="pt") as stream:
                    for entry in entries:
                        tensor = stream.get_tensor(entry["name"])
                        yield [entry], [tensor], [checksum(tensor)]

        return self._terrella_load(arriving(), int(version))

    def terrella_check_adapter(self, folder: str, version: str) -> dict[str, Any]:
        """Verify an adapter's folder against its manifest; vLLM then loads it from there."""
        from safetensors import safe_open

        path = Path(folder)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        self.terrella_version = None
        with safe_open(path / "adapter_model.safetensors", framework="pt") as stream:
            damaged = [
                e["name"] for e in manifest["tensors"] if checksum(stream.get_tensor(e["name"])) != e["checksum"]
            ]
        if not damaged:
            self.terrella_version = int(version)
        return {
            "version": self.terrella_version,
            "damaged": damaged,
            "tensors": len(manifest["tensors"]),
            "rank": self.rank,
        }

    def terrella_join(
        self, host: str, port: str, first: str, world: str, backend: str, timeout_s: str
    ) -> dict[str, Any]:
        """Join the sender's process group; `first` is the group rank of this engine's first worker."""
        from torch.distributed import TCPStore

        seconds = float(timeout_s)
        self.terrella_store = TCPStore(host, int(port), None, False, timedelta(seconds=seconds))
        self.terrella_group = make_group(self.terrella_store, int(first) + self.rank, int(world), backend, seconds)
        self.terrella_timeout_s = seconds
        return {"rank": self.rank}

    def terrella_receive(self, prefix: str, version: str) -> dict[str, Any]:
        """Take part in one broadcast: headers come through the store, bytes through the group."""
        device = self.device if torch.device(self.device).type == "cuda" else torch.device("cpu")

        def arriving() -> Iterator[Arrival]:
            number = 0
            while header := json.loads(self.terrella_store.get(f"{prefix}/{number}")):
                flat = torch.empty(header["bytes"], dtype=torch.uint8, device=device)
                broadcast(self.terrella_group, flat, self.terrella_timeout_s)
                yield self._terrella_arrived(flat, header["tensors"])
                number += 1

        return self._terrella_load(arriving(), int(version))

    def terrella_join_all(self, addresses: str, first: str, world: str, backend: str, timeout_s: str) -> dict[str, Any]:
        """Join the process group of every sender."""
        from torch.distributed import TCPStore

        seconds, self.terrella_senders = float(timeout_s), []
        for host, port in json.loads(addresses):
            store = TCPStore(host, int(port), None, False, timedelta(seconds=seconds))
            group = make_group(store, int(first) + self.rank, int(world), backend, seconds)
            self.terrella_senders.append((store, group))
        self.terrella_timeout_s = seconds
        return {"rank": self.rank}

    def terrella_receive_parts(self, prefix: str, version: str) -> dict[str, Any]:
        """Take part in the broadcasts of all senders, one bucket of each in turn."""
        device = self.device if torch.device(self.device).type == "cuda" else torch.device("cpu")

        def arriving() -> Iterator[Arrival]:
            number, sending = 0, list(self.terrella_senders)
            while sending:
                for sender in list(sending):
                    store, group = sender
                    header = json.loads(store.get(f"{prefix}/{number}"))
                    if not header:
                        sending.remove(sender)
                        continue
                    flat = torch.empty(header["bytes"], dtype=torch.uint8, device=device)
                    broadcast(group, flat, self.terrella_timeout_s)
                    yield self._terrella_arrived(flat, header["tensors"])
                number += 1

        return self._terrella_load(arriving(), int(version))

    def terrella_load_shared(self, described: str, version: str) -> dict[str, Any]:
        """Load from memory that the sender shares with this process."""
        buckets = json.loads(described)
        entries = [entry for bucket in buckets for entry in bucket["tensors"]]
        arriving = (self._terrella_arrived(open_shared(bucket["handle"]), bucket["tensors"]) for bucket in buckets)
        plan = self._terrella_plan(entries)
        answer = self._terrella_load(arriving, int(version), plan)
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()  # the sender takes its memory back as soon as this returns
        return answer | {"straight": plan is not None}

    def _terrella_arrived(self, flat: torch.Tensor, entries: list[Entry]) -> Arrival:
        return entries, [view(flat, entry) for entry in entries], checksums(flat, entries)

    def _terrella_plan(self, entries: list[Entry]) -> Plan | None:
        """How to copy directly into the parameters; None if vLLM reorders, cuts or quantises a checkpoint's tensors."""
        config = getattr(self, "vllm_config", None)
        if config is None or torch.device(self.device).type != "cuda":
            return None
        parallel = config.parallel_config
        if (
            parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
            or config.quant_config
            or config.lora_config
        ):
            return None
        model = self.model_runner.get_model()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return plan_copies(entries, shapes, getattr(model, "packed_modules_mapping", {}))

    def _terrella_load(self, arriving: Iterator[Arrival], version: int, plan: Plan | None = None) -> dict[str, Any]:
        damaged: list[str] = []
        tensors, parts = 0, Assembly()
        self.terrella_version = None

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal tensors
            for entries, arrived, found in arriving:
                damaged.extend(e["name"] for e, value in zip(entries, found, strict=True) if value != e["checksum"])
                for entry, tensor in zip(entries, arrived, strict=True):
                    whole = parts.add(entry["name"], tensor, entry["shard"]) if "shard" in entry else tensor
                    if whole is not None:
                        tensors += 1
                        yield entry["name"], whole

        with torch.no_grad():
            if plan is None:
                self.model_runner.reload_weights(weights_iterator=checked())
            else:
                self.model_runner.reload_weights(weights_iterator=joined(checked(), plan), is_checkpoint_format=False)
        self._terrella_tie()
        damaged.extend(sorted(parts.waiting))  # some parts are missing
        if not damaged:
            self.terrella_version = version
        return {"version": self.terrella_version, "damaged": damaged, "tensors": tensors, "rank": self.rank}

    def _terrella_tie(self) -> None:
        """Set a tied head from the new embedding: on CPUs vLLM keeps a packed copy, which a reload does not update."""
        if torch.device(self.device).type != "cpu":
            return
        model = self.model_runner.get_model()
        head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
        if head is None or embedding is None or not getattr(model.config, "tie_word_embeddings", False):
            return
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)
