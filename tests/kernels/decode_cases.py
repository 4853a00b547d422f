"""Cached attention, its rotary step and sampling against fp64 and the plain references. Collected by test_decode.py."""

import pytest
import torch

from terrella.kernels.batch_invariant import batch_invariant, matmul
from terrella.kernels.decode_attention import append_kv, cached_attention, reference_append, reference_attention
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


def make(heads: int, groups: int, dim: int, lengths: list[tuple[int, int, int]], new: list[int], seed: int = 0):
    """A cache with (prefix number, prefix length, own length) for every sequence, regions in shuffled order; float64 on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    prefixes = {number: length for number, length, _ in lengths}
    sizes = [*prefixes.values(), *(own + n + 3 for (_, _, own), n in zip(lengths, new, strict=True))]
    starts, at = [0] * len(sizes), 8
    for place in torch.randperm(len(sizes), generator=draw).tolist():
        starts[place], at = at, at + sizes[place] * groups * dim
    k, v = (torch.randn(at + 64, generator=draw, dtype=torch.float64).bfloat16().double() for _ in range(2))
    where = dict(zip(prefixes, starts, strict=False))
    columns = [
        [where[number] for number, _, _ in lengths],
        [length for _, length, _ in lengths],
        starts[len(prefixes) :],
        sizes[len(prefixes) :],
        [own for _, _, own in lengths],
    ]
    rows = Rows(*(torch.tensor(c, dtype=torch.int64) for c in columns))
    qkv = torch.randn(sum(new), groups, heads // groups + 2, dim, generator=draw, dtype=torch.float64).bfloat16().double()
    return CacheLayer(k, v, torch.tensor([8, 16])), rows, qkv


def place(cache: CacheLayer, rows: Rows, dtype: torch.dtype = DTYPE) -> tuple[CacheLayer, Rows]:
    cache = CacheLayer(cache.k.to(DEVICE, dtype), cache.v.to(DEVICE, dtype), cache.base_2.to(DEVICE))
    return cache, Rows(*(getattr(rows, name).to(DEVICE) for name in Rows.__dataclass_fields__))


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


@pytest.mark.parametrize("heads,groups,dim,options", MIXED)
def test_append_and_attention_of_one_token(heads, groups, dim, options) -> None:
    cache, rows, qkv = make(heads, groups, dim, LENGTHS, [1] * len(LENGTHS))
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
    shared = Shared(
        torch.tensor([[0, 1, 5], [3, 6, -1], [-1, -1, -1]], dtype=torch.int32, device=DEVICE),
        torch.tensor([LENGTHS[0][1]] * 2 + [0, 30, 0, LENGTHS[0][1], 30], device=DEVICE),
    )
    for how in ({}, {"splits": 3}, {"shared": shared}):
        close(cached_attention(q, mine, my_rows, groups, scale=dim**-0.5, **how), want)


@pytest.mark.parametrize("heads,groups,dim", HEADS)
def test_many_tokens_a_sequence(heads, groups, dim) -> None:
    new = [1, 13, 70, 64, 5, 2, 3] if CUDA else [1, 13, 10, 3, 2, 1, 3]
    cache, rows, qkv = make(heads, groups, dim, LENGTHS, new)
    table, most = rope_table(512, dim), 8
    mine, my_rows = place(cache, rows)
    tiles = tiles_of(new, most, DEVICE)
    q = append_kv(qkv.to(DEVICE, DTYPE), mine, my_rows, table.to(DEVICE), tiles=tiles)
    plain = tiles_of(new, most, "cpu")
    want_q = reference_append(qkv, cache, rows, table.double(), plain, None, 1e-6, False)
    close(mine.k, cache.k)
    close(
        cached_attention(q, mine, my_rows, groups, scale=dim**-0.5, tiles=tiles),
        reference_attention(want_q, cache, rows, groups, dim**-0.5, plain),
    )


def test_a_row_does_not_depend_on_its_neighbours_nor_on_its_regions() -> None:
    """The same bits alone, in a batch, and with the boundary between prefix and own tokens elsewhere."""
    cache, rows, qkv = make(6, 2, 64, LENGTHS, [1] * len(LENGTHS))
    mine, my_rows = place(cache, rows)
    table = rope_table(512, 64).to(DEVICE)
    q = append_kv(qkv.to(DEVICE, DTYPE), mine, my_rows, table)
    together = cached_attention(q, mine, my_rows, 2, scale=0.125)
    for row in range(len(LENGTHS)):
        one = Rows(*(getattr(my_rows, name)[row : row + 1].contiguous() for name in Rows.__dataclass_fields__))
        assert torch.equal(cached_attention(q[row : row + 1].contiguous(), mine, one, 2, scale=0.125), together[row : row + 1])
    _, shared, own = LENGTHS[1]
    whole = torch.zeros(2, 2, shared + own + 1, 64, dtype=DTYPE, device=DEVICE)
    for flat, base, out in ((mine.k, 8, whole[0]), (mine.v, 16, whole[1])):
        start, cap = base + int(rows.own_start_N[1]), int(rows.own_cap_N[1])
        mine_GD = flat[start : start + 2 * cap * 64].view(2, cap, 64)[:, : own + 1]
        start = base + int(rows.prefix_start_N[1])
        out.copy_(torch.cat([flat[start : start + 2 * shared * 64].view(2, shared, 64), mine_GD], 1))
    numbers = [torch.tensor([n], device=DEVICE) for n in (0, 0, 0, shared + own + 1, shared + own)]
    flat = CacheLayer(whole[0].reshape(-1), whole[1].reshape(-1), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert torch.equal(cached_attention(q[1:2].contiguous(), flat, Rows(*numbers), 2, scale=0.125), together[1:2])


@pytest.mark.parametrize("vocab", [5, 2100] + ([9008, 151936] if CUDA else []))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(vocab, dtype) -> None:
    draw, rows = torch.Generator().manual_seed(vocab), 40 if CUDA else 16
    logits = (torch.randn(rows, vocab, generator=draw) * 4).to(dtype).to(DEVICE)
    u = torch.rand(rows, generator=draw, dtype=torch.float64).to(DEVICE)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.9]).repeat(rows // 4).to(DEVICE)
    low = torch.randint(0, vocab, (rows,), generator=draw).to(DEVICE)
    high = torch.minimum(low + 1 + torch.randint(0, vocab, (rows,), generator=draw).to(DEVICE), torch.tensor(vocab, device=DEVICE))
    low[:8], high[:8] = 0, vocab
    token, logprob = sample_tokens(logits, u, temperature, low, high)
    want, _ = reference_sample(logits.double(), u, temperature, low, high)
    assert (token >= low).all() and (token < high).all()
    assert torch.equal(token[temperature == 0], want[temperature == 0])
    assert (token == want).float().mean() > 0.97  # fp32 may part from fp64 at a boundary
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None].double()
    exact = torch.log_softmax(logits.double() / scale, -1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), exact, atol=2e-5, rtol=1e-5)


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
