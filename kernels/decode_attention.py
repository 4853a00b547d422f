"""Attention of new tokens against a key/value cache, and the rotary step that fills it.

The positions of a sequence lie in pages of the cache, [G, page, D] elements each, which a table names in order. Several
sequences may share a page, and sequences move between rows without moving their keys.

Shape suffixes: T new tokens, N sequences, X tiles of queries, R sequences of a tile, H query heads, G key heads, E = H
/ G + 2, D head dimension, P positions of the rotary table, C numbers of a row of it, or noted of a token.
"""

from __future__ import annotations

import torch

from .decode_cache import CacheLayer, Rows, Shared, Tiles
from .dispatch import use_triton


def _pages(flat: torch.Tensor, base: int, groups: int, page: int, dim: int) -> torch.Tensor:
    """A layer's keys or values as a view [page number, G, position in the page, D]."""
    count = (flat.numel() - base) // (groups * page * dim)
    return flat[base : base + count * groups * page * dim].view(count, groups, page, dim)


def reference_append(
    qkv_TGED: torch.Tensor,
    cache: CacheLayer,
    rows: Rows,
    table_PC: torch.Tensor,
    tiles: Tiles | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """Plain torch."""
    tokens, groups, slots, dim = qkv_TGED.shape
    wide = torch.float64 if qkv_TGED.dtype == torch.float64 else torch.float32
    row_T = torch.arange(tokens, device=qkv_TGED.device) if tiles is None else tiles.row_T
    place_T = rows.len_N[row_T] + (0 if tiles is None else tiles.offset_T)
    turned = qkv_TGED[:, :, : slots - 1]
    if norms is not None:
        weight_ED = torch.cat([norms[0].expand(slots - 2, dim), norms[1][None]]).to(wide)
        x = turned.to(wide)
        turned = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_ED).to(qkv_TGED.dtype)
    half = table_PC.shape[1] // 2
    cos, sin = table_PC[place_T].to(wide)[:, None, None].chunk(2, -1)
    x = turned.to(wide)
    rest = turned[..., 2 * half :]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    turned = torch.cat([rotated.to(qkv_TGED.dtype), rest], -1)
    base_k, base_v = cache.base_2.tolist()
    page_T, inside_T = rows.table_NP[row_T, place_T // rows.page].long(), place_T % rows.page
    _pages(cache.k, base_k, groups, rows.page, dim)[page_T, :, inside_T] = turned[:, :, slots - 2]
    _pages(cache.v, base_v, groups, rows.page, dim)[page_T, :, inside_T] = qkv_TGED[:, :, slots - 1]
    return turned[:, :, : slots - 2].reshape(tokens, groups * (slots - 2), dim)


def reference_attention(
    q_THD: torch.Tensor, cache: CacheLayer, rows: Rows, groups: int, scale: float, tiles: Tiles | None = None
) -> torch.Tensor:
    """Plain torch, a loop over tokens."""
    out_THD = torch.empty_like(q_THD)
    tokens, heads, dim = q_THD.shape
    base_k, base_v = cache.base_2.tolist()
    lengths = rows.len_N.tolist()
    row_T = list(range(tokens)) if tiles is None else tiles.row_T.tolist()
    offset_T = [0] * tokens if tiles is None else tiles.offset_T.tolist()
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    k_pages, v_pages = (
        _pages(flat, base, groups, rows.page, dim) for flat, base in ((cache.k, base_k), (cache.v, base_v))
    )
    for t, (row, offset) in enumerate(zip(row_T, offset_T, strict=True)):
        length = lengths[row] + offset + 1
        named = rows.table_NP[row, : -(-length // rows.page)].long()
        k_GKD, v_GKD = (
            x[named].transpose(0, 1).flatten(1, 2)[:, :length].contiguous().to(wide) for x in (k_pages, v_pages)
        )
        q_GED = q_THD[t].view(groups, heads // groups, dim).to(wide)
        p_GEK = torch.softmax(q_GED @ k_GKD.transpose(1, 2) * scale, -1)
        out_THD[t] = (p_GEK @ v_GKD).view(heads, dim).to(q_THD.dtype)
    return out_THD


def append_kv(
    qkv_TGED: torch.Tensor,
    cache: CacheLayer,
    rows: Rows,
    table_PC: torch.Tensor,
    *,
    tiles: Tiles | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> torch.Tensor:
    """Normalise (where asked) and rotate queries and keys, store keys and values behind what each sequence holds;
    returns queries THD.

    Without `tiles`, token t is the next one of sequence t. `len_N` is not changed.
    """
    if use_triton(qkv_TGED):
        from .triton.decode_attention import triton_append

        return triton_append(qkv_TGED, cache, rows, table_PC, tiles, norms, eps, interleaved)
    return reference_append(qkv_TGED, cache, rows, table_PC, tiles, norms, eps, interleaved)


def append_notes(
    x_TC: torch.Tensor, flat: torch.Tensor, base_1: torch.Tensor, rows: Rows, tiles: Tiles | None = None
) -> None:
    """Store C numbers for every token, which lie page by page as keys do, `base_1` elements behind the first of
    `flat`.
    """
    if use_triton(x_TC):
        from .triton.decode_attention import triton_append_notes

        return triton_append_notes(x_TC, flat, base_1, rows, tiles)
    row_T = torch.arange(len(x_TC), device=x_TC.device) if tiles is None else tiles.row_T
    place_T = rows.len_N[row_T] + (0 if tiles is None else tiles.offset_T)
    page_T = rows.table_NP[row_T, place_T // rows.page].long()
    notes = _pages(flat, int(base_1), 1, rows.page, x_TC.shape[1])
    notes[page_T, 0, place_T % rows.page] = x_TC


def cached_attention(
    q_THD: torch.Tensor,
    cache: CacheLayer,
    rows: Rows,
    kv_heads: int,
    *,
    scale: float,
    tiles: Tiles | None = None,
    shared: Shared | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Attention of tokens that `append_kv` has stored, each over its sequence up to itself.

    `shared` reads common pages once a tile of sequences; `splits` spreads the keys of one sequence over several
    programs. Both only change the speed; the first is for one token a sequence, and excludes the second.
    """
    if use_triton(q_THD):
        from .triton.decode_attention import triton_attention

        return triton_attention(q_THD, cache, rows, kv_heads, scale, tiles, shared, splits)
    return reference_attention(q_THD, cache, rows, kv_heads, scale, tiles)
