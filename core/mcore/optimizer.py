"""The distributed optimizer, and its state by parameter.

Megatron 0.16 cannot load its own optimizer checkpoint when Adam is torch's: the fresh state is empty, 'step' is not
among the loaded tensors, and one shared step tensor is advanced once per parameter. So the state is read and written
here, parameter by parameter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ..config import OptimizerConfig, ParallelConfig, PrecisionConfig
from .setup import device
from .transformer import DTYPES

MOMENTS = ("exp_avg", "exp_avg_sq")
Group = tuple[dict[str, Any], list[Any]]  # settings, and the kernel's tuple for every run that has them


@dataclass
class Lookup:
    """What an update needs of all parameters, kept with the optimizer: to find it again for a thousand weights takes
    the host 40 ms.
    """

    pieces: list[torch.Tensor]  # of the gradients, for the norm
    steps: Any = None  # of all runs, one tensor
    groups: list[Group] | None = None  # for the kernel; None before the first update and after the state was replaced


def wrap_ddp(chunks: list[torch.nn.Module], parallel: ParallelConfig) -> list[torch.nn.Module]:
    """Megatron's data-parallel wrapper with fp32 gradient buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    config = chunks[0].config
    config.finalize_model_grads_func = (
        _finalize if parallel.tensor * parallel.pipeline > 1 or _router_remembers(config) else _reduce
    )
    wrapped = [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    if parallel.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if parallel.overlap_param_gather:
        # Megatron waits in hooks on each module's forward, which a layer that uses a weight directly would pass by: we
        # wait ourselves.
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
            _wait_by_layer(chunk)
    return wrapped


def _wait_by_layer(chunk: Any) -> None:
    """Let each layer wait, before it computes, for the buckets that hold any weight of its own; all that is outside of
    layers is waited for before the chunk begins.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    inside = {id(param) for layer in layers for param in layer.parameters()}
    outside = [param for param in chunk.module.parameters() if id(param) not in inside]
    for module, params in ((chunk.module, outside), *((layer, list(layer.parameters())) for layer in layers)):
        known = [chunk.param_to_bucket_group[p] for p in params if p in chunk.param_to_bucket_group]
        buckets = list({id(bucket): bucket for bucket in known}.values())
        module.register_forward_pre_hook(lambda *_, buckets=buckets: _await(buckets))


def _await(buckets: list[Any]) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.param_gather_handle.wait()
            bucket.param_gather_handle = None


def start_gather(wrapped: list[Any]) -> None:
    """Gather the updated parameters of all data ranks; in the background, until `finish_gather`, where the layout
    says so. Collective.
    """
    for chunk in wrapped:
        for bucket in reversed(chunk.bucket_groups + chunk.expert_parallel_bucket_groups):  # the first layers' first
            bucket.start_param_sync()


def finish_gather(wrapped: list[Any]) -> None:
    """Wait for the gathers that `start_gather` began."""
    for chunk in wrapped:
        _await(chunk.bucket_groups + chunk.expert_parallel_bucket_groups)


def _finalize(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(chunks, None, **options)  # the weights of the loss already hold its normalisation


def _router_remembers(config: Any) -> bool:
    """Whether routers keep counts over a step, which `_finalize` reads and resets."""
    return config.moe_router_enable_expert_bias or "global_aux_loss" in config.moe_router_load_balancing_type


def _reduce(
    chunks: list[Any], num_tokens: torch.Tensor | None = None, *, force_all_reduce: bool = False, **groups: Any
) -> None:
    """All that `_finalize` comes to where layers are cut over no ranks; Megatron also walks every module, 3 ms with
    500 experts.
    """
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)


def build_optimizer(config: OptimizerConfig, precision: PrecisionConfig, wrapped: list[torch.nn.Module]):
    """AdamW over the data-parallel shards, with fp32 master weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=True,
            bf16=precision.params == "bf16",
            params_dtype=DTYPES[precision.params],
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    for part in parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
    optimizer.prepare_grads()  # masters' gradients are views of the fp32 buffers, and stay
    optimizer.terrella = Lookup(_norm_pieces(optimizer))
    return optimizer


def parts(optimizer) -> list:
    """The chained optimizers (dense, experts) that own parameters on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _norm_pieces(optimizer) -> list[torch.Tensor]:
    """The gradients that the norm counts, neighbours joined: few tensors, however many parameters. The padding
    between them is zero.
    """
    # on a GPU torch adds up a tensor of any size well; on a CPU one by one, and loses 1e-6 over 16,384 elements, 2e-4
    # over four million
    size = 1 << (26 if device().type == "cuda" else 12)
    counted = {grad.data_ptr() for part in parts(optimizer) for grad in part.get_main_grads_for_grad_norm()}
    pieces: list[torch.Tensor] = []
    for members in _buckets(optimizer):
        grads: list[Any] = [part.master.grad for part in members]
        for part, grad in zip(members, grads, strict=True):
            whole: Any = part.param.main_grad  # type: ignore[attr-defined]
            if grad.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                raise RuntimeError("optimizer: a gradient is a copy, which would never change again")
        for wanted, run in groupby(
            sorted(grads, key=torch.Tensor.storage_offset), lambda grad: grad.data_ptr() in counted
        ):
            first, *rest = run
            last = rest[-1] if rest else first
            if wanted:
                length = last.storage_offset() + last.numel() - first.storage_offset()
                pieces += first.as_strided((length,), (1,)).split(size)
    return pieces


def grad_norm(optimizer) -> torch.Tensor:
    """Norm of the whole gradient, each parameter counted once; stays on the device. Collective."""
    pieces = optimizer.terrella.pieces
    squares = torch.stack(torch._foreach_norm(pieces)).square().sum() if pieces else torch.zeros((), device=device())
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
    return squares.sqrt()


def update(optimizer, wrapped: list[Any], config: OptimizerConfig, lr: float) -> torch.Tensor:
    """One update. Returns the gradient norm before clipping; where it is not finite, nothing was changed.

    Gradients are divided and a step is skipped inside the update's kernel, so that the host never waits for the norm:
    ours on CUDA, torch's fused one on CPU. Another Adam (TransformerEngine's or apex's, where Megatron found it) is
    asked only once the norm is known.
    """
    norm = grad_norm(optimizer)
    divisor = (
        ((norm + 1e-6) / config.clip_grad).clamp(min=1.0)
        if config.clip_grad > 0
        else torch.where(norm.isfinite(), 1.0, norm)
    )
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
    torchs = all(isinstance(part.optimizer, torch.optim.AdamW) for part in parts(optimizer))
    if torchs and norm.is_cuda:
        _update_by_kernel(optimizer, norm, divisor)
        start_gather(wrapped)
        return norm
    if torchs:
        for part in parts(optimizer):
            part.optimizer.grad_scale, part.optimizer.found_inf = divisor, (~norm.isfinite()).float()
    elif math.isfinite(float(norm)):
        for part in parts(optimizer):
            if config.clip_grad > 0 and (grads := [p.grad for p in part.get_parameters() if p.grad is not None]):
                torch._foreach_div_(grads, divisor)
    else:
        return norm
    optimizer.step_with_ready_grads()
    if wrapped[0].ddp_config.overlap_param_gather:  # else Megatron has just gathered them
        start_gather(wrapped)
    return norm


def _update_by_kernel(optimizer, norm: torch.Tensor, divisor: torch.Tensor) -> None:
    from ...kernels.adam import adam_update

    lookup: Lookup = optimizer.terrella
    if lookup.groups is None:
        lookup.steps, lookup.groups = _kernel_groups(list(state_parts(optimizer)))
    lookup.steps.add_(norm.isfinite())
    for settings, members in lookup.groups:
        adam_update(members, divisor, **{key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")})


def _kernel_groups(found: list[StatePart]) -> tuple[torch.Tensor, list[Group]]:
    """The kernel's arguments, made where there are none yet, and the steps of all runs as one tensor."""
    groups: dict[int, Group] = {}
    for part in found:
        if not part.state:
            part.state["step"] = torch.zeros((), device=part.master.device)
            part.state.update({name: torch.zeros_like(part.master) for name in MOMENTS})
    steps = torch.stack([part.state["step"] for part in found]) if found else torch.zeros(0, device=device())
    for part, step in zip(found, steps.unbind(), strict=True):
        part.state["step"] = step
        run_N = part.param.data.view(-1)[part.start : part.end]
        copy_N = None if run_N.data_ptr() == part.master.data_ptr() else run_N  # fp32 weights are their own masters
        one = (part.master.data, part.master.grad, *(part.state[name] for name in MOMENTS), copy_N, step)
        groups.setdefault(id(part.group), (part.group, []))[1].append(one)
    return steps, list(groups.values())


@dataclass(frozen=True)
class StatePart:
    """The run [start, end) of a flattened parameter that this rank optimizes, with its fp32 tensors."""

    param: torch.nn.Parameter
    start: int
    end: int
    master: torch.Tensor
    state: dict[str, torch.Tensor]
    group: dict[str, Any]  # its settings: learning rate, decay


def _buckets(optimizer) -> Iterator[list[StatePart]]:
    """This rank's share of each bucket of a gradient buffer: a contiguous part of it, cut into parameters' runs."""
    for part in parts(optimizer):
        for buffers in part.gbuf_ranges:
            for buckets in buffers.values():
                for bucket in buckets:
                    found = []
                    for param, ranges in bucket["param_map"].items():
                        group, order = part.model_param_group_index_map[param]
                        settings = part.optimizer.param_groups[group]
                        master, run = settings["params"][order], ranges["param"]
                        found.append(
                            StatePart(param, run.start, run.end, master, part.optimizer.state[master], settings)
                        )
                    yield found


def state_parts(optimizer) -> Iterator[StatePart]:
    """Every run of every parameter that this rank optimizes."""
    for bucket in _buckets(optimizer):
        yield from bucket


def update_count(optimizer) -> int:
    """How many updates Adam has made (what its bias correction knows)."""
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in part.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def set_state(optimizer, part: StatePart, master: torch.Tensor, moments: dict[str, torch.Tensor], count: int) -> None:
    """Overwrite one run's master weights and moments; every run gets a step tensor of its own."""
    optimizer.terrella.groups = None
    part.master.data.copy_(master)
    if count == 0:
        part.state.clear()
        return
    owner = next(p for p in parts(optimizer) if part.param in p.model_param_group_index_map)
    for name in MOMENTS:
        part.state[name] = (
            moments[name].to(device=part.master.device, dtype=torch.float32).reshape(part.master.shape).clone()
        )
    if isinstance(owner.optimizer, torch.optim.AdamW):
        part.state["step"] = torch.tensor(float(count), dtype=torch.float32, device=part.master.device)
    else:
        for group in owner.optimizer.param_groups:
            group["step"] = count


def publish_masters(optimizer) -> None:
    """Copy the master weights of all data ranks into the model's parameters. Collective."""
    for part in parts(optimizer):
        part._copy_main_params_to_model_params()
        for chunk in part.model_chunks:
            chunk.start_param_sync(force_sync=True)


def refresh_masters(optimizer) -> None:
    """Take the model's parameters, just overwritten, as the new master weights and forget the moments."""
    optimizer.reload_model_params()
    optimizer.terrella.groups = None
    for part in parts(optimizer):
        part.optimizer.state.clear()
        for group in part.optimizer.param_groups:
            group.pop("step", None)


def full_gradients(optimizer, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's gradients after the data-parallel reduction, made whole again from the runs of all data ranks.
    Collective.
    """
    from megatron.core import parallel_state as state

    out = []
    runs = {id(p.param): (p.start, p.end) for p in state_parts(optimizer)}
    for param in parameters:
        start, end = runs.get(id(param), (0, 0))
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        whole[start:end] = param.main_grad.reshape(-1)[start:end]  # type: ignore[attr-defined]
        expert = not getattr(param, "allreduce", True)
        group = (
            state.get_expert_data_parallel_group()
            if expert
            else state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(whole, group=group)
        out.append(whole.view_as(param))
    return out
