"""Decoding against a pool of keys and values, on the trainer's own weights: sequences of any length side by side, pages
shared.

Shape suffixes: T new tokens, B rows of one token each, H hidden, L layers, 2 keys and values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels import rmsnorm, rope, swiglu
from ..kernels.batch_invariant import is_batch_invariant
from ..kernels.copying import AHEAD
from ..kernels.decode_attention import append_kv, append_notes, cached_attention
from ..kernels.decode_cache import CacheLayer, Rows, Shared, Tiles
from .config import ModelConfig
from .decode import DecodeWeights
from .expert_decode import ExpertWeights, routed
from .rope import inverse_frequencies, rotate, rotation_table

Norms = tuple[torch.Tensor, torch.Tensor] | None


def token_bytes(config: ModelConfig, dtype: torch.dtype, notes: bool = False) -> int:
    """Keys and values of one position in all layers, and where they are noted its experts."""
    experts = config.layers * config.experts_per_token * torch.int16.itemsize if notes else 0
    return config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize + experts


def same_tensors(one: DecodeWeights, other: DecodeWeights) -> bool:
    """Whether two sets of weights are the same memory."""

    def places(weights: DecodeWeights) -> list[Any]:
        tensors: list[Any] = [weights.embedding, weights.final_norm, weights.head]
        for x in (x for layer in weights.layers for x in vars(layer).values()):
            tensors += x.tensors() if isinstance(x, ExpertWeights) else x if isinstance(x, tuple) else (x,)
        return [None if x is None else (x.data_ptr(), x.shape, x.dtype, x.device) for x in tensors]

    return places(one) == places(other)


class Pool:
    """Room for a number of pages in every layer. Which of them are in use is the host's knowledge alone
    (rl/rollout/prefix_tree.py). With `notes` a position also holds the experts that were chosen for it in every layer.
    """

    def __init__(self, config: ModelConfig, pages: int, page: int, like: torch.Tensor, notes: bool = False) -> None:
        shape = (pages, config.kv_heads * page * config.head_dim)
        # one tensor a layer: a hundred gigabytes in one piece rarely fit between a trainer's tensors
        self.layers = [
            tuple(torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
            for _ in range(config.layers)
        ]
        self.pages, self.page = pages, page
        each = config.layers * config.experts_per_token if notes else 0
        self.experts = torch.empty((pages, page, each), dtype=torch.int16, device=like.device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages."""
        for x in (self.experts, *(x for layer in self.layers for x in layer)):
            x[target] = x[source]


