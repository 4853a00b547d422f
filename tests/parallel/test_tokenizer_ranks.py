"""A tokenizer trained on two ranks takes the step that one rank takes on the whole batch."""

from __future__ import annotations

import pytest

from terrella.tests.parallel.pool import run_ranks


def train(parts: int) -> dict[str, list[float]]:
    """Two steps on this rank's share of four clips; runs on every rank."""
    import torch
    import torch.distributed as dist

    from terrella.core.config import OptimizerConfig
    from terrella.models.video.config import TokenizerConfig, TokenizerLoss
    from terrella.models.video.training import TokenizerTrainer

    config = TokenizerConfig(
        height=16, width=16, channels=[4, 8], latent=4, groups=2, levels=[5, 5], encoder_resnets=1, decoder_resnets=1
    )
    trainer = TokenizerTrainer(config, TokenizerLoss(lpips=0, adversary=0), OptimizerConfig(lr=1e-2), seed=1)
    clips = torch.rand(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    each = 4 // parts
    mine = clips[dist.get_rank() * each : (dist.get_rank() + 1) * each]
    norms = [trainer.step(mine)["grad_norm"] for _ in range(2)]
    return {"norms": norms, "weights": trainer.model.encoder.conv_in.weight.flatten().tolist()[:20]}


def test_two_ranks_equal_one() -> None:
    (one,) = run_ranks("terrella.tests.parallel.test_tokenizer_ranks:train", 1, parts=1)
    first, second = run_ranks("terrella.tests.parallel.test_tokenizer_ranks:train", 2, parts=2)
    assert first == second
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert first["weights"] == pytest.approx(one["weights"], abs=1e-5)
