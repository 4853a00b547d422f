"""Picture metrics, batched on whatever device the pictures are on, and the reward of a predicted clip.

Shapes: B clips, T frames, M = B * T pictures, 3 x H x W in [0, 1]. Every metric gives one number a picture, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Literal

import torch

from ...models.video.lpips import Backbone, find_weights, load_lpips
from ..video.config import Metric

LEARNT: dict[str, Backbone] = {"lpips": "vgg", "lpips_alex": "alex"}  # metrics that need a network's weights
BETTER_HIGH = frozenset({"psnr", "ssim"})
Aggregate = Literal["mean", "last", "discount"]
DISCOUNT = 0.9
LPIPS_PIXELS = 1 << 22  # of one piece, which bounds its memory


def require_weights(metrics: Iterable[str]) -> None:
    """Refuse metrics whose weights are not on this machine."""
    for name in metrics:
        if name in LEARNT:
            find_weights(LEARNT[name])


def mae(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() - b.float()).abs().flatten(1).mean(1)


def mse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() - b.float()).square().flatten(1).mean(1)


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Decibels for a range of 1; equal pictures get 80, not infinity."""
    return -10.0 * torch.log10(mse(a, b) + 1e-8)


def ssim(a: torch.Tensor, b: torch.Tensor, *, window: int = 11, sigma: float = 1.5) -> torch.Tensor:
    """Gaussian structural similarity of a range of 1, averaged over colours and places where the window fits."""
    if min(a.shape[-2:]) < window:
        raise ValueError(f"ssim: pictures of {a.shape[-2]} x {a.shape[-1]} are smaller than its window of {window}")
    blur_h, blur_w = (_blur(side, window, sigma, a.device) for side in a.shape[-2:])
    a, b = a.float(), b.float()
    # a product of matrices, as convolutions of so few channels are slow
    mu_a, mu_b, aa, bb, ab = (blur_h @ x @ blur_w.T for x in (a, b, a * a, b * b, a * b))
    c1, c2 = 0.01**2, 0.03**2
    va, vb, vab = aa - mu_a**2, bb - mu_b**2, ab - mu_a * mu_b
    value = ((2 * mu_a * mu_b + c1) * (2 * vab + c2)) / ((mu_a**2 + mu_b**2 + c1) * (va + vb + c2))
    return value.flatten(1).mean(1)


def _blur(side: int, window: int, sigma: float, device: torch.device) -> torch.Tensor:
    """[side - window + 1, side]: what a Gaussian window sees at each place where it fits."""
    x = torch.arange(side, device=device, dtype=torch.float32) - torch.arange(side - window + 1, device=device)[:, None]
    g = torch.exp(-((x - (window - 1) / 2) ** 2) / (2 * sigma**2)) * ((x >= 0) & (x < window))
    return g / g.sum(1, keepdim=True)


@lru_cache(maxsize=4)
def _lpips(net: Backbone, device: str) -> torch.nn.Module:
    model = load_lpips(net, device)
    if device.startswith("cuda"):
        # what its bf16 convolutions want there
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def lpips(a: torch.Tensor, b: torch.Tensor, net: Backbone = "vgg") -> torch.Tensor:
    """The perceptual distance, in pieces that bound its memory; bf16 convolutions on CUDA."""
    model = _lpips(net, str(a.device))
    piece = max(1, LPIPS_PIXELS // (a.shape[-1] * a.shape[-2]))
    out = []
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=a.is_cuda):
        for start in range(0, len(a), piece):
            pair = (x[start : start + piece].float() for x in (a, b))
            out.append(
                model(*(x.contiguous(memory_format=torch.channels_last) if a.is_cuda else x for x in pair)).float()
            )
    return torch.cat(out)


FUNCTIONS: dict[Metric, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mae": mae,
    "mse": mse,
    "psnr": psnr,
    "ssim": ssim,
    "lpips": lpips,
    "lpips_alex": lambda a, b: lpips(a, b, "alex"),
}


@torch.no_grad()
def frame_metrics(
    pred_BT3HW: torch.Tensor, true_BT3HW: torch.Tensor, names: tuple[Metric, ...]
) -> dict[str, torch.Tensor]:
    """Each metric as [B, T]."""
    B, T = pred_BT3HW.shape[:2]
    a, b = pred_BT3HW.flatten(0, 1), true_BT3HW.flatten(0, 1)
    return {name: FUNCTIONS[name](a, b).view(B, T) for name in names}


def aggregate(values_BT: torch.Tensor, how: Aggregate) -> torch.Tensor:
    """[B] from [B, T]: the mean over frames, the last frame, or a mean that weighs frame k by 0.9^k."""
    if how == "last":
        return values_BT[:, -1]
    if how == "mean":
        return values_BT.mean(1)
    weight_T = DISCOUNT ** torch.arange(values_BT.shape[1], device=values_BT.device, dtype=values_BT.dtype)
    return values_BT @ (weight_T / weight_T.sum())


def repetition(codes_BTN: torch.Tensor) -> torch.Tensor:
    """[B, T - 1]: whether a frame's codes all equal those of the frame before it."""
    return (codes_BTN[:, 1:] == codes_BTN[:, :-1]).all(-1)


def video_reward(
    metrics: Mapping[str, torch.Tensor],
    weights: Mapping[str, float],
    how: Aggregate = "mean",
    codes_BTN: torch.Tensor | None = None,
    repetition_penalty: float = 0.0,
) -> torch.Tensor:
    """[B] rewards: minus the weighted errors (similarities count positively), minus the penalised rate of repeated
    frames.

    `codes_BTN` begins with the last frame that was given, so that standing still from the start counts too.
    """
    signed = [
        (1.0 if name in BETTER_HIGH else -1.0) * weight * metrics[name] for name, weight in weights.items() if weight
    ]
    if not signed:
        raise ValueError("reward: every weight is 0; give at least one metric a weight")
    reward_B = aggregate(torch.stack(signed).sum(0), how)
    if repetition_penalty:
        if codes_BTN is None:
            raise ValueError("repetition_penalty: needs the codes of the frames")
        reward_B = reward_B - repetition_penalty * repetition(codes_BTN).float().mean(1)
    return reward_B
