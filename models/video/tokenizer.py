"""The two tokenizers. Codes carry no vocabulary offset: those belong to the token layout.

Shapes: B clips, T frames, 3 x H x W pictures in [0, 1], K context codes, N codes of a frame, D quantised dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...kernels.fsq import fsq_dequantize, fsq_quantize
from .blocks import Decoder, Encoder
from .config import TokenizerConfig

# of a still camera's first latents: codes that begin all alike are ignored by the decoder, and then stay so
SPREAD = 3.0


@dataclass(frozen=True)
class Codes:
    """A clip in codes. `context_BK` is there with the compressive tokenizer only."""

    frames_BTN: torch.Tensor
    context_BK: torch.Tensor | None = None


@dataclass(frozen=True)
class ContextCache:
    """What decoding needs of a context frame; it is made once and serves every frame of the clip."""

    picture_B3HW: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True)
class Reconstruction:
    """A training pass: pictures with gradients, and the codes that were used."""

    frames_BT3HW: torch.Tensor
    context_B3HW: torch.Tensor | None
    codes: Codes


def _quantise(z_BDHW: torch.Tensor, levels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 whatever autocast says; NaN latents are an error and not a code."""
    B, D, H, W = z_BDHW.shape
    code, index = fsq_quantize(z_BDHW.permute(0, 2, 3, 1).reshape(-1, D).float(), levels)
    return code.view(B, H, W, D).permute(0, 3, 1, 2), index.view(B, H * W)


