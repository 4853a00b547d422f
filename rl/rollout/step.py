"""One decode step of all rows, from the tokens fed to the tokens sampled, without the host: captured as a CUDA graph
for each batch size.

Everything the step reads or writes lives in tensors that stay where they are. Rows advance in place; what was sampled
goes into a window of the last steps, which the host reads now and then. Shape suffixes: B rows, V vocabulary, W steps
of the window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ...core.rng import uniform_tensor
from ...kernels.batch_invariant import is_batch_invariant
from ...kernels.decode_cache import Rows, Shared, tile_tokens
from ...kernels.linear_logprob import linear_logprob
from ...kernels.sample import sample_tokens
from ...models.pooled import PooledDecoder
from .choice import choose_rows
from .sampler import SamplingParams

FIELDS = ("token", "length", "count", "key", "cap", "low", "high", "top_k", "done")
WINDOW = 16
PROGRAMS = 264  # two for each of a large GPU's multiprocessors: below that, attention splits the keys of a row


def bucket_of(rows: int, most: int) -> int:
    """The batch size a number of rows runs at."""
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
        self.table_BP = torch.zeros(width, -(-config.max_positions // page), dtype=torch.int32, device=device)
        self.temperature_B, self.top_p_B = torch.ones(width, device=device), torch.ones(width, device=device)
        self.tiles_BR = torch.full((width, together), -1, dtype=torch.int32, device=device)
        self.tick_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens_WB = torch.zeros(WINDOW, width, dtype=torch.int64, device=device)
        self.logprobs_WB = torch.zeros(WINDOW, width, device=device)
        self.shares = False  # whether some rows read pages together
        self.cuts = False  # whether some rows have a top-k or top-p
        self.temperature = 1.0  # of all rows, in batch-invariant mode
        self.seen_BV: torch.Tensor | None = None  # tokens a row holds already, where a penalty asks for it
        self._graphs: dict[tuple[int, SamplingParams | None, bool, bool, float | None], Callable[[], None]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def line(self, name: str, rows: int | None = None) -> torch.Tensor:
        """One field of the first rows."""
        return self.numbers[FIELDS.index(name), :rows]

    def rows(self, count: int) -> Rows:
        """Where the first rows stand."""
        return Rows(self.table_BP[:count], self.line("length", count), self.page)

    def splits(self, rows: int) -> int:
        """Programs that share one row's keys; 1 where the batch alone fills the device, and shared pages are read
        together.
        """
        return 1 if is_batch_invariant() else max(1, min(16, PROGRAMS // (rows * self.decoder.config.kv_heads)))

    def idle(self, first: int = 0) -> None:
        """Point rows from `first` on at the pool's first page, which belongs to nobody."""
        blank = torch.zeros(len(FIELDS), 1, dtype=torch.int64)
        blank[FIELDS.index("cap")] = 1
        blank[FIELDS.index("high")] = self.decoder.config.vocab
        self.numbers[:, first:] = blank.to(self.numbers.device)
        self.table_BP[first:] = 0
        self.temperature_B[first:] = self.top_p_B[first:] = 1.0
        self.tiles_BR[first:] = -1

    def replay(self, rows: int, params: SamplingParams | None) -> Callable[[], None]:
        """The step for a batch size, as a graph on CUDA; `params` only where sampling needs the slow path."""
        if self.numbers.device.type != "cuda":
            return lambda: self._run(rows, params)
        key = (rows, params, self.shares, self.cuts, self.temperature if is_batch_invariant() else None)
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows, params)
        return self._graphs[key]

    def forget(self, params: SamplingParams) -> None:
        """Drop the graphs of one slow setting."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] != params}

    def _capture(self, rows: int, params: SamplingParams | None) -> Callable[[], None]:
        state = [self.numbers, self.table_BP, self.temperature_B, self.top_p_B, self.tiles_BR, self.tick_1]
        state += [] if self.seen_BV is None else [self.seen_BV]
        kept = [x.clone() for x in state]
        self.idle()
        self.tick_1.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(rows, params)  # compiles, and lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._run(rows, params)
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
        if is_batch_invariant():  # by the function the trainer scores with
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


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
