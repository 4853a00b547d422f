"""Incremental decoding on the trainer's own weights: no copy, no sync. Plain tensor functions over a key/value cache.

Shapes: B rows, S new positions, C cache length, H hidden, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core.errors import ConfigError
from .config import ModelConfig
from .expert_decode import ExpertWeights, expert_weights, routed
from .rope import inverse_frequencies, rotate, rotation_table


@dataclass(frozen=True)
class LayerWeights:
    """References to one layer's parameters, under megatron-core's names."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    projection: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: tuple[torch.Tensor, torch.Tensor] | ExpertWeights  # fc1 and fc2


@dataclass(frozen=True)
class DecodeWeights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def decode_weights(named: Mapping[str, torch.Tensor], config: ModelConfig) -> DecodeWeights:
    """Gather references to a whole (unsharded) model's parameters by name."""
    if config.block != "llama":
        raise ConfigError(
            f"model.block: the embedded sampler has no layers of {config.block}; use sampler: {{kind: vllm}}"
        )
    layers = []
    for index in range(config.layers):
        p = f"decoder.layers.{index}."
        layers.append(
            LayerWeights(
                named[p + "input_layernorm.weight"],
                named[p + "self_attention.linear_qkv.weight"],
                named.get(p + "self_attention.linear_qkv.bias"),
                named[p + "self_attention.linear_proj.weight"],
                named.get(p + "self_attention.q_layernorm.weight"),
                named.get(p + "self_attention.k_layernorm.weight"),
                named[p + "pre_mlp_layernorm.weight"],
                expert_weights(named, p, config)
                if config.experts
                else (named[p + "mlp.linear_fc1.weight"], named[p + "mlp.linear_fc2.weight"]),
            )
        )
    embedding = named["embedding.word_embeddings.weight"]
    return DecodeWeights(
        embedding, tuple(layers), named["decoder.final_layernorm.weight"], named.get("output_layer.weight", embedding)
    )


class KVCache:
    """Keys and values of every layer, B rows of C positions."""

    def __init__(self, config: ModelConfig, rows: int, length: int, like: torch.Tensor) -> None:
        shape = (config.layers, rows, config.kv_heads, length, config.head_dim)
        self.k = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.v = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.chosen: list[torch.Tensor] = []  # experts (B x S, K) of each layer in the last pass

    def noted(self, rows: int) -> torch.Tensor:
        """The experts of the last pass: int16 [B, S, layers, experts of a token]."""
        chosen_TLK = torch.stack(self.chosen, 1).to(torch.int16)
        return chosen_TLK.view(rows, -1, *chosen_TLK.shape[1:])

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]


class Decoder:
    """The forward pass of a decoder-only model against a cache."""

    def __init__(self, weights: DecodeWeights, config: ModelConfig, max_length: int) -> None:
        self.weights, self.config = weights, config
        device = weights.embedding.device
        inverse_R, factor = inverse_frequencies(config)
        table_C2R = rotation_table(torch.arange(max_length, device=device), inverse_R.to(device), factor).to(
            weights.embedding.dtype
        )
        self.cos_C1R, self.sin_C1R = table_C2R[:, None, :].chunk(2, -1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    @torch.no_grad()
    def forward(self, ids_BS: torch.Tensor, cache: KVCache, start: int = 0) -> torch.Tensor:
        """Append S tokens to every row, all of which hold `start` positions, and return their hidden states after the
        final norm.
        """
        c, w = self.config, self.weights
        rows, new = ids_BS.shape
        end = start + new
        place = slice(start, end)
        cos, sin = self.cos_C1R[place], self.sin_C1R[place]
        mask = None
        if start and new > 1:
            position_C = torch.arange(end, device=ids_BS.device)
            mask = position_C[None, :] <= position_C[place, None]
        x = w.embedding[ids_BS]
        cache.chosen = []
        per_group = c.heads // c.kv_heads
        for index, layer in enumerate(w.layers):
            h = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
            h = h.view(rows, new, c.kv_heads, per_group + 2, c.head_dim)
            q = h[..., :per_group, :].reshape(rows, new, c.heads, c.head_dim)
            k, v = h[..., per_group, :], h[..., per_group + 1, :]
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            q = rotate(q, cos, sin, c.rotary_interleaved).transpose(1, 2)
            k = rotate(k, cos, sin, c.rotary_interleaved).transpose(1, 2)
            v = v.transpose(1, 2)
            cache.k[index][:, :, place], cache.v[index][:, :, place] = k, v
            if new == 1:  # a group's queries read its keys once
                q = q.reshape(rows, c.kv_heads, per_group, c.head_dim)
            o = F.scaled_dot_product_attention(
                q,
                cache.k[index][:, :, :end],
                cache.v[index][:, :, :end],
                attn_mask=mask,
                is_causal=mask is None and new > 1,
                scale=1.0 / math.sqrt(c.head_dim),
                enable_gqa=q.shape[1] != c.kv_heads,
            )
            o = o.reshape(rows, c.heads, new, c.head_dim)
            x = x + F.linear(o.transpose(1, 2).reshape(rows, new, c.heads * c.head_dim), layer.projection)
            normed = self._norm(x, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertWeights):
                x = x + routed(normed.flatten(0, 1), layer.mlp, c, cache.chosen).view_as(x)
                continue
            gate, up = F.linear(normed, layer.mlp[0]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.mlp[1])
        return self._norm(x, w.final_norm)
