"""The distributed optimizer, and its state by parameter.

Megatron 0.16 cannot load its own optimizer checkpoint when Adam is torch's: the fresh state is empty, 'step' is not among the loaded
tensors, and one shared step tensor is advanced once per parameter. So the state is read and written here, parameter by parameter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import OptimizerConfig, ParallelConfig, PrecisionConfig
from .setup import device
from .transformer import DTYPES

MOMENTS = ("exp_avg", "exp_avg_sq")


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
    config.finalize_model_grads_func = _finalize
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if parallel.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if parallel.overlap_param_gather:
        # Megatron waits in hooks on each module's forward, which a layer that uses a weight directly would pass by: we wait ourselves.
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
    return wrapped


def start_gather(wrapped: list[Any]) -> None:
    """Gather the updated parameters of all data ranks; in the background, until `finish_gather`, where the layout says so. Collective."""
    for chunk in wrapped:
        chunk.start_param_sync()


def finish_gather(wrapped: list[Any]) -> None:
    """Wait for the gathers that `start_gather` began."""
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)


def _finalize(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(chunks, None, **options)  # the weights of the loss already hold its normalisation


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
    return optimizer


def parts(optimizer) -> list:
    """The chained optimizers (dense, experts) that own parameters on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def grad_norm(optimizer) -> torch.Tensor:
    """Norm of the whole gradient, each parameter counted once; stays on the device. Collective."""
    grads = [grad for part in parts(optimizer) for grad in part.get_main_grads_for_grad_norm()]
    squares = torch.zeros((), device=device())
    if grads:
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
    return squares.sqrt()


def update(optimizer, wrapped: list[Any], config: OptimizerConfig, lr: float, kernel: Callable[..., None]) -> torch.Tensor:
    """One update. Returns the gradient norm before clipping; where it is not finite, nothing was changed.

    Gradients are divided and a step is skipped inside the update's kernel, so that the host never waits for the norm: ours on CUDA, torch's
    fused one on CPU. Another Adam (TransformerEngine's or apex's, where Megatron found it) is asked only once the norm is known.
    """
    optimizer.prepare_grads()
    norm = grad_norm(optimizer)
    divisor = ((norm + 1e-6) / config.clip_grad).clamp(min=1.0) if config.clip_grad > 0 else torch.where(norm.isfinite(), 1.0, norm)
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
    torchs = all(isinstance(part.optimizer, torch.optim.AdamW) for part in parts(optimizer))
    if torchs and norm.is_cuda:
        _update_by_kernel(optimizer, kernel, norm, divisor)
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


def _update_by_kernel(optimizer, kernel: Callable[..., None], norm: torch.Tensor, divisor: torch.Tensor) -> None:
    found = list(state_parts(optimizer))
    groups: dict[int, tuple[dict[str, Any], list[Any]]] = {}
    for part in found:
        if not part.state:
            part.state["step"] = torch.zeros((), device=part.master.device)
            part.state.update({name: torch.zeros_like(part.master) for name in MOMENTS})
        run_N = part.param.data.view(-1)[part.start : part.end]
        copy_N = None if run_N.data_ptr() == part.master.data_ptr() else run_N  # fp32 weights are their own masters
        one = (part.master.data, part.master.grad, *(part.state[name] for name in MOMENTS), copy_N, part.state["step"])
        groups.setdefault(id(part.group), (part.group, []))[1].append(one)
    torch._foreach_add_([part.state["step"] for part in found], norm.isfinite().float())
    for settings, members in groups.values():
        kernel(members, divisor, **{key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")})


@dataclass(frozen=True)
class StatePart:
    """The run [start, end) of a flattened parameter that this rank optimizes, with its fp32 tensors."""

    param: torch.nn.Parameter
    start: int
    end: int
    master: torch.Tensor
    state: dict[str, torch.Tensor]
    group: dict[str, Any]  # its settings: learning rate, decay


def state_parts(optimizer) -> Iterator[StatePart]:
    """Every run of every parameter that this rank optimizes."""
    for part in parts(optimizer):
        for buffers in part.gbuf_ranges:
            for buckets in buffers.values():
                for bucket in buckets:
                    for param, ranges in bucket["param_map"].items():
                        group, order = part.model_param_group_index_map[param]
                        settings = part.optimizer.param_groups[group]
                        master = settings["params"][order]
                        yield StatePart(param, ranges["param"].start, ranges["param"].end, master, part.optimizer.state[master], settings)


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
    part.master.data.copy_(master)
    if count == 0:
        part.state.clear()
        return
    owner = next(p for p in parts(optimizer) if part.param in p.model_param_group_index_map)
    for name in MOMENTS:
        part.state[name] = moments[name].to(device=part.master.device, dtype=torch.float32).reshape(part.master.shape).clone()
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
    for part in parts(optimizer):
        part.optimizer.state.clear()
        for group in part.optimizer.param_groups:
            group.pop("step", None)


def full_gradients(optimizer, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's gradients after the data-parallel reduction, made whole again from the runs of all data ranks. Collective."""
    from megatron.core import parallel_state as state

    out = []
    runs = {id(p.param): (p.start, p.end) for p in state_parts(optimizer)}
    for param in parameters:
        start, end = runs.get(id(param), (0, 0))
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        whole[start:end] = param.main_grad.reshape(-1)[start:end]  # type: ignore[attr-defined]
        expert = not getattr(param, "allreduce", True)
        group = state.get_expert_data_parallel_group() if expert else state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(whole, group=group)
        out.append(whole.view_as(param))
    return out
