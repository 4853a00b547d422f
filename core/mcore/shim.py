"""megatron-core on CPU and gloo, for processes without CUDA.

megatron-core 0.16 calls torch.cuda directly in most training stages and has no switch for it. The worker entry point
installs this; nothing does so at import.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


class _CudaToCpu(TorchFunctionMode):
    """Redirects CUDA device arguments to the CPU, and lets `Tensor.type()` return the CUDA names that the optimizers
    compare with.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            with torch._C.DisableTorchFunction():
                return args[0].type().replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """Takes the place of a stream or an event: everything has already finished."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: Any) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _import_uncompiled() -> None:
    """Import megatron-core with its small fused functions as they are written: torch.compile, which decorates them,
    would need a C++ compiler here, and loading it is a third of what a process takes to start.
    """
    compiles = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment,misc]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiles
    jit.disable_jit_fuser()  # for its modules that are imported later


def install() -> None:
    """Make megatron-core run on CPU in this process; refused where CUDA is there, done once otherwise."""
    global _mode
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for processes without CUDA")
    if _mode is not None:
        return
    cuda = torch.cuda

    # torch._dynamo keeps one rule per function object, so every replacement must be a new object.
    def replacement(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **kwargs)

    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, replacement(lambda *a, **k: None))
    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(cuda, name, replacement(lambda *a, **k: 0))
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, replacement(lambda *a, **k: None))
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, replacement(lambda *a, **k: _Stream()))
    for module in (cuda, cuda.random):
        module.get_rng_state = replacement(lambda *a, **k: torch.get_rng_state())
        module.set_rng_state = replacement(lambda state, *a, **k: torch.set_rng_state(state))
    cuda.current_device = replacement(lambda: _CPU)
    cuda.manual_seed = replacement(lambda seed: torch.manual_seed(seed))
    cuda.stream = replacement(lambda *a, **k: contextlib.nullcontext())
    cuda.Stream, cuda.Event = _Stream, type("_Event", (_Stream,), {})  # type: ignore[assignment,misc]

    _import_uncompiled()
    import megatron.core.tensor_parallel.random as mcore_random

    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    # The tracker warns whenever the CPU generator moves inside a "CUDA" fork; here they are one generator.
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)
    _mode = _CudaToCpu()
    _mode.__enter__()
