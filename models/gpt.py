"""The decoder on megatron-core. Its forward returns hidden states after the final norm; the head is applied inside the
loss kernel.

Shape suffixes: T local tokens, H hidden, V rows of this rank's head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ..core.config import ParallelConfig, PrecisionConfig
from ..core.errors import ConfigError
from ..core.layout import DocumentLayout
from ..core.mcore.params import mark_halves, named_parameters
from ..core.mcore.transformer import transformer_config
from ..kernels import Scaled
from . import te
from .config import ModelConfig
from .cuda_graphs import GraphedBlock
from .fp8 import LayerWeights, Weight, check_fp8
from .heads import ValueHead, make_head
from .layers import PackedInput, block_spec, layer_spec
from .lora import LoraConfig, attach, initial_adapter, is_added
from .replay import balance_of, local_experts
from .rope import inverse_frequencies, rotation_table


class GPT(GPTModel):
    """One pipeline chunk of a decoder."""

    inverse_R: torch.Tensor
    local_inverse_R: torch.Tensor | None

    def __init__(self, model: ModelConfig, config: Any, layer: Any, chunk: int | None, value_head: ValueHead) -> None:
        super().__init__(
            config,
            block_spec(layer, get_num_layers_to_build(config, chunk)),  # type: ignore[arg-type]
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
        self.routes = model.experts > 0
        self.layer_offset = get_transformer_layer_offset(config, chunk)
        inverse_R, self.rotary_factor = inverse_frequencies(model)
        self.register_buffer("inverse_R", inverse_R, persistent=False)
        local = replace(model, rope_theta=model.local_rope_theta, rope_scaling=None) if model.sliding_window else None
        self.register_buffer("local_inverse_R", inverse_frequencies(local)[0] if local else None, persistent=False)
        self.graphs: GraphedBlock | None = None
        self.low_head: Weight | None = None  # where its products are in fp8
        self.value_head = make_head(value_head, model.hidden, config.params_dtype) if self.post_process else None
        if self.value_head is not None and not model.tied:
            # a critic does not use the head: overlapped reductions would wait for its gradient for ever
            for param in self.output_layer.parameters():
                param.requires_grad_(False)
        for name, param in self.named_parameters():
            if name.endswith("linear_fc1.weight"):
                mark_halves(param)

    def forward(  # type: ignore[override]
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        layout: DocumentLayout,
        experts_TLK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (T, 1, H); T is further divided by the tensor ranks under sequence parallelism. Tokens go to
        `experts_TLK` where they are given.
        """
        hidden = self.embedding(input_ids=tokens_T[None], position_ids=None) if self.pre_process else None
        if hidden is not None and self.model.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.model.embedding_scale, dtype=hidden.dtype, device=hidden.device)
        packed = self.packed_input(positions_T, layout)
        if experts_TLK is not None:
            packed = replace(packed, experts_TLK=local_experts(experts_TLK, self.config))
            if any(getattr(layer, "replay", None) is None for layer in self.decoder.layers):
                raise ConfigError("rollouts.replay_routing: needs our layers; set precision.layers: ours, or false")
        if layout.balance_D is not None:
            packed = replace(packed, balance=balance_of(layout, self.config))
            if any(getattr(layer, "replay", None) is None for layer in self.decoder.layers):
                raise ConfigError("optimizer.balance: needs our layers; set precision.layers: ours, or it to 0")
        if self.graphs is not None and hidden is not None and self.training and torch.is_grad_enabled():
            return self.graphs(hidden, packed)
        return self._layers(hidden, packed)

    def _layers(self, hidden: torch.Tensor | None, packed: PackedInput) -> torch.Tensor:
        return self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=packed)

    def take_routing(self) -> torch.Tensor | None:
        """Since the last call: choices of experts that were given, and how many of them routers would not have made."""
        counted = [layer.replay for layer in self._own_layers() if getattr(layer, "replay", None) is not None]
        counts = [replay.counts_2 for replay in counted if replay.counts_2 is not None]
        for replay in counted:
            replay.counts_2 = None
        return torch.stack(counts).sum(0) if counts else None

    def take_balance(self) -> torch.Tensor:
        """The experts' balancing loss since the last call, over the tokens that this rank's routers saw."""
        counted = [layer.replay for layer in self._own_layers()]
        losses = [replay.loss for replay in counted if replay.loss is not None]
        for replay in counted:
            replay.loss = None
        return sum(losses, start=torch.zeros((), dtype=torch.float64, device=self.inverse_R.device))

    def use_graphs(self) -> None:
        """Run the layers of training passes as CUDA graphs; the weights must have their gradient buffers by the
        first of them.
        """
        self.graphs = GraphedBlock(self._layers, self.decoder)
        weights: list[Any] = list(self.decoder.parameters())
        for weight in weights:
            weight.graphed = True  # see `is_zero`

    def _own_layers(self) -> list[Any]:
        return list(self.decoder.layers)

    def use_fp8(self, precision: PrecisionConfig) -> None:
        """Compute the matrix products of dense layers, and of the head where asked for, in fp8; `cast_weights` must
        follow every change of weights.
        """
        for layer in self._own_layers():
            place = layer.layer_number - 1
            if precision.fp8_skip <= place < self.model.layers - precision.fp8_skip:
                layer.low = LayerWeights(precision.fp8_products)
        if precision.fp8_head and self.post_process:
            self.low_head = Weight("forward")

    def cast_weights(self) -> None:
        """Bring the fp8 copies up to date."""
        for layer in self._own_layers():
            layer.cast_weights()
        if self.low_head is not None:
            self.low_head.cast(self._head_weight())

    def drop_casts(self) -> None:
        """Free the fp8 copies."""
        for layer in self._own_layers():
            if layer.low is not None:
                layer.low.drop()
        if self.low_head is not None:
            self.low_head.drop()

    def head_copy(self) -> Scaled | None:
        """What the loss multiplies by where the head's products are in fp8."""
        return None if self.low_head is None else self.low_head.by_rows()

    def _head_weight(self) -> Any:
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )

    def packed_input(self, positions_T: torch.Tensor, layout: DocumentLayout) -> PackedInput:
        """The input that all layers share: layout and rotations of the batch."""
        table_T2R = rotation_table(positions_T, self.inverse_R, self.rotary_factor)
        local = self.local_inverse_R
        return PackedInput(
            layout,
            table_T2R,
            torch.arange(len(positions_T), device=positions_T.device),
            self.model.rotary_interleaved,
            None if local is None else rotation_table(positions_T, local, 1.0),
        )

    def readout(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states (T, H) of all tensor ranks, this rank's rows (V, H) of the head, and values (T) where there is
        a value head.

        The gradient given to the hidden states must be complete on every tensor rank.
        """
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden_TH = hidden.squeeze(1)
        return hidden_TH, self._head_weight(), self.value_head(hidden_TH) if self.value_head is not None else None


@dataclass(frozen=True)
class GPTBuilder:
    """Builds a decoder's chunks for the layout the process runs; what `Engine` is given."""

    model: ModelConfig
    value_head: ValueHead = "none"
    lora: LoraConfig | None = None
    loaded: bool = False  # the public model's weights come from elsewhere: only what is ours beyond it is drawn

    def _use_te(self, precision: PrecisionConfig) -> bool:
        if precision.layers == "ours":
            return False
        if not te.available():
            raise ConfigError("precision.layers: 'te' needs TransformerEngine and a GPU")
        if self.model.block != "llama":
            raise ConfigError(f"precision.layers: 'te' has no layers of model.block: {self.model.block}; use ours")
        if self.lora is not None:
            raise ConfigError("precision.layers: 'te' cannot be combined with adapters (lora); use ours")
        return True

    @property
    def width(self) -> int:
        return self.model.hidden

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must remember to build the same model again."""
        return {
            "model": self.model.to_dict(),
            "value_head": self.value_head,
            "lora": self.lora.to_dict() if self.lora else None,
        }

    def __call__(self, parallel: ParallelConfig, precision: PrecisionConfig, seed: int) -> list[torch.nn.Module]:
        m = self.model
        config = transformer_config(parallel, precision, m)
        use_te = self._use_te(precision)
        if parallel.cuda_graphs and (use_te or m.experts or m.block != "llama" or precision.params != "bf16"):
            raise ConfigError(
                "parallel.cuda_graphs: needs our layers (precision.layers: ours) without experts, model.block: llama "
                "and precision.params: bf16"
            )
        if precision.own_fp8:
            check_fp8(m, parallel.tensor, self.lora is not None, precision)
        layer = te.te_layer_spec(config) if use_te else layer_spec(config)
        chunks = parallel.virtual_pipeline
        built: list[Any] = [GPT(m, config, layer, i if chunks > 1 else None, self.value_head) for i in range(chunks)]
        if self.lora is not None:
            for chunk in built:
                attach(chunk, self.lora, parallel.sequence_parallel)
        if precision.own_fp8:
            for chunk in built:
                chunk.use_fp8(precision)
        if parallel.cuda_graphs and torch.cuda.is_available():
            for chunk in built:
                chunk.use_graphs()
        for p in named_parameters(built):
            with torch.no_grad():
                if self.loaded and not is_added(p.name):
                    p.param.fill_(torch.nan)  # what is not loaded must not pass for a weight
                    continue
                p.param.copy_(p.shard.cut(initial_weight(p.name, p.shard.full_shape(p.param.shape), seed, m.init_std)))
                if m.block == "gemma" and "norm" in p.name.split(".")[-2]:
                    p.param.zero_()  # around zero
        return built


def build_gpt(
    model: ModelConfig, *, value_head: ValueHead = "none", lora: LoraConfig | None = None, loaded: bool = False
) -> GPTBuilder:
    """The builder of a decoder, with a value head or adapters where asked for. With `loaded` weights are not drawn:
    the caller overwrites all but those.
    """
    return GPTBuilder(model, value_head, lora, loaded)


def initial_weight(name: str, shape: tuple[int, ...], seed: int, std: float) -> torch.Tensor:
    """A full initial tensor that depends on the seed and the global name only, never on the layout."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(key)
    if ".lora." in name:
        return initial_adapter(name, shape, generator)
    if name.startswith("value_head.heads."):  # WebRL's: wide square layers, an ordinary last one
        std = 0.2 if shape[0] == shape[1] else shape[1] ** -0.5
    return torch.empty(shape).normal_(0.0, std, generator=generator)
