"""Token layouts: lengths of the published ones, offsets, masks, where actions stand, and the way back."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from terrella.data.trajectory import Role
from terrella.data.video_actions import RT1_RANGES, ActionBins, quantile_ranges
from terrella.data.video_layout import VideoLayout
from terrella.rl.rollout.sampler import SampleRequest, SamplingParams, interleave
from terrella.tests.data.helpers import RT1_MULTI, RT1_SINGLE, policy_mask

LAYOUTS = {
    "single": RT1_SINGLE,
    "multi": RT1_MULTI,
    "long": VideoLayout(
        codebook=64,
        frame_tokens=4,
        context_tokens=9,
        history=2,
        horizon=11,
        markers=False,
        action_dims=3,
        action_bins=16,
    ),
}


def clip(layout: VideoLayout, seed: int = 0, rows: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, layout.codebook, (rows, layout.frames, layout.frame_tokens))
    actions = rng.integers(0, layout.action_bins, (rows, layout.frames, layout.action_dims))
    return (
        frames,
        actions,
        rng.integers(0, layout.codebook, (rows, layout.context_tokens)) if layout.context_tokens else None,
    )


def test_published_lengths_and_vocabularies() -> None:
    assert (RT1_SINGLE.total, RT1_SINGLE.prompt, RT1_SINGLE.response, RT1_SINGLE.vocab) == (1654, 1333, 321, 4633)
    assert (RT1_MULTI.total, RT1_MULTI.prompt, RT1_MULTI.response, RT1_MULTI.vocab) == (2024, 1373, 651, 9008)
    assert [RT1_SINGLE.ids_of(p) for p in ("frame", "action", "bos", "eos")] == [
        (0, 4375),
        (4375, 4631),
        (4631, 4632),
        (4632, 4633),
    ]
    assert [RT1_MULTI.ids_of(p) for p in ("frame", "context", "action")] == [(0, 4375), (4375, 8750), (8750, 9006)]
    assert RT1_MULTI.response == 7 * (80 + 13) and RT1_MULTI.sampled == 7 * 80


def test_masks_of_the_published_layouts() -> None:
    single = RT1_SINGLE.loss_mask_L
    assert single.sum() == 322 and not single[:1332].any() and single[1332:].all()  # bos, 320 codes, eos
    assert policy_mask(RT1_SINGLE).sum() == 321 and not policy_mask(RT1_SINGLE)[1332]
    multi = RT1_MULTI.loss_mask_L
    assert not multi[:1373].any()
    by_frame = multi[1373:].reshape(7, 93)
    assert by_frame[:, :80].all() and not by_frame[:, 80:].any()
    assert (policy_mask(RT1_MULTI) == multi).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_assembled_and_taken_apart(name: str) -> None:
    layout = LAYOUTS[name]
    frames, actions, context = clip(layout)
    rows = layout.assemble(frames, actions, context)
    assert rows.shape == (2, layout.total) and rows.min() >= 0 and rows.max() < layout.vocab
    assert (layout.take(rows, "frame") == frames).all()
    shown = layout.take(rows, "action")
    assert (shown == actions[:, : shown.shape[1]]).all()
    if context is not None:
        assert (layout.take(rows, "context") == context).all()
    assert sum(part["tokens"] for part in layout.describe()) == layout.total
    sequence = layout.sequence(rows[0])
    assert [r == Role.STATE for r in sequence.roles] == layout.loss_mask_L.tolist()


def test_actions_stand_after_the_frame_they_are_taken_in() -> None:
    frames, actions, context = clip(RT1_MULTI)
    row = RT1_MULTI.assemble(frames, actions, context)[0]
    for t in range(8):
        at = 1280 + t * 93
        assert (row[at : at + 80] == frames[0, t]).all() and (row[at + 80 : at + 93] == actions[0, t] + 8750).all()
    frames, actions, _ = clip(RT1_SINGLE)
    row = RT1_SINGLE.assemble(frames, actions)[0]
    assert (row[333 * 3 + 320 : 333 * 4] == actions[0, 3] + 4375).all() and row[1332] == 4631 and row[-1] == 4632


@pytest.mark.parametrize("name", LAYOUTS)
def test_sampling_with_forced_actions_gives_the_sequence_back(name: str) -> None:
    layout = LAYOUTS[name]
    row = layout.assemble(*clip(layout))[0]
    forced = layout.forced(row)
    assert len(forced) == layout.horizon - 1
    request = SampleRequest(layout.prompt_ids(row), (1,), SamplingParams(layout.sampled), forced)
    sampled = [int(i) for i, mine in zip(row, policy_mask(layout), strict=True) if mine]
    sample = interleave(sampled, [0.0] * len(sampled), request, "length", 0)
    whole = np.array([*request.ids, *sample.ids])
    assert (whole == row[: len(whole)]).all()
    assert layout.total - len(whole) == (0 if layout.markers else layout.action_dims)  # the last action has no effect
    assert [not given for given in sample.given] == policy_mask(layout)[layout.prompt : len(whole)].tolist()
    assert layout.take(whole[None], "frame").shape == (1, layout.frames, layout.frame_tokens)


def test_ids_outside_a_part_are_refused_or_clamped() -> None:
    rows = RT1_MULTI.assemble(*clip(RT1_MULTI))
    rows[0, 1373] = 9007
    with pytest.raises(ValueError, match="frame: ids must lie in 0"):
        RT1_MULTI.take(rows, "frame")
    assert RT1_MULTI.take(rows, "frame", clamp=True)[0, 1, 0] == 4374
    frames, actions, context = clip(RT1_MULTI)
    with pytest.raises(ValueError, match="context"):
        RT1_MULTI.assemble(frames, actions)
    frames[0, 0, 0] = 4375
    with pytest.raises(ValueError, match="frame codes"):
        RT1_MULTI.assemble(frames, actions, context)


def test_action_bins() -> None:
    bins = ActionBins(RT1_RANGES)
    low, high = np.array(RT1_RANGES).T
    assert (bins.encode(low[None]) == 0).all() and (bins.encode(high[None]) == 255).all()
    assert (bins.encode(low[None] - 5) == 0).all() and (bins.encode(high[None] + 5) == 255).all()
    codes = np.random.default_rng(0).integers(0, 256, (50, 13))
    assert (bins.encode(bins.decode(codes)) == codes).all()
    with pytest.raises(ValueError, match="not finite"):
        bins.encode(np.full((1, 13), np.nan))
    outlier = np.concatenate([np.random.default_rng(1).normal(size=(5000, 1)), [[1000.0]]])
    assert quantile_ranges(outlier)[0][1] < 10


def test_rt1_bins_are_those_the_released_models_were_trained_on() -> None:
    """The release counts in fp32: against its formula in torch, on actions all over the ranges and on their corners."""
    bins, ranges = ActionBins(RT1_RANGES, single=True), torch.tensor(RT1_RANGES, dtype=torch.float32)
    rng = np.random.default_rng(2)
    low, high = np.array(RT1_RANGES).T
    actions = np.concatenate(
        [rng.uniform(low - 0.1, high + 0.1, (50_000, 13)), np.zeros((1, 13)), low[None], high[None]]
    ).astype(np.float32)
    share = torch.clip((torch.from_numpy(actions) - ranges[:, 0]) / (ranges[:, 1] - ranges[:, 0] + 1e-8), 0, 1)
    wanted = torch.floor(share * 256).to(torch.int32).clip(0, 255).numpy()
    assert (bins.encode(actions) == wanted).all()
    assert bins.encode(np.zeros((1, 13)))[0, 3] == 128 and ActionBins(RT1_RANGES).encode(np.zeros((1, 13)))[0, 3] == 127


def test_rt1_ranges_are_the_released_file_s() -> None:
    path = Path(os.environ.get("TERRELLA_SHARED_DATA", "")) / "rt1" / "frac_action_ranges.pth"
    if not os.environ.get("TERRELLA_SHARED_DATA") or not path.is_file():
        pytest.skip("TERRELLA_SHARED_DATA is not set")
    assert torch.equal(torch.load(path, weights_only=True), torch.tensor(RT1_RANGES, dtype=torch.float32))
