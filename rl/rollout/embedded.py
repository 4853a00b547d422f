"""The embedded sampler: decodes on the engine's own weights, so nothing is copied or synchronised.

On CUDA requests of all shapes share one continuous batch (continuous.py). On CPU requests of one shape go through in
waves, which needs no bookkeeping a row. Either way a prompt that occurs several times in a batch (the members of a
group) is read once. Shapes: B rows in flight, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...core.errors import ConfigError, NumericsError
from ...core.rng import key_tensor
from ...data.trajectory import Invalid, Routing
from ...kernels.batch_invariant import batch_invariant
from ...kernels.decode_cache import PAGE
from ...models.config import ModelConfig
from ...models.decode import Decoder, KVCache, decode_weights
from ...models.paged_decode import PooledDecoder, same_tensors
from .continuous import ContinuousBatch, Use
from .copying import copying_of
from .decode_step import DecodeStep
from .page_pool import Room, make_room, wanted
from .sampler import Sample, SampleRequest, SamplingParams, interleave
from .stream import Stream, Ticket
from .token_choice import choose, plain

WAVE = 256
SLOTS = 4096
STREAMED = 1024  # requests of a stream in flight on a GPU; on a CPU a wave's


class EmbeddedSampler:
    """Batched sampling from `weights()`, called anew for each batch so that the newest weights are used.

    `max_batch` bounds the requests in flight, `cache_gib` the keys and values of the continuous batch (default: most of
    the free device memory); what does not fit waits. `continuous` chooses the way of working, by default by device.
    `batch_invariant` makes log-probs equal, bit for bit, to those of a trainer that scores under the mode of that name;
    it is slower. `copy` proposes that many tokens a pass out of a request's own context, which changes no sample (None:
    as many as pay, on CUDA; 0: none). With `keep` the cache stays between calls until `rest`, and what requests have in
    common with earlier ones, such as the turns of an episode, is not computed again while `weights_version` stays.
    Samples are marked with `version`, which is also the default of `weights_version`. With `notes` samples of a model
    with experts tell which were chosen.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, torch.Tensor]],
        config: ModelConfig,
        *,
        version: Callable[[], int] = lambda: 0,
        weights_version: Callable[[], int] | None = None,
        max_batch: int | None = None,
        cache_gib: float | None = None,
        continuous: bool | None = None,
        batch_invariant: bool = False,
        keep: bool = False,
        copy: int | None = 0,
        aside: bool = False,
        notes: bool = False,
    ) -> None:
        self.weights, self.config, self.version, self.aside = weights, config, version, aside
        self.weights_version = weights_version or version
        self.max_batch, self.cache_gib, self.continuous = max_batch, cache_gib, continuous
        self.batch_invariant, self.keep, self.copy = batch_invariant, keep, copy
        self.notes = notes and config.experts > 0
        self._step: DecodeStep | None = None
        self._room: Room | None = None
        self._use = Use()

    @torch.no_grad()
    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        self._check(requests)
        named = self.weights()
        device = named["embedding.word_embeddings.weight"].device
        # in a wave all rows stand at one place, so that none can run ahead
        either = device.type == "cuda" or self.batch_invariant or bool(self.copy)
        continuous = either if self.continuous is None else self.continuous
        work: dict[Any, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            spans = tuple((at, len(ids)) for at, ids in request.forced)
            work[self._shape(request) if continuous else (len(request.ids), request.params, spans)].append(index)
        results: list[Sample | Invalid | None] = [None] * len(requests)
        decoder = None if continuous or not requests else self._decoder(named, requests)
        for shape, members in work.items():
            if decoder is None:
                with batch_invariant(self.batch_invariant):
                    self._place(results, members, self._stream(named, [requests[i] for i in members], *shape))
                continue
            for start in range(0, len(members), self.max_batch or WAVE):
                wave = members[start : start + (self.max_batch or WAVE)]
                self._place(results, wave, self._wave(decoder, [requests[i] for i in wave], shape[1]))
        return [result for result in results if result is not None]

    @torch.no_grad()
    def serve(self, stream: Stream) -> None:
        """Answer a stream's tickets as they come, until it is closed."""
        left: list[Ticket] = []
        device = self.weights()["embedding.word_embeddings.weight"].device
        own = torch.cuda.stream(torch.cuda.Stream(device)) if self.aside and device.type == "cuda" else nullcontext()
        with own, batch_invariant(self.batch_invariant):
            while (tickets := left or stream.take(wait=True)) is not None:
                self._check([ticket.request for ticket in tickets])
                shape = self._shape(tickets[0].request)
                now = [ticket for ticket in tickets if self._shape(ticket.request) == shape]
                left = [ticket for ticket in tickets if self._shape(ticket.request) != shape]
                left += self._serve(stream, now, *shape)

    def _serve(
        self, stream: Stream, tickets: list[Ticket], params: SamplingParams | None, temperature: float | None
    ) -> list[Ticket]:
        requests = [ticket.request for ticket in tickets]
        with stream.turn():
            batch = self._batch(self.weights(), requests, params, temperature, streamed=True)
            room, self._room = self._room, None  # none after a failure
            assert room is not None

        def suits(request: SampleRequest) -> bool:
            self._check([request])
            fits = -(-(request.length + batch.beyond) // room.pages.size) < room.pages.count
            return (
                self._shape(request) == (params, temperature)
                and fits
                and (not batch.copying or request.length <= batch.longest)
            )

        left = batch.serve(tickets, stream, lambda: (self.version(), self.weights_version()), suits)
        with stream.turn():
            room.weights_version = batch.weights_version
            self._room = room if self.keep and not batch.tickets else None
            if params is not None and self._step is not None:
                self._step.forget(params)
        return left

    def _shape(self, request: SampleRequest) -> tuple[SamplingParams | None, float | None]:
        """What requests of one continuous batch have in common."""
        params = request.params
        return None if plain(params) else params, params.temperature if self.batch_invariant else None

    def rest(self) -> dict[str, float]:
        """Give the cache's memory back, for the trainer's turn; returns how the cache was used since the last time,
        for the record.
        """
        self._room = None
        return self.figures()

    def figures(self) -> dict[str, float]:
        """How the cache was used since the last time."""
        use = replace(self._use)
        self._use.__init__()  # in place: a stream goes on adding to it
        if not use.given:
            return {}
        reuse = 1 - use.stored / use.given
        figures = {"cache_pages": use.most, "cache_waste": use.waste, "prompt_reuse": reuse, "preempted": use.preempted}
        made = max(1, use.made)
        figures |= {"copied": use.copied / made, "calls_per_token": use.passes / made}
        return {f"time/{name}": float(value) for name, value in figures.items()}

    @staticmethod
    def _place(results: list[Sample | Invalid | None], members: list[int], samples: list[Sample]) -> None:
        for index, sample in zip(members, samples, strict=True):
            results[index] = sample

    def _check(self, requests: list[SampleRequest]) -> None:
        longest = max((r.length for r in requests), default=1)
        if longest > self.config.max_positions:
            raise ConfigError(
                f"a prompt of {longest} tokens with its continuation exceeds model.max_positions = "
                f"{self.config.max_positions}; raise it or lower max_new_tokens"
            )
        if any(not r.ids for r in requests):
            raise ValueError("a sample request needs at least one prompt token")

    def _decoder(self, named: Mapping[str, torch.Tensor], requests: list[SampleRequest]) -> Decoder:
        return Decoder(decode_weights(named, self.config), self.config, max(r.length for r in requests))

    def _stream(
        self,
        named: Mapping[str, torch.Tensor],
        requests: list[SampleRequest],
        params: SamplingParams | None,
        temperature: float | None,
    ) -> list[Sample]:
        """All requests as one continuous batch."""
        batch = self._batch(named, requests, params, temperature)
        room, self._room = self._room, None  # none after a failure
        samples = batch.run(self.version())
        self._room = room if self.keep else None
        if params is not None and self._step is not None:
            self._step.forget(params)
        return samples

    def _batch(
        self,
        named: Mapping[str, torch.Tensor],
        requests: list[SampleRequest],
        params: SamplingParams | None,
        temperature: float | None,
        streamed: bool = False,
    ) -> ContinuousBatch:
        """A continuous batch in a room that is left as `_room`. Graphs of earlier ones are used again while the weights
        stay where they are.
        """
        weights = decode_weights(named, self.config)
        cuda = weights.embedding.device.type == "cuda"
        asked = (STREAMED if cuda else WAVE) if streamed else len(requests)
        slots = min(self.max_batch or SLOTS, SLOTS, max(asked, self._step.slots if self._step else 0))
        if self._step is None or not same_tensors(self._step.decoder.weights, weights):
            self._room = None
            self._step = DecodeStep(PooledDecoder(weights, self.config, self.notes), slots, PAGE)
        elif self._step.slots < slots:
            self._step = DecodeStep(self._step.decoder, slots, PAGE)
        step, version = self._step, self.weights_version()
        # others of a stream may be as long as the longest of those that are known
        most = 1 + slots * (1 - -max(r.length for r in requests) // PAGE)
        pages = most if streamed else wanted(requests, slots, PAGE)
        if self._room is not None and not self._room.suits(pages):
            self._room = None  # its memory counts for the next
        if self.aside and cuda and self.cache_gib is None:
            raise ConfigError("rollouts.sampler.cache_gib: say how much memory the sampler may take beside the trainer")
        copying = copying_of(self.copy, self.config, step.decoder.device)
        spare = self.keep and not streamed
        room = self._room = self._room or make_room(step, pages, self.cache_gib, spare, version, copying)
        room.enter(step.decoder, requests, version)
        step.temperature = temperature or 1.0
        return ContinuousBatch(step, room.pool, room.pages, requests, params, self.keep, self._use, version, copying)

    def _wave(self, decoder: Decoder, requests: list[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Requests of one prompt length, one setting and forced spans at the same places, decoded together; rows
        leave when they stop.
        """
        device = decoder.weights.embedding.device
        length = len(requests[0].ids)
        unique: dict[tuple[int, ...], int] = {}
        row_of = [unique.setdefault(r.ids, len(unique)) for r in requests]
        cache = KVCache(self.config, len(unique), requests[0].length, decoder.weights.embedding)
        prompts = torch.tensor(list(unique), dtype=torch.int64, device=device)
        hidden_BH = decoder.forward(prompts, cache)[:, -1]
        members = torch.tensor(row_of, device=device)
        cache.select(members)
        hidden_BH = hidden_BH[members]
        keys_B = key_tensor((r.key for r in requests), device)
        alive = torch.arange(len(requests), device=device)
        ids = torch.zeros(len(requests), params.max_new_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(requests), params.max_new_tokens, dtype=torch.float32, device=device)
        counts = torch.zeros(len(requests), dtype=torch.int64, device=device)
        stop_ids = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        spans = {
            at: torch.tensor([dict(r.forced)[at] for r in requests], device=device) for at, _ in requests[0].forced
        }
        seen_BV = self._seen(prompts[members], params)
        routes: torch.Tensor | None = None
        if self.notes:
            first_BSLK = cache.noted(len(unique))[members]
            shape = (len(requests), requests[0].length, *first_BSLK.shape[2:])
            routes = torch.full(shape, -1, dtype=torch.int16, device=device)
            routes[:, :length] = first_BSLK
        for step in range(params.max_new_tokens):
            logits_BV = F.linear(hidden_BH, decoder.weights.head)[:, : self.config.vocab]
            token_B, logprob_B = choose(logits_BV, keys_B, step, params, seen_BV)
            ids[alive, step], logprobs[alive, step], counts[alive] = token_B, logprob_B, step + 1
            if params.stop_ids:
                ended_B = torch.isin(token_B, stop_ids)
                stopped[alive] = ended_B
                if bool(ended_B.any()):
                    left = (~ended_B).nonzero().squeeze(1)
                    alive, keys_B, token_B = alive[left], keys_B[left], token_B[left]
                    cache.select(left)
                    seen_BV = seen_BV[left] if seen_BV is not None else None
            if not alive.numel() or step + 1 == params.max_new_tokens:
                break
            new_BS = torch.cat([token_B[:, None], spans[step + 1][alive]], 1) if step + 1 in spans else token_B[:, None]
            if seen_BV is not None:
                seen_BV.scatter_(1, new_BS, True)
            hidden_BH = decoder.forward(new_BS, cache, length)[:, -1]
            if routes is not None:
                routes[alive, length : length + new_BS.shape[1]] = cache.noted(len(alive))
            length += new_BS.shape[1]
        if not bool(torch.isfinite(logprobs).all()):
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        version = self.version()
        rows = zip(requests, ids.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        samples = [interleave(i[:n], p[:n], r, "stop" if s else "length", version) for r, i, p, n, s in rows]
        if routes is None:
            return samples
        sized = zip(routes.cpu().numpy(), requests, samples, strict=True)
        return [replace(s, experts=Routing.of(x[: len(r.ids) + len(s.ids)])) for x, r, s in sized]

    def _seen(self, prompts_BS: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
        """Which tokens each row holds already, where a penalty asks for it."""
        if params.repetition_penalty == 1.0:
            return None
        empty_BV = torch.zeros(len(prompts_BS), self.config.vocab, dtype=torch.bool, device=prompts_BS.device)
        return empty_BV.scatter_(1, prompts_BS, True)
