"""The continuous batch: the same samples as waves, whatever enters when, in any number of pages, and greedily what
transformers says.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError, NumericsError
from terrella.models.config import ModelConfig
from terrella.models.paged_decode import token_bytes
from terrella.rl.multiturn import rollout_worlds
from terrella.rl.rollout import continuous, decode_step, embedded
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.prefix_tree import Pages
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.rl.rollout.test_embedded_sampler import CONFIG, weights

NAMED = weights()
PAGE = 4
WAVES = EmbeddedSampler(lambda: NAMED, CONFIG, version=lambda: 5, continuous=False)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PAGE", PAGE)


def stream(**options) -> EmbeddedSampler:
    return EmbeddedSampler(lambda: NAMED, CONFIG, version=lambda: 5, continuous=True, **options)


def gib(positions: int) -> float:
    return (positions + 0.5) * token_bytes(CONFIG, torch.float32) / 2**30


def same(one: list, other: list) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert isinstance(a, Sample) and isinstance(b, Sample)
        assert (a.ids, a.finish, a.weight_version, a.given) == (b.ids, b.finish, b.weight_version, b.given)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def mixed(n: int, **options) -> list[SampleRequest]:
    """Prompts of several lengths, groups of three, limits and temperatures that differ."""
    made = []
    for i in range(n):
        prompt = tuple((7 * (i // 3) + j) % 19 for j in range(1 + i // 3 % 5))
        params = SamplingParams(
            3 + i % 7, temperature=(0.0, 0.8, 1.0)[i % 3], allowed=(2, 11) if i % 4 == 0 else None, **options
        )
        forced = ((1, (i % 19, 3)), (2, (5,))) if i % 2 else ()
        made.append(SampleRequest(prompt, (4, i // 3, i % 3, 0), params, forced))
    return made


@pytest.mark.parametrize("page", [1, 4, 64])
def test_equal_to_waves(page, monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PAGE", page)
    asked = mixed(24)
    same(stream().generate(asked), WAVES.generate(asked))


def test_admission_one_by_one_equals_all_at_once() -> None:
    asked = mixed(17, stop_ids=(3, 8))
    whole = stream().generate(asked)
    assert {s.finish for s in whole} == {"stop", "length"}
    same(stream(cache_gib=gib(2 * PAGE - 1 + max(r.length for r in asked))).generate(asked), whole)  # room for one
    same(stream(cache_gib=gib(60)).generate(asked), whole)
    same(stream(max_batch=2).generate(asked), whole)
    same([stream().generate([request])[0] for request in asked[:6]], whole[:6])


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6}, {"repetition_penalty": 1.7}, {"top_k": 5, "repetition_penalty": 0.5}]
)
def test_cuts_and_penalties_equal_waves(options) -> None:
    asked = mixed(10, **options) + mixed(4)
    same(stream().generate(asked), WAVES.generate(asked))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_mixture_in_any_room(data) -> None:
    asked = []
    for i in range(data.draw(st.integers(1, 12))):
        limit = data.draw(st.integers(1, 20))
        prompt = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        places = sorted(data.draw(st.sets(st.integers(1, limit - 1), max_size=2))) if limit > 1 else []
        forced = tuple((at, tuple(data.draw(st.lists(st.integers(0, 18), min_size=1, max_size=3)))) for at in places)
        stop = data.draw(st.sampled_from([(), (1,), (2, 3, 4)]))
        asked.append(SampleRequest(prompt, (i,), SamplingParams(limit, stop_ids=stop), forced))
    room = (1 - -max(r.length for r in asked) // PAGE) * PAGE + data.draw(st.integers(0, 60))
    sampler, expected = stream(cache_gib=gib(room), keep=data.draw(st.booleans())), WAVES.generate(asked)
    for _ in range(2):  # the second time on kept pages
        same(sampler.generate(asked), expected)


def test_long_prompts_go_in_by_pieces(monkeypatch) -> None:
    prompt = tuple(i % 19 for i in range(40))
    asked = [SampleRequest(prompt[: 20 + i], (i,), SamplingParams(4), ((2, tuple(range(9))),)) for i in range(6)]
    expected = WAVES.generate(asked)
    monkeypatch.setattr(continuous, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(continuous, "ENTRY_TOKENS", 25)
    same(stream().generate(asked), expected)


def test_batch_invariant_samples_are_the_same_bits_in_any_batch() -> None:
    asked = mixed(6, stop_ids=(3,))
    whole = stream(batch_invariant=True).generate(asked)
    same(whole, WAVES.generate(asked))
    assert whole == stream(batch_invariant=True, cache_gib=gib(32)).generate(asked)
    assert whole[2:4] == stream(batch_invariant=True).generate(asked[2:4])


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_batch_invariant_samples_are_the_trainers_bits(experts: bool) -> None:
    (found,) = run_ranks("terrella.tests.rl.invariant_jobs:compare", 1, experts=experts)
    assert found["tokens"] == 51 and found["unequal"] == 0
    assert 0 < found["worst_without"] < 1e-5


def test_trained_adapters_keep_graphs_and_turns_of_a_rollout() -> None:
    (found,) = run_ranks("terrella.tests.rl.invariant_jobs:adapters", 1)
    assert all(rollout["reuse"] > 0.8 for rollout in found)  # the second turn finds the first
    assert all(rollout["used"] == found[0]["used"] and rollout["weights"] == found[0]["weights"] for rollout in found)
    assert len({rollout["sum"] for rollout in found}) == len(found)  # and the weights are the newest
    assert all(rollout["worst"] < 1e-4 for rollout in found)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_weights_that_are_loaded_within_a_step_are_those_of_the_next_sample(lora: bool) -> None:
    (found,) = run_ranks("terrella.tests.rl.invariant_jobs:loads", 1, lora=lora)
    assert len(found) == 3 and max(found) < 1e-4


def test_a_cache_too_small_and_nan_are_named() -> None:
    with pytest.raises(ConfigError, match="cache_gib"):
        stream(cache_gib=gib(5)).generate([SampleRequest((1, 2, 3), (0,), SamplingParams(8))])
    broken = dict(NAMED) | {"decoder.final_layernorm.weight": torch.full((CONFIG.hidden,), torch.nan)}
    with pytest.raises(NumericsError, match="not finite"):
        EmbeddedSampler(lambda: broken, CONFIG, continuous=True).generate(
            [SampleRequest((1,), (0,), SamplingParams(2))]
        )


def test_new_weights_are_used_at_once() -> None:
    named = {name: x.clone() for name, x in NAMED.items()}
    sampler = EmbeddedSampler(lambda: named, CONFIG, version=lambda: 5, continuous=True)
    asked = mixed(6)
    same(sampler.generate(asked), WAVES.generate(asked))
    named["output_layer.weight"] = named["output_layer.weight"].flip(0)
    other = EmbeddedSampler(lambda: named, CONFIG, version=lambda: 5, continuous=False)
    same(sampler.generate(asked), other.generate(asked))


def long_answers(**options) -> list[SampleRequest]:
    return [
        SampleRequest(
            tuple((5 * (i // 3) + j) % 19 for j in range(7)),
            (9, i),
            SamplingParams(20 + 7 * (i % 4), **options),
            ((18, (1, 2)),),
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("options", [{}, {"stop_ids": (6,)}, {"repetition_penalty": 1.4}])
def test_requests_are_begun_again_when_pages_run_out(options) -> None:
    asked = long_answers(**options)
    tight = stream(cache_gib=gib(60), keep=True)
    same(tight.generate(asked), WAVES.generate(asked))
    assert tight.rest()["time/preempted"] > 0


def test_begun_again_bit_for_bit_in_batch_invariant_mode() -> None:
    asked = [SampleRequest((1, 2, 3 + i), (9, i), SamplingParams(20)) for i in range(2)]
    tight = stream(cache_gib=gib(12 * PAGE), batch_invariant=True, keep=True)
    assert tight.generate(asked) == stream(batch_invariant=True).generate(asked)
    assert tight.rest()["time/preempted"] > 0


class Talk:
    """An episode of three turns: what was sampled goes back into the context, with an observation behind it."""

    OBSERVATION = (17, 2, 5, 11, 3)

    def __init__(self, number: int) -> None:
        self.prompt_id, self.sample_index = number // 2, number % 2
        self.ids = tuple((3 * self.prompt_id + j) % 19 for j in range(9))
        self.turns = 0

    def context(self) -> tuple[int, ...] | None:
        return self.ids if self.turns < 3 else None

    def receive(self, sample: Sample) -> None:
        self.ids += sample.ids + self.OBSERVATION
        self.turns += 1

    def score(self):
        return [], 1.0, {}


def test_episodes_keep_their_pages_over_their_turns() -> None:
    makers = [lambda i=i: Talk(i) for i in range(6)]
    params = SamplingParams(8)
    versions = [5]
    kept = EmbeddedSampler(lambda: NAMED, CONFIG, version=lambda: versions[0], continuous=True, keep=True)
    fresh = stream()
    found = rollout_worlds(kept, makers, params, 0)
    for one, other in zip(found, rollout_worlds(fresh, makers, params, 0), strict=True):
        assert [s.ids for s in one.sequences] == [s.ids for s in other.sequences]
        np.testing.assert_allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=2e-5)
    prompt, observation = 3 * 8, 6 * 2 * len(Talk.OBSERVATION)  # computed once a group; once a turn
    assert kept._use.stored == prompt + observation
    assert fresh._use.stored > 2 * (prompt + observation)
    versions[0] = 6  # other weights: nothing of before is used
    rollout_worlds(kept, makers, params, 0)
    assert kept._use.stored == 2 * (prompt + observation)
    assert kept.rest()["time/prompt_reuse"] > 0.7 and kept._room is None


def test_pages_hold_what_they_are_said_to_hold() -> None:
    """Against a plain record of what was written: what is found was written, and nobody writes where others read."""
    draw, pages = np.random.default_rng(0), Pages(40, 3)
    written: dict[tuple[int, int], int] = {}
    held: list[tuple[list[int], list[int]]] = []
    reused = copied = 0
    for _ in range(600):
        if held and draw.random() < 0.5:
            mine, ids = held.pop(draw.integers(len(held)))
            if draw.random() < 0.7:
                pages.learn(mine, ids)
            pages.release(mine)
            continue
        ids = draw.integers(0, 2, draw.integers(0, 14)).tolist()
        mine, copy = pages.find(ids)
        reused += len(mine)
        for i in range(len(mine) * 3):
            assert written[mine[i // 3], i % 3] == ids[i]
        start = len(mine) * 3
        if copy is not None:
            copied += 1
            for i in range(copy[1]):
                assert written[copy[0], i] == ids[start + i]
            pages.release([copy[0]])
        missing = len(ids) // 3 + 1 - len(mine)
        if pages.free < missing:
            pages.release(mine)
            continue
        for _ in range(missing):
            page = pages.take()
            assert page is not None and page > 0 and all(page not in other for other, _ in held) and page not in mine
            mine.append(page)
        for i in range(start, len(ids)):
            written[mine[i // 3], i % 3] = ids[i]
        held.append((mine, ids))
    assert reused > 50 and copied > 50
    pages.forget_all()
    for mine, _ in held:
        pages.release(mine)
    assert sorted(pages.take() or 0 for _ in range(39)) == list(range(1, 40)) and pages.take() is None


def test_batch_sizes() -> None:
    assert [decode_step.bucket_of(n, 2048) for n in (1, 8, 9, 200, 513, 1025, 2000, 2048)] == [
        8,
        8,
        16,
        256,
        640,
        1280,
        2048,
        2048,
    ]
    assert decode_step.bucket_of(300, 300) == 300


def test_greedy_equals_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from terrella.models.families import parameter_names, write_hf_config
    from terrella.models.hf import weight_source

    config = ModelConfig(
        family="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64, max_positions=64, qkv_bias=True, tied=True,  # noqa: E501
        init_std=0.2,
    )  # fmt: skip
    named = write_hf_config(config, "float32") | {"initializer_range": 0.2}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(named.pop("model_type"), **named)
    )
    model.save_pretrained(tmp_path)
    source, _ = weight_source(tmp_path, config)
    tensors = {name: source(name) for name in parameter_names(config)}
    prompts = [(5, 9, 2), (1,), (7, 7, 30, 41, 2, 8)]
    asked = [SampleRequest(prompt, (0,), SamplingParams(12, temperature=0.0)) for prompt in prompts]
    for request, sample in zip(
        asked, EmbeddedSampler(lambda: tensors, config, continuous=True).generate(asked), strict=True
    ):
        ids = torch.tensor([request.ids])
        mask = torch.ones_like(ids)
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert isinstance(sample, Sample) and list(sample.ids) == theirs[0, len(request.ids) :].tolist()
