"""Process groups, parallel state and seeds."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config import ParallelConfig
from ..errors import ConfigError
from ..mesh import place
from ..ports import is_loopback
from ..process import keep_near, pci_address
from ..store import open_store
from . import shared_gpu, wgrad

log = logging.getLogger("terrella")
_active: ParallelConfig | None = None


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def start_process_group(
    timeout_minutes: float = 10.0, *, init_method: str = "env://", rank: int = -1, world: int = -1
) -> None:
    """Join the world (by default the one torchrun's variables describe): NCCL with CUDA, gloo without, or where ranks
    share a GPU. Every collective has a deadline."""
    if dist.is_initialized():
        return
    # NCCL's flight recorder tells, after a hang, which collective each rank was in.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    backend = "gloo"
    if torch.cuda.is_available():
        gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", max(world, 1)))
        backend = "cpu:gloo,cuda:nccl" if here <= gpus else "cpu:gloo,cuda:gloo"
        if here > gpus:
            log.warning(
                "%d ranks share %d GPU(s): their collectives go through host memory, which is right but slow",
                here,
                gpus,
            )
            shared_gpu.install()
        gpu = int(os.environ.get("LOCAL_RANK", max(rank, 0))) % gpus
        if here > 1:  # a rank that is alone may use the whole machine
            log.info(keep_near(pci_address(gpu)))  # before CUDA and torch start threads, which inherit it
        torch.cuda.set_device(gpu)
    timeout = timedelta(minutes=timeout_minutes)
    host = os.environ.get("MASTER_ADDR", "")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has made the store
    if init_method == "env://" and is_loopback(host) and not agent:  # one machine: nobody else need reach its ranks
        if os.path.isdir("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        own, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = open_store(host, int(os.environ["MASTER_PORT"]), own == 0, timeout, size)
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout)


@dataclass(frozen=True)
class Groups:
    """This rank's place in the layout. A group of one rank is passed to losses and kernels as None."""

    data_rank: int
    replica_rank: int  # among the ranks that hold the same dense parameters
    expert_replica_rank: int  # among the ranks that hold the same experts
    tensor_rank: int
    tensor: dist.ProcessGroup | None
    context_rank: int
    context: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup
    reduce: dist.ProcessGroup  # data and context ranks of this pipeline stage
    last_rank: int  # of the pipeline


def start_parallel(parallel: ParallelConfig, seed: int) -> Groups:
    """Build Megatron's groups and seed its generators. A second engine in the process must use the same layout."""
    global _active
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
    parallel = parallel.resolved(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        if parallel != _active:
            raise ConfigError(
                f"parallel: this process already runs {_active}; every engine in it must use the same layout"
            )
    else:
        here = place(parallel, dist.get_rank(), dist.get_world_size())
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=expert_tensor_size(parallel),
            distributed_timeout_minutes=max(1, round(parallel.timeout_minutes)),
            create_gloo_process_groups=False,
        )
        if (
            parallel_state.get_data_parallel_rank() != here.data_rank
            or parallel_state.get_data_parallel_world_size() != here.data_size
        ):
            raise ConfigError(
                f"parallel: megatron-core counts data ranks of {parallel} in another order than core/mesh.py"
            )
        _active = parallel
    _complete_megatron()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return Groups(
        data_rank=parallel_state.get_data_parallel_rank(),
        replica_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_replica_rank=parallel_state.get_expert_data_parallel_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_group() if parallel.tensor > 1 else None,
        context_rank=parallel_state.get_context_parallel_rank(),
        context=parallel_state.get_context_parallel_group() if parallel.context > 1 else None,
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        reduce=parallel_state.get_data_parallel_group(with_context_parallel=True),
        last_rank=parallel_state.get_pipeline_model_parallel_last_rank(),
    )


def generator_states() -> dict[str, torch.Tensor]:
    """States of all random generators of this rank."""
    from megatron.core import tensor_parallel

    states = {"rng.cpu": torch.get_rng_state()}
    for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"rng.tracker.{name}"] = value.clone() if isinstance(value, torch.Tensor) else value.get_state()
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, torch.Tensor]) -> None:
    """Undo `generator_states`."""
    from megatron.core import tensor_parallel

    torch.set_rng_state(states["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in states:
        torch.cuda.set_rng_state(states["rng.cuda"])
    prefix = "rng.tracker."
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {k[len(prefix) :]: v for k, v in states.items() if k.startswith(prefix)}
    )


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Tensor ranks inside an expert: whole experts when they are spread over ranks, cut like dense layers when they
    are not.
    """
    return 1 if parallel.expert > 1 else parallel.tensor


def stop_parallel() -> None:
    """Take the groups down, so that another layout can be built in the same world."""
    global _active
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _active = None


def _complete_megatron() -> None:
    # It warns of every feed-forward class that is not its own.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    # megatron-core 0.16 names te_general_gemm in the router without defining it when TransformerEngine is absent.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    wgrad.complete_megatron()