class PooledDecoder:
    """The forward pass against a pool. Every tensor a captured graph refers to is held here, the pool is not. With
    `notes` it writes down the experts that it chooses.
    """

    def __init__(self, weights: DecodeWeights, config: ModelConfig, notes: bool = False) -> None:
        self.weights, self.config, self.notes = weights, config, notes
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        inverse_R, factor = inverse_frequencies(config)
        # proposals may reach past the last token
        positions = torch.arange(config.max_positions + AHEAD, device=self.device)
        self.table_PC = rotation_table(positions, inverse_R.to(self.device), factor)
        self._anchor = torch.zeros(64, dtype=self.dtype, device=self.device)
        self._base_L2 = torch.zeros(config.layers, 2, dtype=torch.int64, device=self.device)
        self._caches: list[CacheLayer] = []
        self._notes = torch.zeros(64, dtype=torch.int16, device=self.device)  # as the anchor is for keys and values
        self._notes_base = torch.zeros(1, dtype=torch.int64, device=self.device)

    def attach(self, pool: Pool) -> None:
        """Use this pool from now on. On CUDA its addresses go into a tensor, so that graphs follow without being
        captured anew.
        """
        if self.device.type != "cuda":
            self._caches = [
                CacheLayer(k.view(-1), v.view(-1), base)
                for (k, v), base in zip(pool.layers, self._base_L2, strict=True)
            ]
            self._notes = pool.experts.view(-1)
            return
        size, origin = self._anchor.element_size(), self._anchor.data_ptr()
        offsets = [[(x.data_ptr() - origin) // size for x in layer] for layer in pool.layers]
        self._base_L2.copy_(torch.tensor(offsets, dtype=torch.int64))
        self._notes_base.fill_((pool.experts.data_ptr() - self._notes.data_ptr()) // self._notes.element_size())
        self._caches = [CacheLayer(self._anchor, self._anchor, base) for base in self._base_L2]

    @torch.no_grad()
    def hidden(
        self,
        ids_T: torch.Tensor,
        rows: Rows,
        shared: Shared | None = None,
        splits: int = 1,
        tiles: Tiles | None = None,
    ) -> torch.Tensor:
        """Store one token a row, or several as `tiles` says, and return their hidden states after the final norm."""
        rows, tiles = self._each(rows, tiles)
        delta_TH, x_TH = self._layers(ids_T, rows, tiles, shared, splits, len(self.weights.layers))
        return self._add_norm(delta_TH, x_TH, self.weights.final_norm)[0]

    @torch.no_grad()
    def extend(self, ids_T: torch.Tensor, rows: Rows, tiles: Tiles) -> None:
        """Store several given tokens a row. The last layer only stores: nobody reads what it would compute."""
        last = len(self.weights.layers) - 1
        rows, each = self._each(rows, tiles)
        delta_TH, x_TH = self._layers(ids_T, rows, each, None, 1, last)
        self._store(last, self._add_norm(delta_TH, x_TH, self.weights.layers[last].attention_norm)[0], rows, each)

    @staticmethod
    def _each(rows: Rows, tiles: Tiles | None) -> tuple[Rows, Tiles | None]:
        """In batch-invariant mode every token is a row of its own."""
        if tiles is None or not is_batch_invariant():
            return rows, tiles
        return Rows(rows.table_NP[tiles.row_T], rows.len_N[tiles.row_T] + tiles.offset_T, rows.page), None

    def _add_norm(
        self, delta_TH: torch.Tensor | None, x_TH: torch.Tensor, weight_H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + delta, x + delta)."""
        if delta_TH is None:
            return rmsnorm(x_TH, weight_H, eps=self.config.norm_eps)
        return rmsnorm(delta_TH, weight_H, x_TH, eps=self.config.norm_eps)

    def _store(self, index: int, normed_TH: torch.Tensor, rows: Rows, tiles: Tiles | None) -> torch.Tensor:
        """Project, rotate and store keys and values; returns the queries."""
        c, layer, cache = self.config, self.weights.layers[index], self._caches[index]
        shape = (len(normed_TH), c.kv_heads, c.heads // c.kv_heads + 2, c.head_dim)
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        if is_batch_invariant():
            qkv = self._as_trained(F.linear(normed_TH, layer.qkv), layer.qkv_bias, norms, rows, shape)
            return append_kv(qkv, cache, rows, self.table_PC[:, :0])
        qkv = F.linear(normed_TH, layer.qkv, layer.qkv_bias).view(shape)
        return append_kv(
            qkv, cache, rows, self.table_PC, tiles=tiles, norms=norms, eps=c.norm_eps, interleaved=c.rotary_interleaved
        )

    def _as_trained(
        self, qkv: torch.Tensor, bias: torch.Tensor | None, norms: Norms, rows: Rows, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Queries and keys made by the training forward's own operations, in its order."""
        c = self.config
        qkv = (qkv if bias is None else qkv + bias).view(shape)
        q, k = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2]
        if norms is not None:
            q, k = (rmsnorm(x.contiguous(), weight, eps=c.norm_eps)[0] for x, weight in zip((q, k), norms, strict=True))
        positions = rows.len_N
        if q.is_cuda and not c.rotary_interleaved:
            q, k = (rope(x, self.table_PC, positions) for x in (q, k))
        else:
            cos, sin = self.table_PC[positions].to(q.dtype)[:, None, :].chunk(2, -1)
            q, k = (rotate(x, cos, sin, c.rotary_interleaved) for x in (q, k))
        return torch.cat([q.view(shape[0], shape[1], -1, shape[3]), k[:, :, None], qkv[:, :, -1:]], 2)

    def _layers(
        self, ids_T: torch.Tensor, rows: Rows, tiles: Tiles | None, shared: Shared | None, splits: int, count: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(what the last of `count` layers adds, what it adds to)."""
        c = self.config
        x_TH = self.weights.embedding[ids_T]
        delta_TH: torch.Tensor | None = None
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(self.weights.layers[:count]):
            normed_TH, x_TH = self._add_norm(delta_TH, x_TH, layer.attention_norm)
            q_THD = self._store(index, normed_TH, rows, tiles)
            o_THD = cached_attention(
                q_THD,
                self._caches[index],
                rows,
                c.kv_heads,
                scale=1.0 / math.sqrt(c.head_dim),
                tiles=tiles,
                shared=shared,
                splits=splits,
            )
            delta_TH = F.linear(o_THD.flatten(1), layer.projection)
            normed_TH, x_TH = self._add_norm(delta_TH, x_TH, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertWeights):
                delta_TH = routed(normed_TH, layer.mlp, c, chosen)
            else:
                delta_TH = F.linear(swiglu(F.linear(normed_TH, layer.mlp[0])), layer.mlp[1])
        if self.notes:
            self._note(chosen, len(ids_T), rows, tiles)
        return delta_TH, x_TH

    def _note(self, chosen: list[torch.Tensor], tokens: int, rows: Rows, tiles: Tiles | None) -> None:
        """Write down which experts every layer chose; a layer that only stored chose none."""
        c = self.config
        none_TK = torch.full((tokens, c.experts_per_token), -1, dtype=torch.int16, device=self.device)
        layers = [x_TK.to(torch.int16) for x_TK in chosen] + [none_TK] * (c.layers - len(chosen))
        append_notes(torch.cat(layers, 1), self._notes, self._notes_base, rows, tiles)
