"""How tensors are sent: by disk, by broadcast (gloo or NCCL), or through memory that two processes of one machine
share. The receiving side is `receiver`."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...core.files import make_folder, save_tensors, write_json
from ...core.ports import free_port
from ...core.store import open_store
from .flat_buffer import checksum, checksums, flatten
from .shared_memory import Shared

Weights = Iterable[tuple[str, torch.Tensor]]
MANIFEST = "manifest.json"


class Target(Protocol):
    """One rollout engine: calls a receiver method on all its workers and returns their results."""

    @property
    def name(self) -> str: ...

    def call(self, method: str, *args: str, timeout_s: float) -> list[dict[str, Any]]: ...

    def accept(self, version: int | None, timeout_s: float) -> None:
        """Serve this version from now on and drop cached prefixes; None: serve nothing until a version is complete."""
        ...

    def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        """Serve a version as the adapter in this folder, on top of the loaded weights."""
        ...


class Transport(Protocol):
    """Sends one version to all targets; returns every worker's answer by target name."""

    def send(
        self, weights: Weights, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]: ...


def with_checksums(flat: torch.Tensor, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A buffer's entries, each with its checksum."""
    return [{**entry, "checksum": value} for entry, value in zip(entries, checksums(flat, entries), strict=True)]


def describe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """The description of a tensor that a receiver needs, with its checksum."""
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "checksum": checksum(tensor),
    }


