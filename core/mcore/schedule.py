"""One pass of microbatches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run(
    chunks: list[torch.nn.Module],
    items: list[Any],
    tokens: int,
    forward: Callable[[torch.nn.Module, Any], torch.Tensor],
    finish: Callable[[torch.nn.Module, torch.Tensor, Any], Any],
    *,
    train: bool,
) -> list[Any]:
    """Forward (and backward when `train`) over `items`; `tokens` is the padded length of each, before context slicing.

    `finish` runs on the last stage and returns (loss, record) when `train`, else what to collect. Only the last stage
    gets the list.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator, chunk):
        item = next(iterator)
        inner = chunk.module if hasattr(chunk, "ddp_config") else chunk

        def done(output: torch.Tensor, non_loss_data: bool = False):
            if not train:
                return finish(inner, output, item)
            loss, record = finish(inner, output, item)
            return loss, torch.ones((), dtype=torch.int, device=loss.device), record

        return forward(chunk, item), done

    iterators = [iter(items) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(items),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )
