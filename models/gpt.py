"""The decoder over megatron-core. Its forward gives hidden states after the final norm; the head is applied inside the loss kernel.

Shape suffixes: T local tokens, H hidden, V rows of this rank's head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ..core.config import ParallelConfig, PrecisionConfig
from ..core.layout import DocumentLayout
from ..core.mcore.params import mark_halves, named_parameters
from ..core.mcore.transformer import transformer_config
from .config import ModelConfig
from .layers import PackedInput, block_spec
from .rope import inverse_frequencies, rotation_tables


class GPT(GPTModel):
    """One pipeline chunk of a decoder."""

    def __init__(self, model: ModelConfig, config: Any, chunk: int | None) -> None:
        super().__init__(
            config,
            block_spec(config, get_num_layers_to_build(config, chunk)),
            vocab_size=model.padded_vocab,
            max_sequence_length=model.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="none",
            vp_stage=chunk,
        )
        self.model = model
        self.vocab = model.vocab
        self.layer_offset = get_transformer_layer_offset(config, chunk)
        inverse_R, self.rotary_factor = inverse_frequencies(model)
        self.register_buffer("inverse_R", inverse_R, persistent=False)
        for name, param in self.named_parameters():
            if name.endswith("linear_fc1.weight"):
                mark_halves(param)

    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:  # type: ignore[override]
        """Hidden states (T, 1, H); T is further divided by the tensor ranks under sequence parallelism."""
        hidden = self.embedding(input_ids=tokens_T[None], position_ids=None) if self.pre_process else None
        cos, sin = rotation_tables(positions_T, self.inverse_R, self.rotary_factor, self.config.params_dtype)
        packed = PackedInput(layout, cos, sin, self.model.rotary_interleaved)
        return self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=packed)

    def readout(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states (T, H) of all tensor ranks, this rank's rows (V, H) of the head, and values (T) where there is a value head.

        The gradient given to the hidden states must be complete on every tensor rank.
        """
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight_VH = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        return hidden.squeeze(1), weight_VH, None


@dataclass(frozen=True)
class GPTBuilder:
    """Builds a decoder's chunks for the layout the process runs; what `Engine` is given."""

    model: ModelConfig

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must remember to build the same model again."""
        return {"model": self.model.to_dict()}

    def __call__(self, parallel: ParallelConfig, precision: PrecisionConfig, seed: int) -> list[torch.nn.Module]:
        m = self.model
        config = transformer_config(
            parallel,
            precision,
            layers=m.layers,
            hidden=m.hidden,
            heads=m.heads,
            kv_heads=m.kv_heads,
            head_dim=m.head_dim,
            ffn=m.ffn,
            vocab=m.padded_vocab,
            norm_eps=m.norm_eps,
            qkv_bias=m.qkv_bias,
            qk_norm=m.qk_norm,
            experts=m.experts,
            experts_per_token=m.experts_per_token,
            expert_ffn=m.expert_ffn,
            expert_weights_sum_to_one=m.expert_weights_sum_to_one,
        )
        chunks = parallel.virtual_pipeline
        built: list[torch.nn.Module] = [GPT(m, config, i if chunks > 1 else None) for i in range(chunks)]
        for p in named_parameters(built):
            with torch.no_grad():
                p.param.copy_(p.shard.cut(initial_weight(p.name, p.shard.full_shape(p.param.shape), seed, m.init_std)))
        return built


def build_gpt(model: ModelConfig) -> GPTBuilder:
    """The builder of a decoder."""
    return GPTBuilder(model)


def initial_weight(name: str, shape: tuple[int, ...], seed: int, std: float) -> torch.Tensor:
    """A full initial tensor that depends on the seed and the global name only, never on the layout."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(key))
