"""Opens a sampler that follows the trainer's weights, from settings; a training stage closes it at its end."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.engine import Engine
from ...core.files import make_folder
from ...core.mesh import Mesh
from ...models.config import ModelConfig
from ...models.expert_decode import pack_experts
from ...models.lora import merged
from ..sync.adapter import AdapterTransport
from ..sync.names import adapter_weights, engine_weights
from ..sync.publish import SyncReport, send_again
from ..sync.publish import publish as send
from ..sync.sharded import ShardedTransport, own_parts
from ..sync.transports import BroadcastTransport, DiskTransport
from .config import Embedded, SamplerConfig, Vllm
from .embedded import EmbeddedSampler
from .sampler import Sampler
from .stream import Stream
from .vllm_config import VllmSettings, check_notes

if TYPE_CHECKING:
    from .hosts import HostAddress

log = logging.getLogger("terrella")


@dataclass
class OpenSampler:
    """A sampler, a function that sends it new weights (None if it shares the trainer's), and one that closes it.

    `rest` is called after sampling, before training; what it measures is recorded.
    """

    sampler: Sampler
    publish: Callable[[int], None] | None
    close: Callable[[], None]
    last: SyncReport | None = None
    rest: Callable[[], dict[str, float]] | None = None


def sampling_weights(engine: Engine) -> Callable[[], dict[str, Any]]:
    """The engine's own weights by name, as they are when asked for. Adapters are merged once for each version of them,
    into memory that stays where it is: captured graphs and cached pages know it.
    """
    lora = getattr(engine.build, "lora", None)
    folded: dict[str, Any] = {}
    folded_at = -1

    def weights() -> dict[str, Any]:
        nonlocal folded_at
        named = {p.name: p.param.detach() for p in engine.local_parameters()}
        if lora is None:
            return named
        if engine.weights_version != folded_at:
            # sorted: an adapter's name comes before its weight's
            for name, tensor in merged(sorted(named.items()), engine.build.model, lora):  # type: ignore[attr-defined]
                if name in folded:
                    folded[name].copy_(tensor)
                elif tensor is not named[name]:
                    folded[name] = tensor
            folded_at = engine.weights_version
        return {name: folded.get(name, tensor) for name, tensor in named.items() if ".lora." not in name}

    return weights


def open_sampler(
    config: SamplerConfig,
    engine: Engine,
    model: ModelConfig,
    folder: Path,
    *,
    mesh: Mesh | None = None,
    ahead: int = 0,
    notes: bool = False,
) -> OpenSampler:
    """Every rank calls this, and leaders sample. The main rank owns the servers; the others sample from them by
    address. `folder` takes logs and weights. With `ahead` sampling goes on while the engine is trained. With `notes`
    samples of a model with experts tell which were chosen."""
    mesh = mesh or Mesh()
    if isinstance(config, Embedded):
        return _open_embedded(config, engine, model, mesh, ahead > 0, notes)
    return _open_vllm(config, engine, model, make_folder(Path(folder)), mesh, ahead, notes)


def as_stream(opened: OpenSampler, aside: bool = False, pause_s: float = 3600.0) -> OpenSampler:
    """Wrap a sampler as a `Stream`, which pauses within `pause_s` while weights change or memory is freed. If it
    samples `aside`, concurrently with training, the memory is kept.
    """
    stream, publish, rest = Stream(opened.sampler), opened.publish, opened.rest

    def publish_paused(version: int) -> None:
        assert publish is not None
        with stream.paused(pause_s):
            publish(version)

    def pause() -> dict[str, float]:
        if aside:
            return getattr(opened.sampler, "figures", dict)()
        with stream.paused(pause_s):
            return rest() if rest else {}

    def close() -> None:
        try:
            stream.close()
        finally:
            opened.close()

    return OpenSampler(stream, publish_paused if publish else None, close, rest=pause)


def _open_embedded(
    config: Embedded, engine: Engine, model: ModelConfig, mesh: Mesh, aside: bool, notes: bool
) -> OpenSampler:
    """Sample from the engine's own weights if the rank holds them all and does not train meanwhile; else from a full
    copy that the leader gathers at every publish.
    """
    options = {"max_batch": config.max_batch, "cache_gib": config.cache_gib, "copy": config.copy}
    options |= {"batch_invariant": config.batch_invariant, "notes": notes}
    shares = engine.parallel.model_size * engine.parallel.expert == 1 and not aside
    held: dict[str, Any] = {}
    published, held_at = engine.steps, engine.weights_version
    lora = getattr(engine.build, "lora", None)

    def publish(version: int) -> None:
        nonlocal published, held_at
        first = not held
        stream = merged(engine.parameters(), model, lora) if lora else engine.parameters()
        if aside and engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)  # the sampler uses its own CUDA stream
        for name, tensor in stream:  # collective: peers contribute their parts
            if not mesh.is_leader:
                continue
            if name in held:
                held[name].copy_(tensor)  # in place: captured graphs hold the addresses
            else:
                held[name] = tensor.detach().clone()
        if first and held:
            pack_experts(held, model)
        if aside and engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        published, held_at = version, engine.weights_version

    def close() -> None:
        held.clear()
        sampler.rest()

    weights = sampling_weights(engine) if shares else (lambda: held)
    version = (lambda: published) if aside else (lambda: engine.steps)
    weights_version = (lambda: engine.weights_version) if shares else (lambda: held_at)
    sampler = EmbeddedSampler(
        weights, model, version=version, weights_version=weights_version, keep=True, aside=aside, **options
    )
    return OpenSampler(sampler, None if shares else publish, close, rest=sampler.rest)


def _elsewhere(mesh: Mesh) -> bool:
    """Whether some ranks are on other machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", mesh.ranks)) < mesh.ranks


def own_gpus(devices: list[str], trained_on: list[str]) -> bool:
    """Whether every server is assigned GPUs that no trainer rank uses; "" means any GPU."""
    named = [name.strip() for entry in devices for name in entry.split(",")]
    return all(named) and not {*named} & {*trained_on}


def _trained_on(engine: Engine) -> str:
    """The name of this rank's GPU, as CUDA_VISIBLE_DEVICES has it."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = engine.device.index or 0
    return visible[index] if index < len(visible) else str(index)


def _resolved(config: Vllm, engine: Engine, mesh: Mesh, hosts: list[HostAddress], placed: bool) -> Vllm:
    """Fill in the settings' defaults by what the machines have, and print them. Collective."""
    cuda = engine.device.type == "cuda"
    ranks = mesh.gather_all((socket.gethostname(), _trained_on(engine) if cuda else ""))
    if config.colocated or config.urls:  # nothing is known about servers of others
        own = False
    elif placed:
        own = mesh.from_main(lambda: all(host.gpus > 0 for host in hosts))
    else:
        # servers start on the main rank's machine
        beside = [name for host, name in ranks if host == ranks[0][0]]
        own = cuda and own_gpus(config.devices, beside)
    resolved = config.resolved(own, cuda)
    if mesh.is_main:
        where = "GPUs of their own" if own else "the trainer's devices" if not config.urls else "unknown devices"
        sync = "disk" if resolved.transport == "disk" else resolved.backend
        text = "vllm on %s: gpu_memory %g, %d sequences at once%s"
        log.info(
            text, where, resolved.gpu_memory, resolved.max_sequences, "" if config.colocated else f", weights by {sync}"
        )
    return resolved


def _open_vllm(
    config: Vllm, engine: Engine, model: ModelConfig, folder: Path, mesh: Mesh, ahead: int, notes: bool
) -> OpenSampler:
    from ...models.families import write_hf_config
    from .colocated import lora_of, open_colocated, write_base
    from .hosts import VARIABLE, find_hosts, hosted_servers
    from .vllm_client import Remote, ServedVllm, adapter_name
    from .vllm_server import VllmServer

    placed = os.environ.get(VARIABLE) if not (config.urls or config.colocated) else None
    hosts = find_hosts(placed, config.start_s) if placed and mesh.is_main else []
    config = _resolved(config, engine, mesh, hosts, bool(placed))
    assert config.max_sequences and config.gpu_memory and config.backend
    if notes and (config.colocated or not (config.urls or os.environ.get(VARIABLE))):
        check_notes()  # other engines check it themselves
    dtype = "bfloat16" if engine.precision.params == "bf16" else "float32"
    home = make_folder(folder / "model")
    if config.adapters_only:
        write_base(engine, model, home, writes=mesh.is_main)
    elif mesh.is_main:
        (home / "config.json").write_text(json.dumps(write_hf_config(model, dtype)), encoding="utf-8")
    settings = VllmSettings(
        model=str(home.absolute()),
        load="auto" if config.adapters_only else "dummy",
        dtype=dtype,
        logprobs=config.logprobs,
        tensor=config.tensor,
        max_length=config.max_length,
        max_sequences=config.max_sequences,
        gpu_memory=config.gpu_memory,
        eager=config.eager,
        sleep=config.sleep > 0,
        notes=notes,
        lora_rank=lora_of(engine).rank if config.adapters_only else 0,
    )
    if config.colocated:
        mesh.barrier()  # wait for the folder
        colocated, publish_new = open_colocated(config, settings, engine, model, folder.absolute(), mesh)
        return OpenSampler(colocated, publish_new, colocated.local.close, rest=colocated.rest)
    here = socket.gethostname() if placed and config.host == Vllm.host else config.host
    weights, transport, backend = engine_weights, None, config.backend
    if config.adapters_only:
        weights, transport = (
            adapter_weights,
            AdapterTransport(folder.absolute() / "adapters", model, lora_of(engine), settings.model),
        )
    elif config.transport == "disk":
        transport = DiskTransport(folder.absolute() / "weights")
    elif engine.parallel.model_size * engine.parallel.expert > 1 and getattr(engine.build, "lora", None) is None:
        # each rank is reached at its own machine
        address = socket.gethostname() if _elsewhere(mesh) or placed else config.host
        weights, transport = own_parts, ShardedTransport(backend, address, mesh.gather_all)
    else:
        transport = BroadcastTransport(backend, here)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # a server on the trainer's GPU can use what the trainer has cached
    servers: list[VllmServer] = []
    if mesh.is_main and placed:
        servers = [*hosted_servers(hosts, settings, config.shares(), folder, config.start_s)]
    elif mesh.is_main and not config.urls:
        # ranks of other machines sample from them too
        address = socket.gethostname() if _elsewhere(mesh) else "127.0.0.1"
        servers = [
            VllmServer(
                replace(settings, tensor=tensor),
                folder / f"vllm-{i}.log",
                host=address,
                environment={"CUDA_VISIBLE_DEVICES": device} if device else {},
                start_s=config.start_s,
            )
            for i, (device, tensor) in enumerate(config.shares())
        ]
    started = mesh.from_main(lambda: [(server.url, server.key) for server in servers])
    known = [Remote(url) for url in config.urls] or [Remote(url, key=key) for url, key in started]

    def resync(target: Remote) -> None:
        version = opened.last.version if opened.last else engine.steps
        alone = BroadcastTransport(backend, here)
        send_again(transport, alone, target, lambda: engine_weights(engine), version, config.sync_s)

    # without a copy on disk, weights may be changing when a server is lost, or be on ranks that are busy
    together = not isinstance(transport, DiskTransport | AdapterTransport) and (
        ahead > 0 or engine.parallel.model_size * engine.parallel.expert > 1
    )
    sampler = ServedVllm(
        settings,
        servers or known,
        request_s=config.request_s,
        resync=resync,
        together=together,
        ours_elsewhere=not (mesh.is_main or config.urls),
    )
    sampler.start()
    mesh.barrier()  # no requests before all servers are up
    opened = OpenSampler(sampler, None, sampler.close)  # cannot sample before the first publish

    def revive() -> None:
        # a restarted server is not in the existing groups
        if mesh.from_main(sampler.revive) and isinstance(transport, BroadcastTransport | ShardedTransport):
            transport.close()

    def publish(version: int) -> None:
        opened.last = send(
            transport,
            sampler.targets,
            lambda: weights(engine),
            version,
            timeout_s=config.sync_s,
            sends=mesh.is_main,
            gather=mesh.gather_all,
            revive=revive,
        )
        for target in sampler.targets:
            target.version = version
            if config.adapters_only:  # the main rank has loaded it; the others request it by the same name
                target.adapter = adapter_name(version)

    opened.publish = publish
    return opened
