"""Cached attention, its rotary step and sampling against fp64 and the plain references. Collected by test_decode.py."""

import pytest
import torch

from terrella.kernels.batch_invariant import batch_invariant, matmul
from terrella.kernels.copying import LONGEST, SURE, propose
from terrella.kernels.decode_attention import (
    append_kv,
    append_notes,
    cached_attention,
    reference_append,
    reference_attention,
)
from terrella.kernels.decode_cache import CacheLayer, Rows, Shared, Tiles
from terrella.kernels.dispatch import interpreting
from terrella.kernels.rope import rope_table
from terrella.kernels.sample import reference_sample, sample_tokens

CUDA = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
HEADS = [(12, 2, 128), (12, 12, 64), (4, 2, 80)] if CUDA else [(6, 2, 16), (2, 2, 64), (4, 2, 80)]
OPTIONS = ["plain", "norm", "interleaved", "partial"]
MIXED = [(*h, o) for h in HEADS for o in OPTIONS] if CUDA else [(*HEADS[i % 3], o) for i, o in enumerate(OPTIONS)]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = DTYPE) -> None:
    assert not torch.isnan(got).any()
    error = (got.double().cpu() - want.double().cpu()).norm() / want.double().norm().clamp_min(1e-30).cpu()
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-6), f"off by {error:.2e}"


