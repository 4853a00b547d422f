"""The embedded sampler: decodes on the engine's own weights, so nothing is copied or synchronised.

Prompts that occur several times in a batch (the members of a group) are read once and share the result.
Shapes: B rows in flight, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from ...core.errors import ConfigError, NumericsError
from ...core.rng import key_tensor, uniform_tensor
from ...data.trajectory import Invalid
from ...models.config import ModelConfig
from ...models.decode import Decoder, KVCache, decode_weights
from .sampler import Sample, SampleRequest, SamplingParams, interleave

LARGE_VOCAB = 4096


class EmbeddedSampler:
    """Batched sampling from `weights()`, called anew for each batch so that the newest weights are used."""

    def __init__(
        self,
        weights: Callable[[], Mapping[str, torch.Tensor]],
        config: ModelConfig,
        *,
        version: Callable[[], int] = lambda: 0,
        max_batch: int = 256,
    ) -> None:
        self.weights, self.config, self.version, self.max_batch = weights, config, version, max_batch

    @torch.no_grad()
    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        decoder = self._decoder(requests)
        by_shape: dict[tuple[int, SamplingParams, tuple[tuple[int, int], ...]], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_shape[len(request.ids), request.params, tuple((at, len(ids)) for at, ids in request.forced)].append(index)
        results: list[Sample | Invalid | None] = [None] * len(requests)
        for (_, params, _), members in by_shape.items():
            for start in range(0, len(members), self.max_batch):
                wave = members[start : start + self.max_batch]
                for index, sample in zip(wave, self._wave(decoder, [requests[i] for i in wave], params), strict=True):
                    results[index] = sample
        return [result for result in results if result is not None]

    def _decoder(self, requests: list[SampleRequest]) -> Decoder:
        longest = max((r.length for r in requests), default=1)
        if longest > self.config.max_positions:
            raise ConfigError(
                f"a prompt of {longest} tokens with its continuation exceeds model.max_positions = {self.config.max_positions}; "
                "raise it or lower max_new_tokens"
            )
        if any(not r.ids for r in requests):
            raise ValueError("a sample request needs at least one prompt token")
        return Decoder(decode_weights(self.weights(), self.config), self.config, longest)

    def _wave(self, decoder: Decoder, requests: list[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Requests of one prompt length, one setting and forced spans at the same places, decoded together; rows leave when they stop."""
        device = decoder.weights.embedding.device
        length = len(requests[0].ids)
        unique: dict[tuple[int, ...], int] = {}
        row_of = [unique.setdefault(r.ids, len(unique)) for r in requests]
        cache = KVCache(self.config, len(unique), requests[0].length, decoder.weights.embedding)
        prompts = torch.tensor(list(unique), dtype=torch.int64, device=device)
        hidden_BH = decoder.forward(prompts, cache, same_start=0)[:, -1]
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
        spans = {at: torch.tensor([dict(r.forced)[at] for r in requests], device=device) for at, _ in requests[0].forced}
        seen_BV = self._seen(prompts[members], params)
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
            hidden_BH = decoder.forward(new_BS, cache, same_start=length)[:, -1]
            length += new_BS.shape[1]
        if not bool(torch.isfinite(logprobs).all()):
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        version = self.version()
        rows = zip(requests, ids.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        return [interleave(i[:n], p[:n], r, "stop" if s else "length", version) for r, i, p, n, s in rows]

    def _seen(self, prompts_BS: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
        """Which tokens each row holds already, where a penalty asks for it."""
        if params.repetition_penalty == 1.0:
            return None
        empty_BV = torch.zeros(len(prompts_BS), self.config.vocab, dtype=torch.bool, device=prompts_BS.device)
        return empty_BV.scatter_(1, prompts_BS, True)


def choose(
    logits_BV: torch.Tensor, keys_B: torch.Tensor, step: int, params: SamplingParams, seen_BV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick a token a row by its key's random number; the log-prob is of the untruncated and unpenalised distribution."""
    scale = params.temperature or 1.0
    logp_BV = torch.log_softmax(logits_BV.float() / scale if scale != 1.0 else logits_BV.float(), -1)
    pick_BV = logp_BV
    if seen_BV is not None:
        penalty = params.repetition_penalty
        punished_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        pick_BV = torch.log_softmax(torch.where(seen_BV, punished_BV, logits_BV).float() / scale, -1)
    if params.allowed is not None:
        low, high = params.allowed
        whole_BV, pick_BV = pick_BV, torch.full_like(pick_BV, -torch.inf)
        pick_BV[:, low:high] = whole_BV[:, low:high]
    if params.temperature == 0:
        token_B = pick_BV.argmax(-1)
    else:
        token_B = _inverse_cdf(_truncate(pick_BV, params), uniform_tensor(keys_B, torch.full_like(keys_B, step)))
    return token_B, logp_BV.gather(1, token_B[:, None]).squeeze(1)


def _truncate(logp_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.top_k and params.top_k < logp_BV.shape[-1]:
        floor = logp_BV.topk(params.top_k, -1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < floor, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logp_BV.softmax(-1).sort(-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= params.top_p  # the token that crosses the line stays
        logp_BV = logp_BV.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return logp_BV


def _inverse_cdf(logp_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    if logp_BV.shape[-1] >= LARGE_VOCAB:
        return _inverse_cdf_in_chunks(logp_BV, u_B)
    total = logp_BV.double().exp().cumsum(-1)
    target = u_B[:, None] * total[:, -1:]
    index = torch.searchsorted(total, target, right=True).squeeze(1)
    last = (logp_BV > -torch.inf).double().cumsum(-1).argmax(-1)  # rounding must never pick a forbidden last token
    return torch.minimum(index, last)


def _inverse_cdf_in_chunks(logp_BV: torch.Tensor, u_B: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """The same choice for large vocabularies: the chunk by its sum, then the token within it, without a cumulative sum over all."""
    rows, vocab = logp_BV.shape
    p_BCK = F.pad(logp_BV, (0, -vocab % chunk), value=-torch.inf).exp().view(rows, -1, chunk)
    sums_BC = p_BCK.sum(-1, dtype=torch.float64)
    total_BC = sums_BC.cumsum(-1)
    target_B1 = u_B[:, None] * total_BC[:, -1:]
    number_BC = torch.arange(sums_BC.shape[1], device=logp_BV.device)
    last_B1 = torch.where(sums_BC > 0, number_BC, 0).amax(-1, keepdim=True)  # rounding must never pick a forbidden token
    chosen_B1 = torch.minimum(torch.searchsorted(total_BC, target_B1, right=True), last_B1)
    rest_B1 = target_B1 - (total_BC - sums_BC).gather(1, chosen_B1)
    inner_BK = p_BCK.gather(1, chosen_B1[..., None].expand(-1, -1, chunk)).squeeze(1)
    place_BK = torch.arange(chunk, device=logp_BV.device)
    last_B1 = torch.where(inner_BK > 0, place_BK, 0).amax(-1, keepdim=True)
    found_B1 = torch.minimum(torch.searchsorted(inner_BK.double().cumsum(-1), rest_B1, right=True), last_B1)
    return (chosen_B1 * chunk + found_B1).squeeze(1)
