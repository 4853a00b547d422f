"""One decode step of all rows, from the tokens fed to the tokens sampled, without the host: captured as a CUDA graph
for each batch size.

All inputs and outputs are tensors at fixed addresses. Rows advance in place; sampled tokens go to a window of the last
steps, which the host reads from time to time. A step may also feed proposed tokens and keep those that sampling agrees
with: rows then advance by a number of tokens that only the device knows. Shape suffixes: B rows, V vocabulary, W steps
of the window, K tokens a row feeds, T all of them, L room for a row's tokens, M tokens a row may make in a window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ...core.rng import uniform_tensor
from ...kernels.batch_invariant import is_batch_invariant
from ...kernels.copying import AHEAD, propose
from ...kernels.decode_cache import Rows, Shared, Tiles, tile_tokens
from ...kernels.linear_logprob import linear_logprob
from ...kernels.sample import sample_tokens
from ...models.paged_decode import PooledDecoder
from .sampler import SamplingParams
from .token_choice import choose_rows

FIELDS = ("token", "length", "count", "key", "cap", "low", "high", "top_k", "done")
# for steps that copy: the count at which a row waits for the host, and the place its last copy came from; per window,
# the tokens it made, how many of them were proposed, and the passes in which it did not wait
FIELDS += ("limit", "source", "made", "copied", "passes")
WINDOW = 16
COPIES = 8  # passes of a window that copies
PROGRAMS = 264  # two per multiprocessor of a large GPU: with fewer programs, attention splits the keys of a row


def bucket_of(rows: int, most: int) -> int:
    """The batch size that this number of rows runs at."""
    steps = (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
    size = next((s for s in steps if s >= rows), -(-rows // 256) * 256)
    return min(size, max(most, 8))


class DecodeStep:
    """The rows' state and the step that advances it. `numbers` are int64, one line for each of FIELDS."""

    def __init__(self, decoder: PooledDecoder, slots: int, page: int) -> None:
        device, config = decoder.device, decoder.config
        together = tile_tokens(config.heads // config.kv_heads)
        self.decoder, self.slots, self.page, width = decoder, slots, page, max(slots, 8)
        self.numbers = torch.zeros(len(FIELDS), width, dtype=torch.int64, device=device)
        self.table_BP = torch.zeros(width, -(-(config.max_positions + AHEAD) // page), dtype=torch.int32, device=device)
        self.temperature_B, self.top_p_B = torch.ones(width, device=device), torch.ones(width, device=device)
        self.tiles_BR = torch.full((width, together), -1, dtype=torch.int32, device=device)
        self.tick_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens_WB = torch.zeros(WINDOW, width, dtype=torch.int64, device=device)
        self.logprobs_WB = torch.zeros(WINDOW, width, device=device)
        self.shares = False  # whether some rows read pages together
        self.cuts = False  # whether some rows have a top-k or top-p
        self.temperature = 1.0  # of all rows, in batch-invariant mode
        self.seen_BV: torch.Tensor | None = None  # tokens a row holds already, where a penalty asks for it
        self.text_BL = torch.zeros(0, 0, dtype=torch.int32, device=device)  # all tokens of a row, where it may copy
        self.tokens_BM = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs_BM = torch.zeros(0, 0, device=device)
        self._tiles: dict[tuple[int, int], Tiles] = {}
        self._graphs: dict[tuple[int, SamplingParams | None, int, bool, bool, float | None], Callable[[], None]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def line(self, name: str, rows: int | None = None) -> torch.Tensor:
        """One field of the first rows."""
        return self.numbers[FIELDS.index(name), :rows]

    def rows(self, count: int) -> Rows:
        """The positions of the first rows."""
        return Rows(self.table_BP[:count], self.line("length", count), self.page)

    def splits(self, rows: int) -> int:
        """Programs that share one row's keys; 1 where the batch alone fills the device, and shared pages are read
        together.
        """
        return 1 if is_batch_invariant() else max(1, min(16, PROGRAMS // (rows * self.decoder.config.kv_heads)))

    def idle(self, first: int = 0) -> None:
        """Point rows from `first` on at the pool's first page, which no request uses."""
        blank = torch.zeros(len(FIELDS), 1, dtype=torch.int64)
        blank[FIELDS.index("cap")] = 1
        blank[FIELDS.index("high")] = self.decoder.config.vocab
        self.numbers[:, first:] = blank.to(self.numbers.device)
        self.table_BP[first:] = 0
        self.temperature_B[first:] = self.top_p_B[first:] = 1.0
        self.tiles_BR[first:] = -1

    def make_text(self, length: int) -> None:
        """Allocate room for the tokens of rows of this length, and for proposals after them."""
        room, (rows, device) = length + AHEAD + 2, (len(self.temperature_B), self.numbers.device)
        if self.text_BL.shape[1] >= room:
            return
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[2]}
        self.text_BL = torch.zeros(rows, -(-room // 512) * 512, dtype=torch.int32, device=device)
        self.tokens_BM = torch.zeros(rows, (COPIES + 1) * (AHEAD + 1), dtype=torch.int64, device=device)
        self.logprobs_BM = torch.zeros(self.tokens_BM.shape, device=device)

    def replay(self, rows: int, params: SamplingParams | None, ahead: int = 0) -> Callable[[], None]:
        """The step for a batch size, as a graph on CUDA; `params` only where sampling needs the slow path. With
        `ahead` it feeds that many copied tokens a row behind the one that is due.
        """
        # in batch-invariant mode experts run one by one, over rows that the host counts
        if self.numbers.device.type != "cuda" or (self.decoder.config.experts and is_batch_invariant()):
            return lambda: self._pass(rows, params, ahead)
        shares = self.shares and not ahead
        key = (rows, params, ahead, shares, self.cuts, self.temperature if is_batch_invariant() else None)
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows, params, ahead)
        return self._graphs[key]

    def _pass(self, rows: int, params: SamplingParams | None, ahead: int) -> None:
        if ahead:
            self._run_ahead(rows, ahead)
        else:
            self._run(rows, params)

    def forget(self, params: SamplingParams) -> None:
        """Drop the graphs of one slow setting."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] != params}

    def _capture(self, rows: int, params: SamplingParams | None, ahead: int) -> Callable[[], None]:
        state = [self.numbers, self.table_BP, self.temperature_B, self.top_p_B, self.tiles_BR, self.tick_1]
        state += [] if self.seen_BV is None else [self.seen_BV]
        state += [self.text_BL] if ahead else []
        kept = [x.clone() for x in state]
        self.idle()
        self.tick_1.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pass(rows, params, ahead)  # compiles kernels and initialises libraries
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a trainer may use the device meanwhile, from its own thread
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._pass(rows, params, ahead)
        for x, value in zip(state, kept, strict=True):
            x.copy_(value)
        return graph.replay

    @torch.no_grad()
    def _run(self, rows: int, params: SamplingParams | None) -> None:
        d, splits = self.decoder, self.splits(rows)
        together = self.shares and splits == 1 and not is_batch_invariant()
        shared = Shared(self.tiles_BR[: rows // 2], self.line("done", rows)) if together else None
        hidden_BH = d.hidden(self.line("token", rows), self.rows(rows), shared, splits)
        logits_BV = F.linear(hidden_BH, d.weights.head)[:, : d.config.vocab]
        count_B = self.line("count", rows)
        u_B = uniform_tensor(self.line("key", rows), count_B)
        if params is None:
            limits = self.line("low", rows), self.line("high", rows)
            cuts = (self.line("top_k", rows), self.top_p_B[:rows]) if self.cuts else None
            token_B, logprob_B = sample_tokens(logits_BV, u_B, self.temperature_B[:rows], *limits, cuts)
        else:
            seen_BV = None if self.seen_BV is None else self.seen_BV[:rows]
            token_B, logprob_B = choose_rows(logits_BV, u_B, params, seen_BV)
            if seen_BV is not None:
                seen_BV.scatter_(1, token_B[:, None], True)
        if is_batch_invariant():  # with the trainer's own scoring function
            logprob_B, _ = linear_logprob(
                hidden_BH, d.weights.head, token_B, temperature=self.temperature, vocab_size=d.config.vocab
            )
        self.tokens_WB[:, :rows].index_copy_(0, self.tick_1, token_B[None])
        self.logprobs_WB[:, :rows].index_copy_(0, self.tick_1, logprob_B[None])
        self.line("token", rows).copy_(token_B)
        length_B = self.line("length", rows)
        # a row that is over before the host looks stays inside its pages
        length_B.copy_(torch.minimum(length_B + 1, self.line("cap", rows) - 1))
        count_B.add_(1)
        self.tick_1.add_(1)

    @torch.no_grad()
    def _run_ahead(self, rows: int, ahead: int) -> None:
        """Feed every row its token and `ahead` proposals. A token sampled after proposals counts if those were all
        sampled as proposed: it is then exactly the token that plain steps would have sampled.
        """
        d, width = self.decoder, ahead + 1
        length_B, count_B, limit_B, source_B = (self.line(n, rows) for n in ("length", "count", "limit", "source"))
        text_BL = self.text_BL[:rows]
        token_BK, at_B = propose(text_BL, length_B, source_B, ahead)
        tiles = self._tiles_of(rows, width)
        hidden_TH = d.hidden(token_BK.flatten(), self.rows(rows), splits=self.splits(len(tiles.tile_X4)), tiles=tiles)
        logits_TV = F.linear(hidden_TH, d.weights.head)[:, : d.config.vocab]

        def each(x_B: torch.Tensor) -> torch.Tensor:
            return x_B[:, None].expand(rows, width).reshape(-1)

        step_K = torch.arange(width, device=count_B.device)
        u_T = uniform_tensor(each(self.line("key", rows)), (count_B[:, None] + step_K).flatten())
        limits = each(self.line("low", rows)), each(self.line("high", rows))
        cuts = (each(self.line("top_k", rows)), each(self.top_p_B[:rows])) if self.cuts else None
        token_T, logprob_T = sample_tokens(logits_TV, u_T, each(self.temperature_B[:rows]), *limits, cuts)
        if is_batch_invariant():
            logprob_T, _ = linear_logprob(
                hidden_TH, d.weights.head, token_T, temperature=self.temperature, vocab_size=d.config.vocab
            )
        sampled_BK = token_T.view(rows, width)
        right_B = (sampled_BK[:, :-1] == token_BK[:, 1:]).long().cumprod(1).sum(1)
        made_B = torch.minimum(right_B + 1, limit_B - count_B).clamp_min(0)
        # cache entries after the tokens that count are never read, and the next pass overwrites them
        text_BL.scatter_(1, length_B[:, None] + 1 + step_K, sampled_BK.int())
        total_B = self.line("made", rows)
        self.tokens_BM[:rows].scatter_(1, total_B[:, None] + step_K, sampled_BK)
        self.logprobs_BM[:rows].scatter_(1, total_B[:, None] + step_K, logprob_T.view(rows, width))
        self.line("copied", rows).add_(torch.minimum(right_B, made_B))
        self.line("passes", rows).add_(limit_B > count_B)
        source_B.copy_(torch.where(made_B > 0, at_B + made_B, source_B))
        for line_B in (length_B, count_B, total_B):
            line_B.add_(made_B)
        self.line("token", rows).copy_(text_BL.gather(1, length_B[:, None])[:, 0])

    def _tiles_of(self, rows: int, width: int) -> Tiles:
        """How attention goes over `width` tokens of every row. Kept: captured graphs refer to it."""
        if (rows, width) not in self._tiles:
            most = min(width, self.tiles_BR.shape[1])
            tile = [(b, b * width + i, i, min(most, width - i)) for b in range(rows) for i in range(0, width, most)]
            tile_X4 = torch.tensor(tile, dtype=torch.int32, device=self.numbers.device)
            token_T = torch.arange(rows * width, device=self.numbers.device)
            self._tiles[rows, width] = Tiles(tile_X4, token_T // width, token_T % width, most)
        return self._tiles[rows, width]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