def make(heads: int, groups: int, dim: int, lengths: list[tuple[int, int, int]], new: list[int], page: int = 16):
    """A cache with (prefix number, prefix length, own length) for every sequence, in shuffled pages; float64 on the
    CPU.

    Sequences of one prefix share its whole pages.
    """
    draw = torch.Generator().manual_seed(0)
    needed = [-(-(shared + own + n) // page) for (_, shared, own), n in zip(lengths, new, strict=True)]
    order = iter((torch.randperm(1 + sum(needed), generator=draw)).tolist())
    # what is not in use must not be read
    table = torch.full((len(lengths), max(needed) + 2), -(10**6), dtype=torch.int32)
    prefixes: dict[int, list[int]] = {}
    for row, (number, shared, _) in enumerate(lengths):
        pages = prefixes.setdefault(number, [next(order) for _ in range(shared // page)])
        table[row, : needed[row]] = torch.tensor(pages + [next(order) for _ in range(needed[row] - len(pages))])
    size = 16 + (1 + sum(needed)) * groups * page * dim
    k, v = (torch.randn(size, generator=draw, dtype=torch.float64).bfloat16().double() for _ in range(2))
    rows = Rows(table, torch.tensor([shared + own for _, shared, own in lengths]), page)
    qkv = (
        torch.randn(sum(new), groups, heads // groups + 2, dim, generator=draw, dtype=torch.float64).bfloat16().double()
    )
    return CacheLayer(k, v, torch.tensor([8, 16])), rows, qkv


def place(cache: CacheLayer, rows: Rows, dtype: torch.dtype = DTYPE) -> tuple[CacheLayer, Rows]:
    cache = CacheLayer(cache.k.to(DEVICE, dtype), cache.v.to(DEVICE, dtype), cache.base_2.to(DEVICE))
    return cache, Rows(rows.table_NP.to(DEVICE), rows.len_N.to(DEVICE), rows.page)


def tiles_of(new: list[int], most: int, device: str) -> Tiles:
    tile, first = [], 0
    for row, count in enumerate(new):
        tile += [(row, first + i, i, min(most, count - i)) for i in range(0, count, most)]
        first += count
    row_T = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    offset_T = torch.cat([torch.arange(n) for n in new])
    return Tiles(torch.tensor(tile, dtype=torch.int32, device=device), row_T.to(device), offset_T.to(device), most)


LENGTHS = [(0, 130, 5), (0, 130, 70), (1, 0, 0), (2, 64, 63), (3, 7, 64), (0, 130, 0), (2, 64, 200)]
if interpreting():
    LENGTHS = [(0, 70, 5), (0, 70, 40), (1, 0, 0), (2, 32, 31), (3, 7, 33), (0, 70, 0), (2, 32, 60)]


@pytest.mark.parametrize("page", [16, 64])  # several pages and a part of one for each block of keys
@pytest.mark.parametrize("heads,groups,dim,options", MIXED)
def test_append_and_attention_of_one_token(heads, groups, dim, options, page) -> None:
    cache, rows, qkv = make(heads, groups, dim, LENGTHS, [1] * len(LENGTHS), page)
    rotated = dim // 2 if options == "partial" else dim
    table = rope_table(512, rotated)
    norms = tuple(1 + torch.randn(dim).bfloat16().double() * 0.1 for _ in range(2)) if options == "norm" else None
    mine, my_rows = place(cache, rows)
    my_norms = None if norms is None else tuple(n.to(DEVICE, DTYPE) for n in norms)
    interleaved = options == "interleaved"
    q = append_kv(qkv.to(DEVICE, DTYPE), mine, my_rows, table.to(DEVICE), norms=my_norms, interleaved=interleaved)
    want_q = reference_append(qkv, cache, rows, table.double(), None, norms, 1e-6, interleaved)
    close(q, want_q)
    close(mine.k, cache.k)
    close(mine.v, cache.v)
    want = reference_attention(want_q, cache, rows, groups, dim**-0.5)
    done = [LENGTHS[row][1] // page * page for row in range(len(LENGTHS))]
    tiles = [[0, 1, 5], [3, 6, -1], [-1, -1, -1]]
    alone = torch.tensor([0 if row in (2, 4) else n for row, n in enumerate(done)], device=DEVICE)
    shared = Shared(torch.tensor(tiles, dtype=torch.int32, device=DEVICE), alone)
    for how in ({}, {"splits": 3}, {"shared": shared}):
        close(cached_attention(q, mine, my_rows, groups, scale=dim**-0.5, **how), want)


@pytest.mark.parametrize("heads,groups,dim", HEADS)
def test_many_tokens_a_sequence(heads, groups, dim) -> None:
    new = [1, 13, 70, 64, 5, 2, 3] if CUDA else [1, 13, 10, 3, 2, 1, 3]
    cache, rows, qkv = make(heads, groups, dim, LENGTHS, new, 64)
    table, most = rope_table(512, dim), 8
    mine, my_rows = place(cache, rows)
    tiles = tiles_of(new, most, DEVICE)
    q = append_kv(qkv.to(DEVICE, DTYPE), mine, my_rows, table.to(DEVICE), tiles=tiles)
    plain = tiles_of(new, most, "cpu")
    want_q = reference_append(qkv, cache, rows, table.double(), plain, None, 1e-6, False)
    close(mine.k, cache.k)
    want = reference_attention(want_q, cache, rows, groups, dim**-0.5, plain)
    for splits in (1, 3):
        close(cached_attention(q, mine, my_rows, groups, scale=dim**-0.5, tiles=tiles, splits=splits), want)


@pytest.mark.parametrize("new", [None, [3, 1, 6]])
@pytest.mark.parametrize("width", [1, 12, 384])
def test_notes_lie_beside_the_keys(new, width) -> None:
    page, base = 4, 5
    lengths, table = torch.tensor([0, 7, 3]), torch.tensor([[3, 1, 0], [2, 5, 4], [6, 7, 8]], dtype=torch.int32)
    tokens = sum(new) if new else 3
    x = torch.arange(tokens * width, dtype=torch.int16).view(tokens, width)
    flat = torch.full((base + 9 * page * width,), -1, dtype=torch.int16, device=DEVICE)
    tiles = tiles_of(new, 2, DEVICE) if new else None
    rows = Rows(table.to(DEVICE), lengths.to(DEVICE), page)
    append_notes(x.to(DEVICE), flat, torch.tensor([base], device=DEVICE), rows, tiles)
    want, t = torch.full((9, page, width), -1, dtype=torch.int16), 0
    for row, count in enumerate(new or [1, 1, 1]):
        for place in range(int(lengths[row]), int(lengths[row]) + count):
            want[int(table[row, place // page]), place % page], t = x[t], t + 1
    assert torch.equal(flat[base:].view(9, page, width).cpu(), want) and (flat[:base] == -1).all()


@pytest.mark.parametrize("room", [40, 2500] if CUDA else [40, 1100])  # one block of a row, and several
@pytest.mark.parametrize("ahead", [1, 7, 15])
def test_proposals(room, ahead) -> None:
    """Against a plain search, on texts that repeat themselves often."""
    draw, rows = torch.Generator().manual_seed(room), 40 if CUDA else 12
    text = torch.randint(0, 3, (rows, room), generator=draw, dtype=torch.int32)
    text[rows // 2 :, room // 2 :] = text[rows // 2 :, : room - room // 2]  # long matches far away
    length = torch.randint(0, room - ahead, (rows,), generator=draw)
    length[0], length[1] = 0, 1
    text[2, : length[2]] = 7  # an end that was never seen
    source = torch.randint(0, room, (rows,), generator=draw)
    found, at = propose(text.to(DEVICE), length.to(DEVICE), source.to(DEVICE), ahead)
    for row in range(rows):
        ids, n, begin = text[row].tolist(), int(length[row]), int(source[row])
        scores = []
        for j in range(n):
            back = 0
            while back < min(LONGEST, j + 1) and ids[j - back] == ids[n - back]:
                back += 1
            scores.append((back, j))
        best, place = max(scores, default=(0, -1))
        if best < SURE and begin < n:
            place = begin
        assert int(at[row]) == place
        assert found[row].tolist() == [ids[n], *(ids[place + 1 + i % (n - place)] for i in range(ahead))]


def test_a_row_does_not_depend_on_its_neighbours_nor_on_its_pages() -> None:
    """The same bits alone, in a batch, and with the same keys in pages of another size."""
    cache, rows, qkv = make(6, 2, 64, LENGTHS, [1] * len(LENGTHS))
    mine, my_rows = place(cache, rows)
    table = rope_table(512, 64).to(DEVICE)
    q = append_kv(qkv.to(DEVICE, DTYPE), mine, my_rows, table)
    together = cached_attention(q, mine, my_rows, 2, scale=0.125)
    for row in range(len(LENGTHS)):
        alone = q[row : row + 1].contiguous()
        one = my_rows.take(torch.tensor([row], device=DEVICE))
        assert torch.equal(cached_attention(alone, mine, one, 2, scale=0.125), together[row : row + 1])
        named = rows.table_NP[row, : -(-(int(rows.len_N[row]) + 1) // 16)].long().to(DEVICE)
        flat = []
        for whole, base in ((mine.k, 8), (mine.v, 16)):
            pages = whole[base : base + (len(whole) - base) // 2048 * 2048].view(-1, 2, 16, 64)[named]
            keys = pages.transpose(0, 1).flatten(1, 2)
            large = torch.zeros(2, -(-keys.shape[1] // 64) * 64, 64, dtype=DTYPE, device=DEVICE)
            large[:, : keys.shape[1]] = keys
            flat.append(large.view(2, -1, 64, 64).transpose(0, 1).contiguous().flatten())
        other = CacheLayer(*flat, torch.zeros(2, dtype=torch.int64, device=DEVICE))
        order = torch.arange(len(flat[0]) // 8192, dtype=torch.int32, device=DEVICE)[None]
        assert torch.equal(
            cached_attention(alone, other, Rows(order, one.len_N, 64), 2, scale=0.125), together[row : row + 1]
        )


@pytest.mark.parametrize("vocab", [5, 2100] + ([9008, 151936] if CUDA else []))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(vocab, dtype) -> None:
    draw, rows = torch.Generator().manual_seed(vocab), 40 if CUDA else 16
    logits = (torch.randn(rows, vocab, generator=draw) * 4).to(dtype).to(DEVICE)
    u = torch.rand(rows, generator=draw, dtype=torch.float64).to(DEVICE)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.9]).repeat(rows // 4).to(DEVICE)
    low = torch.randint(0, vocab, (rows,), generator=draw).to(DEVICE)
    high = torch.minimum(
        low + 1 + torch.randint(0, vocab, (rows,), generator=draw).to(DEVICE), torch.tensor(vocab, device=DEVICE)
    )
    low[:8], high[:8] = 0, vocab
    token, logprob = sample_tokens(logits, u, temperature, low, high)
    want, _ = reference_sample(logits.double(), u, temperature, low, high)
    assert (token >= low).all() and (token < high).all()
    assert torch.equal(token[temperature == 0], want[temperature == 0])
    assert (token == want).float().mean() > 0.97  # fp32 may part from fp64 at a boundary
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None].double()
    exact = torch.log_softmax(logits.double() / scale, -1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), exact, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [5, 1300] + ([9008, 151936] if CUDA else []))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_cut_by_top_k_and_top_p(vocab, dtype) -> None:
    draw, rows = torch.Generator().manual_seed(vocab), 48 if CUDA else 12
    logits = (torch.randn(rows, vocab, generator=draw) * 3).to(dtype).to(DEVICE)
    u = torch.rand(rows, generator=draw, dtype=torch.float64).to(DEVICE)
    u[:3] = 1 - 2.0**-40  # the last token that stays
    temperature = torch.tensor([1.0, 0.7, 1.9, 0.0]).repeat(rows // 4).to(DEVICE)
    low, high = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.full((rows,), vocab, device=DEVICE)
    low[5], high[5] = 1, 4
    top_k = torch.tensor([0, 1, 3, 50, 2, vocab, 10**6, 20]).repeat(rows)[:rows].to(DEVICE)
    top_p = torch.tensor([0.5, 1.0, 0.9, 0.3, 1.0, 0.8, 0.95]).repeat(rows)[:rows].to(DEVICE)
    token, logprob = sample_tokens(logits, u, temperature, low, high, (top_k, top_p))
    want, want_logprob = reference_sample(logits.double(), u, temperature, low, high, (top_k, top_p.double()))
    whole, _ = reference_sample(logits.double(), u, temperature, low, high)
    assert torch.equal(token[temperature == 0], want[temperature == 0])
    assert (token == want).float().mean() > 0.97  # fp32 may part from fp64 at a boundary
    assert (token != whole).any()
    same = token == want
    torch.testing.assert_close(logprob[same], want_logprob[same], atol=2e-5, rtol=1e-5)
    kept = (logits >= logits.gather(1, token[:, None])).sum(1)  # a token that stays has few above it
    once = (top_k > 0) & (top_k < vocab) & (low == 0)
    if dtype == torch.float32:
        assert (kept[once] <= top_k[once]).all()


def test_sampling_follows_the_distribution_and_tells_nan() -> None:
    rows = 4000 if not interpreting() else 40
    logits = torch.tensor([[2.0, 1.0, -torch.inf, 0.0, -1.0]]).repeat(rows, 1).to(DEVICE)
    u = (torch.arange(rows, dtype=torch.float64, device=DEVICE) + 0.5) / rows
    ones = torch.ones(rows, device=DEVICE)
    zero, five = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.full((rows,), 5, device=DEVICE)
    token, _ = sample_tokens(logits, u, ones, zero, five)
    assert (torch.bincount(token, minlength=5) / rows - torch.softmax(logits[0], -1)).abs().max() < 2 / rows
    _, logprob = sample_tokens(torch.full((1, 9), torch.nan, device=DEVICE), u[:1], ones[:1], zero[:1], five[:1])
    assert torch.isnan(logprob).all()


@pytest.mark.parametrize("inner,columns", [(64, 128), (80, 50)] + ([(1536, 2048), (8960, 1536)] if CUDA else []))
def test_rows_of_a_product_do_not_depend_on_the_others(inner, columns) -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(200 if CUDA else 70, inner, generator=draw).to(DEVICE, DTYPE)
    weight = torch.randn(columns, inner, generator=draw).to(DEVICE, DTYPE)
    whole = matmul(a, weight.T)
    close(whole, a.double() @ weight.T.double())
    for low, high in ((0, 1), (3, 68), (65, 70)):
        assert torch.equal(matmul(a[low:high], weight.T), whole[low:high])
    out = torch.empty_like(whole)
    with batch_invariant():
        bias = torch.ones(columns, device=DEVICE, dtype=DTYPE)
        assert torch.equal(torch.nn.functional.linear(a, weight), whole)
        assert torch.equal(torch.mm(a, weight.T, out=out), whole)
        assert torch.equal(torch.nn.functional.linear(a, weight, bias), whole + bias)
        if CUDA:
            with pytest.raises(RuntimeError, match="no invariant form"):
                torch.bmm(a[None], weight.T[None])
