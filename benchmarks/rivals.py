"""Other projects' kernels behind one shape of call, each at its best setting for the job. Absent ones are left out,
with the reason.

They are looked for in the folder that `terrella bench kernels --rivals` names, then on the path. The folder holds
unpacked wheels; of trl and verl only the kernels, as `trl_rival/kernels` (and `trl_rival/trainer/utils.py` with
`maybe_gather_lm_head_ctx`) and `verl_kernel`; flash-attn's `cross_entropy.py` as `flash_cross_entropy.py`; Unsloth's
`cross_entropy_loss.py` in `unsloth_rival/`; for Liger's CuTe path nvidia-cutlass-dsl.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Missing = dict[str, str]
WITH_ENTROPY = ("trl 1.16.0", "torch fp32", "torch.compile fp32")


def add_path(folder: Path | None) -> None:
    if folder is not None and folder.is_dir():
        sys.path[:0] = [str(folder.resolve()), str(folder.resolve() / "nvidia_cutlass_dsl" / "dsl_packages")]


def _load(name: str, module: str, missing: Missing):
    try:
        return importlib.import_module(module)
    except Exception as error:  # any failure of another project's import is a reason to report, not to stop
        missing[name] = f"{type(error).__name__}: {error}"[:200]
        return None


def logits_rivals(missing: Missing) -> dict[str, tuple[Callable, bool]]:
    """name -> (call(logits_NV, targets_N) -> (logprob, entropy or None), has gradient)."""
    found: dict[str, tuple[Callable, bool]] = {}
    if trl := _load("trl 1.16.0", "trl_rival.kernels.logprob_entropy", missing):
        found["trl 1.16.0"] = (lambda x, y: trl.selective_log_softmax_and_entropy(x[None], y[None]), True)
    if flash := _load("flash-attn 2.8.3 CE", "flash_cross_entropy", missing):
        found["flash-attn 2.8.3 CE"] = (
            lambda x, y: (-flash.cross_entropy_loss(x, y, inplace_backward=True)[0], None),
            True,
        )
    if grpo := _load("liger 0.8.5 selective", "liger_kernel.ops.grpo_loss", missing):

        def selective(x, y):
            # it wants [B, L + 1, V] and drops the last row
            return grpo.fused_selective_log_softmax(x[None], y[None, : len(y) - 1], 1.0), None

        found["liger 0.8.5 selective"] = (selective, False)
    if liger := _load("liger 0.8.5 CE", "liger_kernel.ops.cross_entropy", missing):

        def cross_entropy(x, y):
            return -liger.LigerCrossEntropyFunction.apply(x, y, None, -100, 0.0, 0.0, "none", None, False)[0], None

        found["liger 0.8.5 CE"] = (cross_entropy, True)
    if unsloth := _load("unsloth 2026.10.9 CE", "unsloth_rival.cross_entropy_loss", missing):
        found["unsloth 2026.10.9 CE"] = (lambda x, y: (-unsloth.Fast_CrossEntropyLoss.apply(x, y, 0, 0), None), True)
    if megatron := _load("megatron-core 0.16.1 fused CE", "megatron.core.fusions.fused_cross_entropy", missing):

        def vocab_parallel(x, y):
            return -megatron.fused_vocab_parallel_cross_entropy(x[:, None], y[:, None], one_rank())[:, 0], None

        found["megatron-core 0.16.1 fused CE"] = (vocab_parallel, True)
    found["torch fp32"] = (torch_logprob, True)
    return found


def one_rank() -> dist.ProcessGroup:
    """A process group of this process alone, for what insists on one."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/rendezvous", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def torch_logprob(x: torch.Tensor, y: torch.Tensor):
    """The plain way: fp32 log_softmax, gather, and the entropy from it."""
    logp = torch.log_softmax(x.float(), -1)
    return logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def linear_rivals(missing: Missing) -> dict[str, Callable]:
    """name -> call(hidden, weight, targets) -> (logprob, entropy or None), differentiable."""
    found: dict[str, Callable] = {}
    if trl := _load("trl 1.16.0 chunked", "trl_rival.kernels.chunked_logprob", missing):
        found["trl 1.16.0 chunked"] = lambda h, w, y: trl.ChunkedLogProbFunction.apply(
            h, w, None, y, 1.0, 32768, None, 1.0, ("entropy",)
        )[:2]
    if cce := _load("cut-cross-entropy 25.1.1", "cut_cross_entropy", missing):
        found["cut-cross-entropy 25.1.1"] = lambda h, w, y: (-cce.linear_cross_entropy(h, w, y, reduction="none"), None)
        found["cut-cross-entropy 25.1.1 unfiltered"] = lambda h, w, y: (
            -cce.linear_cross_entropy(h, w, y, reduction="none", filter_eps=None),
            None,
        )
    if flce := _load("liger 0.8.5 FLCE", "liger_kernel.ops.fused_linear_cross_entropy", missing):
        # a summed loss makes the gradients in the forward: its best case, though it cannot weigh tokens
        found["liger 0.8.5 FLCE (sum)"] = lambda h, w, y: (
            -flce.LigerFusedLinearCrossEntropyFunction.apply(h, w, y, None, None, -100, 0.0, 0.0, "sum")[0],
            None,
        )
    if verl := _load("verl 0.9.1", "verl_kernel.linear_cross_entropy", missing):
        found["verl 0.9.1"] = lambda h, w, y: verl.linear_cross_entropy(h, w, y, 1.0, "none", None)
    return found


def cute_rival(missing: Missing) -> dict[str, Callable]:
    """Liger's fused matmul in CuTe, as `linear_rivals`; apart from them, as it compiles for long and may leave the
    device unusable.
    """
    name, found = "liger 0.8.5 CuTe", {}
    if cute := _load(name, "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90", missing):

        def scaled(h, w, y):
            loss, entropy = cute.LigerFusedScaledCrossEntropySM90Function.apply(h, w, y, 1.0, -100, 1, True)
            return -loss, entropy

        found[name] = scaled
    return found


def norm_rivals(missing: Missing) -> dict[str, Callable]:
    """name -> call(x, residual, weight) -> (normalised, sum)."""
    found: dict[str, Callable] = {}
    if liger := _load("liger 0.8.5", "liger_kernel.ops.fused_add_rms_norm", missing):
        found["liger 0.8.5"] = lambda x, r, w: liger.LigerFusedAddRMSNormFunction.apply(
            x, r, w, 1e-6, 0.0, "llama", False
        )
    return found


def swiglu_rivals(missing: Missing) -> dict[str, Callable]:
    """name -> call(gate and up side by side)."""
    found: dict[str, Callable] = {}
    if liger := _load("liger 0.8.5", "liger_kernel.ops.swiglu", missing):
        found["liger 0.8.5"] = lambda x: liger.LigerSiLUMulFunction.apply(*(v.contiguous() for v in x.chunk(2, -1)))
    return found
