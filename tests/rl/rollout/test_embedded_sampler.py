"""The embedded sampler: the same numbers as a full forward, and randomness that belongs to the request."""

import pytest
import torch

from terrella.core.errors import ConfigError, NumericsError
from terrella.core.rng import key_tensor
from terrella.models.config import ModelConfig
from terrella.models.decode import Decoder, KVCache, decode_weights
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
from terrella.rl.rollout.token_choice import choose

CONFIG = ModelConfig(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=19,
    max_positions=64,
    qkv_bias=True,
    qk_norm=True,
)


def weights(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.3

    h, d = config.hidden, config.head_dim
    qkv = (config.heads + 2 * config.kv_heads) * d
    named = {
        "embedding.word_embeddings.weight": random(config.padded_vocab, h),
        "decoder.final_layernorm.weight": 1 + random(h),
    }
    named["output_layer.weight"] = random(config.padded_vocab, h)
    for i in range(config.layers):
        p = f"decoder.layers.{i}."
        named |= {
            p + "input_layernorm.weight": 1 + random(h),
            p + "pre_mlp_layernorm.weight": 1 + random(h),
            p + "self_attention.linear_qkv.weight": random(qkv, h),
            p + "self_attention.linear_qkv.bias": random(qkv),
            p + "self_attention.q_layernorm.weight": 1 + random(d),
            p + "self_attention.k_layernorm.weight": 1 + random(d),
            p + "self_attention.linear_proj.weight": random(h, config.heads * d),
            p + "mlp.linear_fc1.weight": random(2 * config.ffn, h),
            p + "mlp.linear_fc2.weight": random(h, config.ffn),
        }
    return named


def sampler(**options) -> EmbeddedSampler:
    named = weights()
    return EmbeddedSampler(lambda: named, CONFIG, **options)


def requests(n: int, params: SamplingParams, length: int = 5) -> list[SampleRequest]:
    return [
        SampleRequest(tuple((7 * i + j) % 19 for j in range(length + i % 3)), (1, i, 0, 0), params) for i in range(n)
    ]


def full_logprobs(ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    decoder = Decoder(decode_weights(weights(), CONFIG), CONFIG, 64)
    cache = KVCache(CONFIG, 1, 64, decoder.weights.embedding)
    hidden = decoder.forward(torch.tensor([ids]), cache)[0]
    return torch.log_softmax((hidden @ decoder.weights.head.T)[:, :19] / temperature, -1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_full_forward(temperature: float) -> None:
    asked = requests(6, SamplingParams(max_new_tokens=8, temperature=temperature))
    for request, sample in zip(asked, sampler().generate(asked), strict=True):
        logp = full_logprobs(request.ids + sample.ids, temperature or 1.0)
        first = len(request.ids) - 1
        expected = [float(logp[first + i, token]) for i, token in enumerate(sample.ids)]
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)
        if temperature == 0.0:
            assert all(int(logp[first + i].argmax()) == token for i, token in enumerate(sample.ids))


def test_samples_depend_on_the_key_and_not_on_the_batch() -> None:
    params = SamplingParams(max_new_tokens=6)
    asked = requests(9, params)
    together = sampler().generate(asked)
    assert [s.ids for s in together] == [sampler(max_batch=2).generate([r])[0].ids for r in asked]
    twins = [SampleRequest(asked[0].ids, (1, 0, k, 0), params) for k in range(8)]
    assert len({s.ids for s in sampler().generate(twins)}) > 4


def test_stop_ids_end_a_row_and_leave_the_others() -> None:
    free = sampler().generate(requests(8, SamplingParams(max_new_tokens=12)))
    stop = free[0].ids[3]
    stopped = sampler().generate(requests(8, SamplingParams(max_new_tokens=12, stop_ids=(stop,))))
    for whole, cut in zip(free, stopped, strict=True):
        end = whole.ids.index(stop) + 1 if stop in whole.ids else 12
        assert cut.ids == whole.ids[:end] and cut.finish == ("stop" if stop in whole.ids else "length")


def test_frequencies_follow_the_distribution_and_truncation_holds() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, 4)
    keys = key_tensor((i,) for i in range(20_000))
    token, logp = choose(logits, keys, 0, SamplingParams(1))
    counts = torch.bincount(token, minlength=4) / 20_000
    assert torch.allclose(counts, torch.softmax(logits[0], -1), atol=0.012)
    assert torch.allclose(logp, torch.log_softmax(logits[0], -1)[token])
    for params, allowed in (
        (SamplingParams(1, top_k=2), {0, 1}),
        (SamplingParams(1, top_p=0.6), {0}),
        (SamplingParams(1, top_p=0.7), {0, 1}),
        (SamplingParams(1, allowed=(1, 3)), {1, 2}),
    ):
        token, logp = choose(logits, keys, 0, params)
        assert set(token.tolist()) == allowed
        assert torch.allclose(logp, torch.log_softmax(logits[0], -1)[token])  # of the untruncated distribution


def test_padding_rows_of_the_head_are_never_sampled() -> None:
    assert CONFIG.padded_vocab > CONFIG.vocab
    named = weights()
    named["output_layer.weight"][19:] = 100.0
    drawn = EmbeddedSampler(lambda: named, CONFIG).generate(requests(8, SamplingParams(max_new_tokens=10)))
    assert max(max(s.ids) for s in drawn) < 19


def test_nan_and_overlong_requests_are_named() -> None:
    named = weights()
    named["decoder.final_layernorm.weight"][0] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        EmbeddedSampler(lambda: named, CONFIG).generate(requests(1, SamplingParams(max_new_tokens=2)))
    with pytest.raises(ConfigError, match="max_positions = 64"):
        sampler().generate(requests(1, SamplingParams(max_new_tokens=60)))


def test_choice_in_a_large_vocabulary_is_the_plain_inverse(monkeypatch) -> None:
    from terrella.kernels import sample

    logits = torch.randn(400, 5000, generator=torch.Generator().manual_seed(0)) * 3
    keys = key_tensor((i,) for i in range(400))
    for params in (
        SamplingParams(1),
        SamplingParams(1, top_k=3),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, allowed=(1030, 1033)),
    ):
        fast, _ = choose(logits, keys, 0, params)
        with monkeypatch.context() as plain:
            plain.setattr(sample, "LARGE_VOCAB", 10**9)
            slow, _ = choose(logits, keys, 0, params)
        assert (fast == slow).float().mean() > 0.99  # fp32 and fp64 sums may part at a boundary
        if params.allowed:
            assert int(fast.min()) >= 1030 and int(fast.max()) < 1033