def call_all(targets: Sequence[Target], method: str, *args: str, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """Call all targets concurrently; the result of one that fails is its error."""
    answers: dict[str, list[dict[str, Any]]] = {}

    def one(target: Target) -> None:
        try:
            answers[target.name] = target.call(method, *args, timeout_s=timeout_s)
        except Exception as error:
            answers[target.name] = [{"error": f"{type(error).__name__}: {error}"}]

    threads = [threading.Thread(target=one, args=(t,), daemon=True) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 5)
    for target in targets:
        answers.setdefault(target.name, [{"error": f"{method}: no answer within {timeout_s:.0f} s"}])
    return answers


def keep_two(newest: Path) -> None:
    """Delete all versions except the newest and the one before it. Higher numbers come from a killed start that got
    further.
    """
    prefix = newest.name.rpartition("-")[0]
    others = sorted(path for path in newest.parent.glob(f"{prefix}-*") if path != newest)
    before = [path for path in others if path.name < newest.name]
    for path in set(others) - set(before[-1:]):
        shutil.rmtree(path, ignore_errors=True)


class DiskTransport:
    """Through a folder that sender and receivers see. Slow and simple; keeps the newest two versions."""

    def __init__(self, folder: Path, shard_bytes: int = 1 << 30) -> None:
        self.folder, self.shard_bytes = Path(folder), shard_bytes

    def send(
        self, weights: Weights, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        answers = self.load(self.write(weights, version), version, targets, timeout_s)
        keep_two(self.path(version))
        return answers

    def load(
        self, path: Path, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        """Let targets load a version that was written earlier."""
        return call_all(targets, "terrella_load_disk", str(path), str(version), timeout_s=timeout_s)

    def path(self, version: int) -> Path:
        """The folder of a version."""
        return self.folder / f"version-{version:08d}"

    def write(self, weights: Weights, version: int) -> Path:
        """Write a version's folder; the manifest comes last."""
        path = self.path(version)
        shutil.rmtree(path, ignore_errors=True)
        make_folder(path)
        entries: list[dict[str, Any]] = []
        for number, bucket in enumerate(buckets(weights, self.shard_bytes)):
            file = f"weights-{number:05d}.safetensors"
            save_tensors(path / file, {name: tensor.cpu().contiguous() for name, tensor in bucket})
            entries += [{**describe(name, tensor), "file": file} for name, tensor in bucket]
        write_json(path / MANIFEST, {"version": version, "tensors": entries})
        return path


class BroadcastTransport:
    """From this process to all workers over a separate process group: gloo between CPUs, NCCL between GPUs."""

    def __init__(
        self, backend: str = "gloo", host: str = "127.0.0.1", port: int = 0, bucket_bytes: int = 1 << 28
    ) -> None:
        self.backend, self.host, self.bucket_bytes = backend, host, bucket_bytes
        self.port = port or free_port()
        self.store: dist.Store | None = None
        self.group: Any = None
        self.sent = 0

    def connect(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Build a new group: this process is rank 0, then come all workers of all targets."""
        workers = {t.name: len(t.call("terrella_state", timeout_s=timeout_s)) for t in targets}
        world = 1 + sum(workers.values())
        self.store = open_store(self.host, self.port, True, timedelta(seconds=timeout_s), wait=False)
        first = 1
        errors: dict[str, list[dict[str, Any]]] = {}
        threads = []
        for target in targets:

            def join(target: Target = target, first: int = first) -> None:
                args = (self.host, str(self.port), str(first), str(world), self.backend, str(timeout_s))
                errors.update(call_all([target], "terrella_join", *args, timeout_s=timeout_s))

            threads.append(threading.Thread(target=join, daemon=True))
            threads[-1].start()
            first += workers[target.name]
        self.group = make_group(self.store, 0, world, self.backend, timeout_s)
        for thread in threads:
            thread.join(timeout_s)
        failed = {name: a for name, answers in errors.items() for a in answers if "error" in a}
        if failed or len(errors) != len(targets):
            raise RuntimeError(f"weight group of {world}: {failed or 'a target did not answer'}")

    def send(
        self, weights: Weights, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        if self.group is None:
            self.connect(targets, timeout_s)
        assert self.store is not None
        self.sent += 1
        prefix, answers = f"sync-{self.sent}", {}
        receiving = threading.Thread(
            target=lambda: answers.update(
                call_all(targets, "terrella_receive", prefix, str(version), timeout_s=timeout_s)
            ),
            daemon=True,
        )
        receiving.start()
        count = 0
        for count, bucket in enumerate(buckets(weights, self.bucket_bytes), 1):
            flat, entries = flatten(bucket)
            self.store.set(
                f"{prefix}/{count - 1}", json.dumps({"bytes": flat.numel(), "tensors": with_checksums(flat, entries)})
            )
            broadcast(self.group, flat, timeout_s)
        self.store.set(f"{prefix}/{count}", "{}")
        receiving.join(timeout_s + 5)
        return answers or {t.name: [{"error": f"no answer within {timeout_s:.0f} s"}] for t in targets}

    def close(self) -> None:
        """Drop the group, so that the next send builds a new one with the targets that are alive then."""
        self.group, self.store, self.port = None, None, free_port()


class IpcTransport:
    """To processes that can map this one's memory: the same GPU (CUDA IPC) or, on CPU, the same machine. Tensors are
    packed into a few buffers, and one handle per buffer is sent. During a sync this needs as much extra memory as the
    weights."""

    def __init__(self, bucket_bytes: int = 1 << 30) -> None:
        self.bucket_bytes = bucket_bytes
        self.took: dict[str, float] = {}  # seconds of the phases of the last send

    def send(
        self, weights: Weights, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        shared: list[Shared] = []
        start = time.monotonic()
        try:
            described = []
            for bucket in buckets(weights, self.bucket_bytes):
                flat, entries = flatten(bucket)
                # computing checksums waits for the device, so the buffer is filled before the other process reads it
                described.append({"tensors": with_checksums(flat, entries)})
                shared.append(Shared(flat))
                described[-1]["handle"] = shared[-1].handle()
            packed = time.monotonic()
            answers = call_all(
                targets, "terrella_load_shared", json.dumps(described), str(version), timeout_s=timeout_s
            )
            self.took = {"pack": packed - start, "load": time.monotonic() - packed}
            return answers
        finally:
            for memory in shared:
                memory.close()


def buckets(weights: Weights, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors into buckets of at most `limit` bytes; a larger tensor gets its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        more = tensor.numel() * tensor.element_size()
        if bucket and size + more > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket


def make_group(store: dist.Store, rank: int, world: int, backend: str, timeout_s: float) -> Any:
    """A process group separate from the default ones of both sides."""
    timeout = timedelta(seconds=timeout_s)
    named = dist.PrefixStore("weights", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(named, rank, world, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(named, rank, world, options)


def broadcast(group: Any, flat: torch.Tensor, timeout_s: float) -> None:
    """Broadcast from rank 0, finished on return."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([flat], options).wait(timedelta(seconds=timeout_s))
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