class FrameTokenizer(nn.Module):
    """Every frame by itself."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = c = config
        self.encoder = Encoder(c.channels, c.encoder_resnets, c.latent, c.groups)
        self.quant_linear = nn.Conv2d(c.latent, len(c.levels), 1)  # the release's name, though it is a convolution
        self.post_quant_linear = nn.Conv2d(len(c.levels), c.latent, 1)
        self.decoder = Decoder(c.channels, c.decoder_resnets, c.latent, c.groups, narrow_first=True)
        self.still = _still_picture(c, self.decoder)

    def _encode(self, frames_BT3HW: torch.Tensor) -> tuple[torch.Tensor, Codes]:
        z = self.quant_linear(self.encoder(frames_BT3HW.flatten(0, 1))[0])
        code, index = _quantise(z, self.config.levels)
        return code, Codes(index.view(*frames_BT3HW.shape[:2], -1))

    def _decode(self, code_BDHW: torch.Tensor) -> torch.Tensor:
        return _upon(self.still, self.decoder(self.post_quant_linear(code_BDHW))[0])

    def forward(self, frames_BT3HW: torch.Tensor, context_B3HW: torch.Tensor | None = None) -> Reconstruction:
        """Encode, quantise with a straight-through gradient, decode. A context is not used."""
        code, codes = self._encode(frames_BT3HW)
        return Reconstruction(self._decode(code).view(frames_BT3HW.shape), None, codes)

    @torch.no_grad()
    def tokenize(self, frames_BT3HW: torch.Tensor, context_B3HW: torch.Tensor | None = None) -> Codes:
        return self._encode(frames_BT3HW)[1]

    @torch.no_grad()
    def detokenize(self, codes: Codes, cache: ContextCache | None = None) -> torch.Tensor:
        """Pictures of the frames, clamped to [0, 1]."""
        B, T, _ = codes.frames_BTN.shape
        code = (
            fsq_dequantize(codes.frames_BTN, self.config.levels).view(B * T, *self.config.grid, -1).permute(0, 3, 1, 2)
        )
        pictures = self._decode(code.to(self.post_quant_linear.weight.dtype))
        return pictures.clamp(0, 1).view(B, T, 3, self.config.height, self.config.width)


class CompressiveTokenizer(nn.Module):
    """A context frame by its full grid of codes; the other frames by one code a patch, encoded and decoded beside
    it.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = c = config
        rows, columns = c.grid
        cross = {"places": rows * columns, "heads": c.heads, "dropout": c.dropout}
        self.encoder = Encoder(c.channels, c.encoder_resnets, c.latent, c.groups, attention=False)
        self.cond_encoder = Encoder(c.channels, c.encoder_resnets, c.latent, c.groups, cross=cross)
        self.quant_conv = nn.Conv2d(c.latent, len(c.levels), 1)
        self.post_quant_conv = nn.Conv2d(len(c.levels), c.latent, 1)
        self.quant_linear = nn.Linear(c.latent * c.patch**2, len(c.levels))
        self.post_quant_linear = nn.Linear(len(c.levels), c.latent * c.patch**2)
        self.decoder = Decoder(c.channels, c.decoder_resnets, c.latent, c.groups, attention=False)
        self.cond_decoder = Decoder(c.channels, c.decoder_resnets, c.latent, c.groups, cross=cross)
        self.still = _still_picture(c, self.decoder, self.cond_decoder)
        if c.still:
            for layer in (self.quant_conv, self.quant_linear):
                layer.weight.data *= SPREAD

    def _encode_context(self, context_B3HW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        z, features = self.encoder(context_B3HW)
        return *_quantise(self.quant_conv(z), self.config.levels), features

    def _encode_frames(
        self, frames_BT3HW: torch.Tensor, features: list[torch.Tensor], context_B3HW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T = frames_BT3HW.shape[:2]
        if self.still is not None:  # what a code has to say is what differs from the picture that it is drawn upon
            frames_BT3HW = frames_BT3HW - context_B3HW[:, None]
        z = self.cond_encoder(frames_BT3HW.flatten(0, 1), [_repeat(f, T) for f in features])[0]
        code, index = fsq_quantize(self.quant_linear(self._patches(z)).flatten(0, 1).float(), self.config.levels)
        return code.view(B * T, -1, len(self.config.levels)), index.view(B, T, -1)

    def _patches(self, z_BCHW: torch.Tensor) -> torch.Tensor:
        """[B, patches, patch * patch * channels], row by row, channels last within a patch."""
        B, C, H, W = z_BCHW.shape
        p = self.config.patch
        return z_BCHW.view(B, C, H // p, p, W // p, p).permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * p * C)

    def _decode_frames(
        self, code_BND: torch.Tensor, T: int, features: torch.Tensor, context_B3HW: torch.Tensor
    ) -> torch.Tensor:
        p, (H, W) = self.config.patch, self.config.grid
        z = self.post_quant_linear(code_BND).view(-1, H // p, W // p, p, p, self.config.latent)
        z_BCHW = z.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.config.latent, H, W)
        drawn = self.cond_decoder(z_BCHW, _repeat(features, T))[0]
        return drawn if self.still is None else _upon(_repeat(context_B3HW, T), drawn)

    def forward(self, frames_BT3HW: torch.Tensor, context_B3HW: torch.Tensor | None = None) -> Reconstruction:
        """Both passes with straight-through gradients."""
        if context_B3HW is None:
            raise ValueError("the compressive tokenizer needs a context frame")
        T = frames_BT3HW.shape[1]
        context_code, context_BK, features = self._encode_context(context_B3HW)
        frame_code, frames_BTN = self._encode_frames(frames_BT3HW, features, context_B3HW)
        drawn, middle = self.decoder(self.post_quant_conv(context_code))
        context_picture = _upon(self.still, drawn)
        pictures = self._decode_frames(frame_code, T, middle, context_picture.detach().clamp(0, 1))
        return Reconstruction(pictures.view(frames_BT3HW.shape), context_picture, Codes(frames_BTN, context_BK))

    @torch.no_grad()
    def tokenize(self, frames_BT3HW: torch.Tensor, context_B3HW: torch.Tensor | None = None) -> Codes:
        if context_B3HW is None:
            raise ValueError("the compressive tokenizer needs a context frame")
        _, context_BK, features = self._encode_context(context_B3HW)
        return Codes(self._encode_frames(frames_BT3HW, features, context_B3HW)[1], context_BK)

    @torch.no_grad()
    def context_cache(self, context_BK: torch.Tensor) -> ContextCache:
        """The context's picture and features; decode as many frames beside it as wanted."""
        code = (
            fsq_dequantize(context_BK, self.config.levels)
            .view(len(context_BK), *self.config.grid, -1)
            .permute(0, 3, 1, 2)
        )
        picture, middle = self.decoder(self.post_quant_conv(code.to(self.post_quant_conv.weight.dtype)))
        return ContextCache(_upon(self.still, picture).clamp(0, 1), middle)

    @torch.no_grad()
    def detokenize(self, codes: Codes, cache: ContextCache | None = None) -> torch.Tensor:
        """Pictures of the frames (the context's is in its cache), clamped to [0, 1]."""
        if cache is None:
            if codes.context_BK is None:
                raise ValueError("the compressive tokenizer needs the context's codes, or their cache")
            cache = self.context_cache(codes.context_BK)
        B, T, N = codes.frames_BTN.shape
        code = fsq_dequantize(codes.frames_BTN, self.config.levels).view(B * T, N, -1)
        pictures = self._decode_frames(
            code.to(self.post_quant_linear.weight.dtype), T, cache.features, cache.picture_B3HW
        )
        return pictures.clamp(0, 1).view(B, T, 3, self.config.height, self.config.width)


VideoTokenizer = FrameTokenizer | CompressiveTokenizer


def build_tokenizer(config: TokenizerConfig) -> VideoTokenizer:
    """The tokenizer that a configuration names, with fresh weights."""
    return CompressiveTokenizer(config) if config.kind == "compressive" else FrameTokenizer(config)


def utilisation(codes: torch.Tensor, codebook: int) -> tuple[float, float]:
    """(share of the codebook that occurs, perplexity of the codes' distribution)."""
    counts = torch.bincount(codes.reshape(-1), minlength=codebook).double()
    p = counts[counts > 0] / counts.sum()
    return float((counts > 0).double().mean()), float(torch.exp(-(p * p.log()).sum()))


def _still_picture(config: TokenizerConfig, *decoders: Decoder) -> nn.Parameter | None:
    """The picture of a place where nothing happens; decoders begin by adding nothing to it."""
    if not config.still:
        return None
    for decoder in decoders:
        nn.init.zeros_(decoder.conv_out.weight)
        nn.init.zeros_(decoder.conv_out.bias)  # type: ignore[arg-type]
    return nn.Parameter(torch.zeros(3, config.height, config.width))


def _upon(below: torch.Tensor | None, drawn_B3HW: torch.Tensor) -> torch.Tensor:
    return drawn_B3HW if below is None else below.float() + drawn_B3HW.float()


def _repeat(features: torch.Tensor, times: int) -> torch.Tensor:
    return features.repeat_interleave(times, 0)
