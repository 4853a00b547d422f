"""Imagined clips: what is sampled and forced, how a batch is judged, and what evaluation makes of it."""

import numpy as np
import pytest
import torch

from terrella.core.errors import TerrellaError
from terrella.data.trajectory import Role
from terrella.models.config import ModelConfig
from terrella.models.families import write_hf_config
from terrella.models.hf import hf_tensors
from terrella.rl.algorithms import common
from terrella.rl.rewards.video import mae
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
from terrella.rl.video import evaluate
from terrella.rl.video.imagine import ImaginedClip, Judge, judge_by_clip, to_frames, to_pictures
from terrella.tests.data.helpers import policy_mask
from terrella.tests.rl.rollout.test_forced_tokens import CONFIG, NAMED
from terrella.tests.rl.video.helpers import COMPRESSIVE, FRAME, Oracle, decoder_of, tasks_of

BOTH = pytest.mark.parametrize("config", [FRAME, COMPRESSIVE], ids=["single", "multi"])


def test_pixels_round_trip() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5, 3), dtype=np.uint8)
    assert (to_frames(to_pictures(frames, "cpu")) == frames).all()


@BOTH
def test_true_tokens_score_as_the_tokenizer_itself(config, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(config, history=2, horizon=2)
    score = decoder.score
    tasks = tasks_of(decoder, 3)
    judge = Judge(decoder, {"mae": 1.0})
    oracle = Oracle(tasks, decoder.layout)
    clips = [ImaginedClip(t, k, decoder.layout, judge) for t in tasks for k in range(2)]
    judge_by_clip(clips)
    decoded = list[int]()
    monkeypatch.setattr(decoder, "score", lambda rows, *rest: decoded.append(len(rows)) or score(rows, *rest))
    trajectories = rollout(oracle, clips, SamplingParams(decoder.layout.sampled), seed=0)
    assert decoded == [2, 2, 2]  # the samples of a clip at once
    for t, clip in zip(trajectories, clips, strict=True):
        pictures, _ = decoder.pictures(clip.task.row_L[None])
        want = -mae(pictures[0], to_pictures(clip.task.truth_THW3, "cpu")).mean()
        assert t.reward == pytest.approx(float(want), abs=1e-6)
        assert t.info["mae"] == pytest.approx(-t.reward, abs=1e-6)
        row = np.array(t.sequences[0].ids)
        assert (row == clip.task.row_L[: len(row)]).all()
        mask = policy_mask(decoder.layout)[: len(row)]
        assert (common.action_mask(t.sequences[0]) == mask).all()  # forced actions carry no policy term
        assert {Role(r) for r in np.array(t.sequences[0].roles)[~mask]} <= {Role.PROMPT, Role.OBSERVATION}
    assert oracle.calls == 1 and judge.pictures == 6 * 2


@BOTH
def test_worse_samples_get_less(config) -> None:
    decoder = decoder_of(config)
    tasks = tasks_of(decoder, 2)
    judge = Judge(decoder, {"mae": 0.0, "mse": 1.0})
    clips = [ImaginedClip(t, k, decoder.layout, judge) for t in tasks for k in range(2)]
    judge_by_clip(clips)
    params = SamplingParams(decoder.layout.sampled)
    many = decoder.layout.frame_tokens * decoder.layout.horizon
    trajectories = rollout(Oracle(tasks, decoder.layout, (0, many)), clips, params, seed=0)
    rewards = np.array([t.reward for t in trajectories]).reshape(2, 2)
    assert (rewards[:, 0] != rewards[:, 1]).all()


def test_repetition_is_seen_and_punished() -> None:
    decoder = decoder_of(COMPRESSIVE)
    (task,) = tasks_of(decoder, 1)
    row = task.row_L.copy()
    frames = [s for s in decoder.layout.segments if s.part == "frame"]
    for s in frames[1:]:
        row[s.start : s.stop] = row[frames[0].start : frames[0].stop]
    still = type(task)(0, row, task.truth_THW3, task.given_HW3)
    for penalty in (0.0, 0.5):
        judge = Judge(decoder, {"mae": 1.0}, repetition_penalty=penalty)
        clip = ImaginedClip(still, 0, decoder.layout, judge)
        (t,) = rollout(Oracle([still], decoder.layout), [clip], SamplingParams(decoder.layout.sampled), seed=0)
        assert t.info["repeats"] is True
        assert t.reward == pytest.approx(-t.info["mae"] - penalty, abs=1e-6)  # every frame repeats the one before


def test_ids_that_are_no_codes_are_clamped_for_the_picture_only() -> None:
    decoder = decoder_of(COMPRESSIVE)
    (task,) = tasks_of(decoder, 1)
    row = task.row_L.copy()
    at = decoder.layout.prompt
    row[at] = decoder.layout.eos
    pictures, codes = decoder.pictures(row[None])
    assert (
        codes[0, 1, 0] == decoder.layout.codebook - 1
        and torch.isfinite(pictures).all()
        and row[at] == decoder.layout.eos
    )


def test_a_metric_that_is_no_number_is_named() -> None:
    decoder = decoder_of(COMPRESSIVE)
    tasks = tasks_of(decoder, 2)
    with torch.no_grad():
        next(iter(decoder.tokenizer.cond_decoder.parameters())).fill_(float("nan"))
    with pytest.raises(TerrellaError, match="'mae' is NaN in 6 of 6"):
        evaluate.score_rows(np.stack([t.row_L for t in tasks]), tasks, decoder, ("mae",))


def test_evaluation_and_rejection() -> None:
    decoder = decoder_of(COMPRESSIVE)
    tasks = tasks_of(decoder, 4)
    names = ("mae", "psnr")
    params = SamplingParams(decoder.layout.sampled)
    right = evaluate.imagine(Oracle(tasks, decoder.layout), tasks, decoder, names, params, 0, 0)
    ceiling = evaluate.score_rows(np.stack([t.row_L for t in tasks]), tasks, decoder, names)
    assert np.allclose(right.metrics["mae"], ceiling.metrics["mae"], atol=1e-6) and right.metrics["mae"].shape == (4, 3)
    wrong = evaluate.imagine(Oracle(tasks, decoder.layout, (3,)), tasks, decoder, names, params, 0, 0)
    both = [wrong, right]
    assert evaluate.best_of(both, "mae", 2).value <= evaluate.best_of(both, "mae", 1).value
    assert evaluate.best_of(both, "psnr", 2).value >= evaluate.best_of(both, "psnr", 1).value
    still = evaluate.copy_baseline(tasks, names, "cpu")
    want = np.abs(tasks[0].truth_THW3[0].astype(float) - tasks[0].given_HW3).mean() / 255
    assert still["mae"][0, 0] == pytest.approx(want, abs=1e-5)
    gap_THW3 = np.abs(tasks[0].truth_THW3.astype(float) - tasks[0].given_HW3) / 255
    moved_THW = gap_THW3.max(-1) > evaluate.MOVED_BY
    assert still[evaluate.MOVED][0, 0] == pytest.approx(gap_THW3[0][moved_THW[0]].mean(), abs=1e-5)
    assert right.metrics[evaluate.MOVED].shape == (4, 3) and evaluate.clip_means(both, evaluate.MOVED).shape == (4,)
    calm = evaluate.over_frames(np.array([[1.0, np.nan], [np.nan, np.nan]]))  # no pixel moved in three of four frames
    assert calm[0] == 1.0 and np.isnan(calm[1]) and evaluate.estimate(calm).n == 1
    stuck = evaluate.ClipScores(wrong.metrics, np.array([True, False, True, False]), wrong.rows)
    mended = evaluate.without_repeats(stuck, 3, Oracle(tasks, decoder.layout), tasks, decoder, names, params, 0)
    assert (mended.repeats_C[[0, 2]] == right.repeats_C[[0, 2]]).all() and not mended.repeats_C[[1, 3]].any()
    assert np.allclose(mended.metrics["mae"][[0, 2]], right.metrics["mae"][[0, 2]], atol=1e-6)
    assert np.allclose(mended.metrics["mae"][[1, 3]], wrong.metrics["mae"][[1, 3]], atol=1e-6)


def test_greedy_clip_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    decoder = decoder_of(COMPRESSIVE)
    (task,) = tasks_of(decoder, 1)
    layout = decoder.layout
    config = ModelConfig(
        layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=layout.vocab, max_positions=256
    )
    g = torch.Generator().manual_seed(1)
    named = dict(NAMED)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        named[name] = torch.randn(config.padded_vocab, CONFIG.hidden, generator=g) * 0.5
    params = SamplingParams(layout.sampled, temperature=0.0)
    request = SampleRequest(layout.prompt_ids(task.row_L), (0, 0, 0, 0), params, layout.forced(task.row_L))
    (sample,) = EmbeddedSampler(lambda: named, config).generate([request])
    told = write_hf_config(config, "float32")
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{k: v for k, v in told.items() if k != "model_type"}))
    hf.load_state_dict(dict(hf_tensors(config, named.items(), "fp32")))
    ids, forced = list(request.ids), dict(request.forced)
    for count in range(1, layout.sampled + 1):
        with torch.no_grad():
            ids.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
        if count in forced and count < layout.sampled:
            ids += forced[count]
    assert tuple(ids[len(request.ids) :]) == sample.ids
