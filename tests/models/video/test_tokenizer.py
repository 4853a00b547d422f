"""Tokenizers: published sizes, round trips through codes, cached contexts and training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terrella.core.config import OptimizerConfig
from terrella.core.errors import ConfigError
from terrella.models.video.augment import augment_clips
from terrella.models.video.blocks import Decoder, Encoder
from terrella.models.video.config import RT1_COMPRESSIVE, RT1_FRAME, TokenizerConfig, TokenizerLoss
from terrella.models.video.discriminator import PatchDiscriminator, gradient_penalty, layers_for
from terrella.models.video.tokenizer import SPREAD, Codes, CompressiveTokenizer, build_tokenizer, utilisation
from terrella.models.video.training import TokenizerTrainer, load_tokenizer, save_tokenizer

SMALL = {"height": 16, "width": 24, "channels": [8, 8, 16], "latent": 8, "groups": 4, "levels": [5, 5, 5]}
FRAME = TokenizerConfig(**SMALL)
COMPRESSIVE = TokenizerConfig(kind="compressive", patch=2, decoder_resnets=3, **SMALL)
PLAIN = TokenizerLoss(lpips=0, adversary=0)


def test_published_sizes() -> None:
    assert (RT1_FRAME.grid, RT1_FRAME.frame_tokens, RT1_FRAME.context_tokens, RT1_FRAME.codebook) == (
        (16, 20),
        320,
        0,
        4375,
    )
    assert (RT1_COMPRESSIVE.grid, RT1_COMPRESSIVE.frame_tokens, RT1_COMPRESSIVE.context_tokens) == ((32, 40), 80, 1280)
    with torch.device("meta"):
        model = CompressiveTokenizer(RT1_COMPRESSIVE)
    assert model.quant_linear.weight.shape == (5, 1024)
    assert [b.q_pos_emb.shape[0] for b in model.cond_encoder.cross_att_blocks] == [1280, 1280]
    assert len(model.cond_decoder.cross_att_blocks) == 1 and len(model.decoder.up_blocks[0].resnets) == 3
    assert not len(model.encoder.mid_block.attentions) and len(model.cond_encoder.mid_block.attentions)


def test_bad_sizes_name_the_setting() -> None:
    with pytest.raises(ValueError, match="width"):
        TokenizerConfig(width=100)
    with pytest.raises(ValueError, match="channels"):
        TokenizerConfig(channels=[100, 128])
    for name, bad in {"height": 0, "groups": 0, "patch": 0, "heads": 0, "latent": 0, "dropout": 1.0}.items():
        with pytest.raises(ValueError, match=f"{name}: {bad} must be at least"):
            TokenizerConfig(kind="compressive", **{name: bad})


@pytest.mark.parametrize("config", [FRAME, COMPRESSIVE], ids=["frame", "compressive"])
def test_codes_round_trip(config: TokenizerConfig) -> None:
    torch.manual_seed(0)
    model = build_tokenizer(config).eval()
    frames, context = torch.rand(2, 3, 3, 16, 24), torch.rand(2, 3, 16, 24)
    codes = model.tokenize(frames, context)
    assert codes.frames_BTN.shape == (2, 3, config.frame_tokens)
    made = model(frames, context)
    assert torch.equal(made.codes.frames_BTN, codes.frames_BTN)
    pictures = model.detokenize(codes)
    assert torch.allclose(pictures, made.frames_BT3HW.clamp(0, 1), atol=1e-5)
    alone = model.tokenize(frames[1:, 1:2], context[1:])
    assert torch.equal(alone.frames_BTN[0, 0], codes.frames_BTN[1, 1])  # neither batch nor neighbours matter
    if isinstance(model, CompressiveTokenizer):
        cache = model.context_cache(codes.context_BK)
        assert torch.allclose(cache.picture_B3HW, made.context_B3HW.clamp(0, 1), atol=1e-5)
        again = model.detokenize(Codes(codes.frames_BTN[:, 2:]), cache)
        assert torch.allclose(again[:, 0], pictures[:, 2], atol=1e-5)
        other = model.detokenize(codes, model.context_cache(codes.context_BK.flip(0)))
        assert not torch.allclose(other, pictures, atol=1e-3)  # the context is used
        with pytest.raises(ValueError, match="context"):
            model.tokenize(frames)


def test_patches_and_their_inverse() -> None:
    model = CompressiveTokenizer(COMPRESSIVE)
    z = torch.arange(2 * 8 * 4 * 6.0).view(2, 8, 4, 6)
    patches = model._patches(z)
    assert patches.shape == (2, 6, 32)
    assert torch.equal(patches[0, 1].view(2, 2, 8), z[0, :, 0:2, 2:4].permute(1, 2, 0))
    torch.nn.init.zeros_(model.post_quant_linear.bias)
    seen = []
    model.cond_decoder.forward = lambda z, f: (seen.append(z), f)  # type: ignore[method-assign]
    model.post_quant_linear = torch.nn.Identity()  # type: ignore[assignment]
    model._decode_frames(patches, 1, torch.zeros(2, 16, 4, 6), torch.zeros(2, 3, 16, 24))
    assert torch.equal(seen[0], z)


def test_utilisation() -> None:
    assert utilisation(torch.tensor([0, 0, 1, 1]), 8) == pytest.approx((0.25, 2.0))


@pytest.mark.parametrize("config", [FRAME, COMPRESSIVE], ids=["frame", "compressive"])
def test_training_lowers_the_loss_and_resumes_exactly(config: TokenizerConfig, tmp_path: Path) -> None:
    torch.manual_seed(1)
    frames, context = (
        torch.rand(2, 2, 3, 1, 1).expand(2, 2, 3, 16, 24).contiguous(),
        torch.rand(2, 3, 1, 1).expand(2, 3, 16, 24),
    )
    loss = TokenizerLoss(lpips=0, adversary_from=20)
    trainer = TokenizerTrainer(config, loss, OptimizerConfig(lr=3e-3), seed=3)
    told = [trainer.step(frames, context) for _ in range(24)]
    assert told[-1]["l1"] < 0.5 * told[0]["l1"] and "discriminator" not in told[19] and "discriminator" in told[20]
    path = tmp_path / "state.pt"
    torch.save(trainer.state(), path)
    after = trainer.step(frames, context)
    other = TokenizerTrainer(config, loss, OptimizerConfig(lr=3e-3), seed=9)
    other.load(torch.load(path, weights_only=True))
    assert other.step(frames, context) == after
    save_tokenizer(trainer.model, tmp_path / "t.safetensors")
    held = load_tokenizer(config, tmp_path / "t.safetensors")
    assert torch.equal(
        held.tokenize(frames, context).frames_BTN, trainer.model.eval().tokenize(frames, context).frames_BTN
    )


def test_still_camera_encodes_what_differs_from_the_context() -> None:
    torch.manual_seed(4)
    frames, context = torch.rand(2, 3, 3, 16, 24), torch.rand(2, 3, 16, 24)
    model = build_tokenizer(replace(COMPRESSIVE, still=True)).eval()
    seen: list[torch.Tensor] = []
    model.cond_encoder.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model.tokenize(frames, context)
    model(frames, context)
    assert len(seen) == 2 and all(torch.equal(x, (frames - context[:, None]).flatten(0, 1)) for x in seen)
    torch.manual_seed(4)
    torch.rand(2, 3, 3, 16, 24), torch.rand(2, 3, 16, 24)
    plain = build_tokenizer(COMPRESSIVE)
    assert torch.allclose(model.quant_linear.weight, SPREAD * plain.quant_linear.weight)


@pytest.mark.parametrize("config", [FRAME, COMPRESSIVE], ids=["frame", "compressive"])
def test_still_camera_begins_with_the_picture_and_weighs_what_moved(config: TokenizerConfig) -> None:
    torch.manual_seed(2)
    place, frames = torch.rand(3, 16, 24), torch.rand(2, 2, 3, 16, 24)
    context = (place + 0.05).expand(2, 3, 16, 24).clone()
    context[0, :, 4:8, 4:8] = 1 - context[0, :, 4:8, 4:8].round()
    still = replace(config, still=True)
    trainer = TokenizerTrainer(still, replace(PLAIN, moved=9.0), OptimizerConfig(lr=1e-3), still=place)
    model = trainer.model
    made = model.eval()(frames, context)
    assert torch.allclose(made.frames_BT3HW, place.expand_as(made.frames_BT3HW), atol=1e-6)  # nothing is drawn yet
    assert torch.allclose(model.detokenize(made.codes), made.frames_BT3HW, atol=1e-6)
    fake = torch.zeros(4, 3, 16, 24)
    real = context.repeat_interleave(2, 0).clone()
    # equal to what it lies upon
    assert float(trainer._weighted(fake, real, context)) == pytest.approx(float(real.mean()))
    real[1, :, :8] = 1 - real[1, :, :8].round()
    wanted = real.mean() + 9 * real[1, :, :8].mean()
    assert float(trainer._weighted(fake, real, context)) == pytest.approx(float(wanted), rel=1e-5)
    given = context if config.kind == "compressive" else None
    told = [trainer.step(context[:, None].repeat(1, 2, 1, 1, 1), given) for _ in range(12)]
    assert told[-1]["loss"] < told[0]["loss"] and not torch.equal(model.still, place)
    with pytest.raises(ConfigError, match="moved"):
        TokenizerTrainer(config, replace(PLAIN, moved=1.0), OptimizerConfig(lr=1e-3))


def test_bf16_keeps_codes_in_fp32() -> None:
    trainer = TokenizerTrainer(COMPRESSIVE, PLAIN, OptimizerConfig(lr=1e-3), bf16=True)
    told = trainer.step(torch.rand(1, 2, 3, 16, 24), torch.rand(1, 3, 16, 24))
    assert told["l1"] > 0 and 0 < told["codes_used"] <= 1


def test_discriminator_penalty_is_the_gradients() -> None:
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1))
    norm = linear[1].weight.detach().norm()
    penalty = gradient_penalty(linear, torch.rand(3, 3, 2, 2)).item()
    assert penalty == pytest.approx((norm.item() - 1) ** 2, rel=1e-5)
    assert PatchDiscriminator()(torch.rand(1, 3, 256, 320)).shape == (1, 1, 4, 5)
    assert layers_for(64, 64) == (64, 128, 256, 512) and len(layers_for(256, 320)) == 6


def test_augmentation_treats_a_clip_as_one() -> None:
    clips = torch.rand(2, 1, 3, 32, 40).expand(2, 4, 3, 32, 40)
    out = augment_clips(clips, torch.Generator().manual_seed(0))
    assert out.shape == clips.shape and out.min() >= 0 and out.max() <= 1
    assert torch.allclose(out[0, 0], out[0, 3], atol=1e-6) and not torch.allclose(out[0], clips[0], atol=1e-3)
    again = augment_clips(clips, torch.Generator().manual_seed(0))
    assert torch.equal(out, again)


@pytest.mark.parametrize("attention", [True, False])
def test_blocks_equal_diffusers(attention: bool) -> None:
    vae = pytest.importorskip("diffusers.models.autoencoders.vae", reason="diffusers is not installed")
    channels = (8, 16, 16)
    theirs = vae.Encoder(
        3, 8, ("DownEncoderBlock2D",) * 3, channels, 2, 4, "silu", False, mid_block_add_attention=attention
    )
    ours = Encoder(channels, 2, 8, 4, attention=attention)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 32, 40)
    assert torch.allclose(ours(x)[0], theirs(x), atol=1e-5)
    theirs = vae.Decoder(8, 3, ("UpDecoderBlock2D",) * 3, channels, 2, 4, "silu", mid_block_add_attention=attention)
    ours = Decoder(channels, 3, 8, 4, attention=attention)
    ours.load_state_dict(theirs.state_dict())
    z = torch.randn(2, 8, 8, 10)
    assert torch.allclose(ours(z)[0], theirs(z), atol=1e-5)
