"""Forced tokens, repetition penalty and the span driver, on the embedded sampler's real decoder."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.data.trajectory import Invalid, Role
from terrella.models.config import ModelConfig
from terrella.models.decode import Decoder, KVCache, decode_weights
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.episodes import sampled_sequence
from terrella.rl.rollout.forced_spans import Piece, generate_in_spans
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams

CONFIG = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=17, max_positions=64)


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    p, h = "decoder.layers.0.", CONFIG.hidden
    shapes = {
        "embedding.word_embeddings.weight": (CONFIG.padded_vocab, h),
        "output_layer.weight": (CONFIG.padded_vocab, h),
        p + "self_attention.linear_qkv.weight": ((CONFIG.heads + 2 * CONFIG.kv_heads) * CONFIG.head_dim, h),
        p + "self_attention.linear_proj.weight": (h, CONFIG.heads * CONFIG.head_dim),
        p + "mlp.linear_fc1.weight": (2 * CONFIG.ffn, h),
        p + "mlp.linear_fc2.weight": (h, CONFIG.ffn),
    }
    named = {name: torch.randn(*shape, generator=g) * 0.2 for name, shape in shapes.items()}
    ones = ("decoder.final_layernorm.weight", p + "input_layernorm.weight", p + "pre_mlp_layernorm.weight")
    return named | {name: torch.ones(h) for name in ones}


NAMED = weights()
SAMPLER = EmbeddedSampler(lambda: NAMED, CONFIG, version=lambda: 3)


def full_logprobs(ids: tuple[int, ...]) -> torch.Tensor:
    decoder = Decoder(decode_weights(NAMED, CONFIG), CONFIG, 64)
    hidden = decoder.forward(torch.tensor([ids]), KVCache(CONFIG, 1, 64, decoder.weights.embedding))[0]
    return torch.log_softmax((hidden @ decoder.weights.head.T)[:, :17], -1)


def check(request: SampleRequest, sample: Sample) -> None:
    """Forced tokens stand where they were asked, and every sampled log-prob is the model's own in that very context."""
    logp, start, count, spans = full_logprobs(request.ids + sample.ids), len(request.ids) - 1, 0, dict(request.forced)
    expected: list[bool] = []
    for _ in range(sum(not g for g in sample.given)):
        count += 1
        expected.append(False)
        if count in spans and count < sum(not g for g in sample.given):
            expected += [True] * len(spans[count])
    assert list(sample.given) == expected
    for i, (token, logprob, forced) in enumerate(zip(sample.ids, sample.logprobs, sample.given, strict=True)):
        assert logprob == (0.0 if forced else pytest.approx(float(logp[start + i, token]), abs=1e-5))
    sequence = sampled_sequence(request.ids, sample)
    assert [r == Role.ACTION for r in sequence.roles[len(request.ids) :]] == [not g for g in sample.given]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_masks_cover_exactly_the_sampled_tokens(data) -> None:
    limit = data.draw(st.integers(2, 9))
    places = sorted(data.draw(st.sets(st.integers(1, limit - 1), max_size=3)))
    forced = tuple((at, tuple(data.draw(st.lists(st.integers(0, 16), min_size=1, max_size=3)))) for at in places)
    stop = data.draw(st.sampled_from([(), (2, 3, 4)]))
    request = SampleRequest(
        (5, 6), (0, data.draw(st.integers(0, 99)), 0, 0), SamplingParams(limit, stop_ids=stop), forced
    )
    (sample,) = SAMPLER.generate([request])
    check(request, sample)
    assert sample.weight_version == 3


def test_forced_spans_in_a_batch_equal_those_alone() -> None:
    params = SamplingParams(6)
    asked = [SampleRequest((1, 2 + i % 2), (9, i, 0, 0), params, ((2, (i, i + 1)), (4, (7,)))) for i in range(6)]
    together = SAMPLER.generate(asked + [SampleRequest((1, 2), (9, 50, 0, 0), params)])
    assert [s.ids for s in together[:6]] == [SAMPLER.generate([r])[0].ids for r in asked]
    assert together[6].forced is None


def test_span_driver_gives_plain_engines_forced_tokens() -> None:
    """The same check through continuations of the embedded sampler that know nothing of forced tokens."""
    calls = []

    def plain(pieces):
        calls.append(len(pieces))
        asked = [
            SampleRequest(p.ids, (p.seed,), SamplingParams(p.limit, stop_ids=p.request.params.stop_ids)) for p in pieces
        ]
        return [Piece(s.ids, s.logprobs, s.finish) for s in SAMPLER.generate(asked)]

    asked = [
        SampleRequest((1, 2), (9, i, 0, 0), SamplingParams(6, stop_ids=(3,)), ((2, (8, 9)),) if i % 2 else ())
        for i in range(8)
    ]
    for request, sample in zip(asked, generate_in_spans(asked, plain, 3), strict=True):
        check(request, sample)
    assert calls[0] == 8 and calls[1] <= 4
    assert generate_in_spans(asked[:1], lambda p: [Invalid("down")], 0) == [Invalid("down")]


def test_bad_places_and_repetition_penalty() -> None:
    with pytest.raises(ValueError, match="forced"):
        SampleRequest((1,), (0,), SamplingParams(4), ((4, (1,)),))
    with pytest.raises(ValueError, match="forced"):
        SampleRequest((1,), (0,), SamplingParams(4), ((2, ()),))
    free = SampleRequest((1, 2), (0, 1), SamplingParams(12, temperature=0.0))
    punished = SampleRequest((1, 2), (0, 1), SamplingParams(12, temperature=0.0, repetition_penalty=1e6))
    plain, varied = SAMPLER.generate([free, punished])
    assert len(set(varied.ids)) > len(set(plain.ids))
    logp = full_logprobs(punished.ids + varied.ids)
    # not penalised
    assert varied.logprobs == pytest.approx([float(logp[1 + i, t]) for i, t in enumerate(varied.ids)], abs=1e-5)
