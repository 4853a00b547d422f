"""One pass of microbatches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run(
    chunks: list[torch.nn.Module],
    items: list[Any],
    lengths: list[int],
    forward: Callable[[torch.nn.Module, Any], torch.Tensor],
    finish: Callable[[torch.nn.Module, torch.Tensor, Any], Any],
    *,
    train: bool,
) -> list[Any]:
    """Forward (and backward when `train`) over `items`; `lengths` are theirs, padded, before context slicing.

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
    config: Any = chunks[0].config
    ragged = _known_lengths(config, lengths) if config.pipeline_model_parallel_size > 1 and len(chunks) == 1 else {}
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(items),
        seq_length=max(lengths),
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
        **ragged,
    )


def _known_lengths(config: Any, lengths: list[int]) -> dict[str, Any]:
    """What a pipeline without interleaving needs for microbatches of different lengths. Every stage knows them all, so
    that no shapes are sent, as Megatron's `variable_seq_lengths` would, with a wait for the device each.
    """
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
    from megatron.core.process_groups_config import ProcessGroupCollection

    tensor, context = state.get_tensor_model_parallel_group(), state.get_context_parallel_group()
    options = {"micro_batch_size": 1, "decoder_seq_length": None, "config": config}
    shapes = [
        get_tensor_shapes(seq_length=length, tp_group=tensor, cp_group=context, **options)[0] for length in lengths
    ]

    class Communicator(P2PCommunicator):
        """Receives microbatches in their order, forwards and backwards alike."""

        forwards, backwards = iter(shapes), iter(shapes)

        def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **sent: Any) -> Any:
            if recv_prev and recv_next:
                raise RuntimeError("pipeline: a stage receives from both sides at once, which only interleaving does")
            if recv_prev or recv_next:
                tensor_shape = next(self.forwards if recv_prev else self.backwards)
            return super()._communicate(recv_prev=recv_prev, recv_next=recv_next, tensor_shape=tensor_shape, **sent)

    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = tensor, context, state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return {"p2p_communicator": Communicator(pp_group=groups.pp, config=config), "pg_collection": groups}
