"""Which Triton kernels one training pass of a model launches on a GPU, seen on a machine without one. Run by
test_launched.py.

CPU tensors say that they are CUDA's, and launches are counted instead of made, so all numbers are meaningless.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from triton.runtime import driver, jit

from terrella.core.config import ParallelConfig, PrecisionConfig
from terrella.core.layout import document_layout
from terrella.core.mcore import setup, shim
from terrella.models.gpt import build_gpt
from terrella.tests.kernels.compile_cases import Silent, Target
from terrella.tests.parallel.jobs import DENSE, TIED

counted: Counter[str] = Counter()


def count(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Silent:
    counted[f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"] += 1
    return Silent()


if __name__ == "__main__":
    shim.install()
    setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    setup.start_parallel(ParallelConfig(), 0)
    model = {"dense": DENSE, "norms": replace(TIED, tied=False)}[sys.argv[1]]
    (chunk,) = build_gpt(model)(ParallelConfig(), PrecisionConfig("fp32"), 0)
    driver.set_active(Target())  # type: ignore[arg-type]
    jit.JITFunction.run = count  # type: ignore[method-assign]
    torch.Tensor.is_cuda = torch.nn.Parameter.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    tokens = torch.arange(16)
    chunk(tokens, tokens % 8, document_layout([0, 8, 16])).sum().backward()
    print(json.dumps({"layers": model.layers, "launched": counted}))
