"""Tokenizer training: L1 and perceptual distance, an adversary later on; data-parallel by averaging gradients.

Shapes: B clips, T frames, 3 x H x W pictures in [0, 1].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.config import OptimizerConfig, learning_rate
from ...core.errors import ConfigError, NumericsError
from ...core.files import load_tensors, save_tensors
from .config import TokenizerConfig, TokenizerLoss
from .discriminator import PatchDiscriminator, gradient_penalty, hinge_loss, layers_for
from .lpips import load_lpips
from .tokenizer import VideoTokenizer, build_tokenizer, utilisation

MOVED = 0.1  # a difference in some colour that is more than shading


class TokenizerTrainer:
    """One rank's tokenizer with its optimizer, and its adversary where the loss has one."""

    def __init__(
        self,
        config: TokenizerConfig,
        loss: TokenizerLoss,
        optimizer: OptimizerConfig,
        *,
        device: torch.device | str = "cpu",
        bf16: bool = False,
        seed: int = 0,
        still: torch.Tensor | None = None,
    ) -> None:
        if loss.moved and not config.still:
            raise ConfigError("moved: a weight needs env.tokenizer.still, so that there is a picture to differ from")
        torch.manual_seed(seed)  # equal weights on every rank
        self.loss, self.schedule, self.device, self.bf16 = loss, optimizer, torch.device(device), bf16
        self.model: VideoTokenizer = build_tokenizer(config).to(self.device).train()
        if self.model.still is not None and still is not None:
            self.model.still.data.copy_(still)
        adam = {
            "betas": optimizer.betas,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "lr": optimizer.lr,
            "fused": True,
        }
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **adam)
        self.perceptual = load_lpips(loss.net, self.device) if loss.lpips else None
        self.adversary = self.adversary_optimizer = None
        if loss.adversary:
            self.adversary = PatchDiscriminator(layers_for(config.height, config.width)).to(self.device).train()
            self.adversary_optimizer = torch.optim.AdamW(self.adversary.parameters(), **adam)
        self.step_number = 0

    def step(
        self, frames_BT3HW: torch.Tensor, context_B3HW: torch.Tensor | None = None, use_of_codes: bool = True
    ) -> dict[str, float]:
        """One update of the tokenizer, and one of the adversary once it takes part."""
        torch.manual_seed(_dropout_seed(self.step_number))
        fights = self.adversary is not None and self.step_number >= self.loss.adversary_from
        with self._autocast(), torch.backends.mkldnn.flags(enabled=False):  # see _update
            made = self.model(frames_BT3HW, context_B3HW)
        fake, real = made.frames_BT3HW.flatten(0, 1).float(), frames_BT3HW.flatten(0, 1)
        values: dict[str, torch.Tensor] = {"l1": (fake - real).abs().mean()}
        given = context_B3HW if made.context_B3HW is not None else None
        total = self.loss.l1 * self._weighted(fake, real, given)
        if self.perceptual is not None:
            values["lpips"] = self._distance(fake, real)
            total = total + self.loss.lpips * values["lpips"]
        if made.context_B3HW is not None and given is not None:
            context = made.context_B3HW.float()
            values["context_l1"] = (context - given).abs().mean()
            total = total + self.loss.l1 * self._weighted(context, given, None)
            if self.perceptual is not None:
                values["context_lpips"] = self._distance(context, given)
                total = total + self.loss.lpips * values["context_lpips"]
        if fights:
            assert self.adversary is not None
            values["adversary"] = -self.adversary(fake).mean()
            total = total + self.loss.adversary * values["adversary"]
        values["loss"] = total
        values["grad_norm"] = self._update(total, self.model, self.optimizer)
        if fights:
            values["discriminator"] = self._train_adversary(real, fake.detach())
        error = (fake.detach().clamp(0, 1) - real).square().mean()
        values["psnr"] = -10 * torch.log10(error + 1e-8)
        self.step_number += 1
        # the device is waited for once
        numbers = dict(zip(values, torch.stack([value.detach() for value in values.values()]).tolist(), strict=True))
        for name, value in numbers.items():
            if value != value or abs(value) == float("inf"):
                raise NumericsError(f"tokenizer step {self.step_number}: {name} is {value}; lower the learning rate")
        if use_of_codes:
            used = utilisation(made.codes.frames_BTN, self.model.config.codebook)
            numbers |= dict(zip(("codes_used", "perplexity"), used, strict=True))
        return numbers | {"lr": self._lr()}

    def _weighted(self, fake: torch.Tensor, real: torch.Tensor, below: torch.Tensor | None) -> torch.Tensor:
        """L1 over all pixels, and again over those that moved, however few: a frame lies upon its context, that upon
        the still picture.
        """
        error = (fake - real).abs()
        if not self.loss.moved or self.model.still is None:
            return error.mean()
        below = self.model.still.detach() if below is None else below.repeat_interleave(len(real) // len(below), 0)
        moved = (real - below).abs().amax(1, keepdim=True) > MOVED
        return error.mean() + self.loss.moved * (error * moved).sum() / (3 * moved.sum()).clamp(min=1)

    def _distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert self.perceptual is not None
        with self._autocast():
            return self.perceptual(a, b).float().mean()

    def _train_adversary(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        assert self.adversary is not None and self.adversary_optimizer is not None
        loss = hinge_loss(self.adversary(real), self.adversary(fake)) + self.loss.penalty * gradient_penalty(
            self.adversary, real
        )
        self._update(loss, self.adversary, self.adversary_optimizer)
        return loss

    def _update(self, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        # on ARM its small convolutions take up to twice the time of plain ones
        with torch.backends.mkldnn.flags(enabled=False):
            loss.backward()
        if self.adversary is not None and model is self.model:
            self.adversary.zero_grad(set_to_none=True)  # the tokenizer's loss went through it
        _average_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.schedule.clip_grad or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = self._lr()
        optimizer.step()
        return norm

    def _lr(self) -> float:
        return learning_rate(self.schedule, self.step_number)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def state(self) -> dict[str, Any]:
        """All that a resumed training needs."""
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step_number}
        if self.adversary is not None and self.adversary_optimizer is not None:
            held |= {
                "adversary": self.adversary.state_dict(),
                "adversary_optimizer": self.adversary_optimizer.state_dict(),
            }
        return held

    def load(self, held: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step_number = held["step"]
        if self.adversary is not None and self.adversary_optimizer is not None:
            self.adversary.load_state_dict(held["adversary"])
            self.adversary_optimizer.load_state_dict(held["adversary_optimizer"])


def _average_gradients(model: nn.Module) -> None:
    """The mean over data-parallel ranks, in one message."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _dropout_seed(step: int) -> int:
    """Different on every rank and step, the same after a resume."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return 1_000_003 * (step + 1) + rank


def save_tokenizer(model: VideoTokenizer, path: Path) -> None:
    """The weights alone, as safetensors."""
    save_tensors(path, {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})


def load_tokenizer(config: TokenizerConfig, path: Path, device: torch.device | str = "cpu") -> VideoTokenizer:
    """A tokenizer of `save_tokenizer`, frozen."""
    model = build_tokenizer(config)
    model.load_state_dict(load_tensors(path))
    return model.to(device).eval().requires_grad_(False)
