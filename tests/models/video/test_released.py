"""Folders of the released layout: names and shapes from a table of our own, codes and pictures against plain torch
functions.

The reference below knows nothing of our modules: it takes tensors by the release's names and follows its description
step by step.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from terrella.core.errors import ConfigError
from terrella.models.video.config import RT1_COMPRESSIVE, RT1_FRAME
from terrella.models.video.released import (
    check_released,
    load_released,
    released_config,
    tokenizer_config,
    write_tokenizer,
)
from terrella.models.video.tokenizer import Codes, CompressiveTokenizer, build_tokenizer

LEVELS = [7, 5, 5, 5, 5]
GROUPS, LATENT, RESNETS = 4, 8, 2
FRAME = {"block_out_channels": [4, 8, 8, 8, 16], "fsq_levels": 12}
COMPRESSIVE = {
    "block_out_channels": [4, 8, 8, 16],
    "vq_fsq_levels": 12,
    "dyn_fsq_levels": 12,
    "patch_size": 4,
    "context_length": 1,
}
COMPRESSIVE |= {
    "mid_block_add_attention": False,
    "max_att_resolution": 32,
    "force_upcast": True,
    "scaling_factor": 0.18215,
}
COMMON = {
    "latent_channels": LATENT,
    "norm_num_groups": GROUPS,
    "layers_per_block": RESNETS,
    "resolution": 256,
    "act_fn": "silu",
}
Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]


def conv(name: str, inner: int, outer: int, side: int = 3) -> Shapes:
    return {f"{name}.weight": (outer, inner, side, side), f"{name}.bias": (outer,)}


def linear(name: str, inner: int, outer: int) -> Shapes:
    return {f"{name}.weight": (outer, inner), f"{name}.bias": (outer,)}


def norm(name: str, channels: int) -> Shapes:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def resnet(name: str, inner: int, outer: int) -> Shapes:
    made = norm(f"{name}.norm1", inner) | conv(f"{name}.conv1", inner, outer) | norm(f"{name}.norm2", outer)
    made |= conv(f"{name}.conv2", outer, outer)
    return made | (conv(f"{name}.conv_shortcut", inner, outer, 1) if inner != outer else {})


def block(name: str, inner: int, outer: int, count: int, change: str | None) -> Shapes:
    made: Shapes = {}
    for i in range(count):
        made |= resnet(f"{name}.resnets.{i}", inner if i == 0 else outer, outer)
    return made | (conv(f"{name}.{change}.0.conv", outer, outer) if change else {})


def middle(name: str, channels: int, attention: bool) -> Shapes:
    made = resnet(f"{name}.resnets.0", channels, channels) | resnet(f"{name}.resnets.1", channels, channels)
    if attention:
        made |= norm(f"{name}.attentions.0.group_norm", channels)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            made |= linear(f"{name}.attentions.0.{part}", channels, channels)
    return made


def cross(name: str, channels: int) -> Shapes:
    made: Shapes = {f"{name}.att.in_proj_weight": (3 * channels, channels), f"{name}.att.in_proj_bias": (3 * channels,)}
    made |= linear(f"{name}.att.out_proj", channels, channels)
    made |= norm(f"{name}.kv_norm", channels) | norm(f"{name}.q_norm", channels)
    return made | {f"{name}.kv_pos_emb": (1280, channels), f"{name}.q_pos_emb": (1280, channels)}


def encoder(name: str, channels: list[int], latent: int, attention: bool) -> Shapes:
    made = conv(f"{name}.conv_in", 3, channels[0])
    for i, outer in enumerate(channels):
        change = "downsamplers" if i < len(channels) - 1 else None
        made |= block(f"{name}.down_blocks.{i}", channels[max(0, i - 1)], outer, RESNETS, change)
    made |= middle(f"{name}.mid_block", channels[-1], attention) | norm(f"{name}.conv_norm_out", channels[-1])
    return made | conv(f"{name}.conv_out", channels[-1], latent)


def decoder(
    name: str, pairs: list[tuple[int, int]], up: list[bool], latent: int, resnets: int, attention: bool
) -> Shapes:
    first, last = pairs[0][0], pairs[-1][1]
    made = conv(f"{name}.conv_in", latent, first) | middle(f"{name}.mid_block", first, attention)
    for i, ((inner, outer), doubled) in enumerate(zip(pairs, up, strict=True)):
        made |= block(f"{name}.up_blocks.{i}", inner, outer, resnets, "upsamplers" if doubled else None)
    return made | norm(f"{name}.conv_norm_out", last) | conv(f"{name}.conv_out", last, 3)


def frame_shapes(c: list[int], latent: int) -> Shapes:
    """Narrows in its first block; every block but the first doubles the picture."""
    pairs = [(c[4], c[3]), (c[3], c[2]), (c[2], c[1]), (c[1], c[0]), (c[0], c[0])]
    made = encoder("encoder", c, latent, True) | decoder(
        "decoder", pairs, [False, True, True, True, True], latent, RESNETS, True
    )
    return made | conv("quant_linear", latent, 5, 1) | conv("post_quant_linear", 5, latent, 1)


def compressive_shapes(c: list[int], latent: int) -> Shapes:
    pairs, up = [(c[3], c[3]), (c[3], c[2]), (c[2], c[1]), (c[1], c[0])], [True, True, True, False]
    made: Shapes = {}
    for prefix, attention in (("", False), ("cond_", True)):
        made |= encoder(f"{prefix}encoder", c, latent, attention)
        made |= decoder(f"{prefix}decoder", pairs, up, latent, RESNETS + 1, attention)
    made |= cross("cond_encoder.cross_att_blocks.0", c[2]) | cross("cond_encoder.cross_att_blocks.1", c[3])
    made |= cross("cond_decoder.cross_att_blocks.0", c[3])
    made |= conv("quant_conv", latent, 5, 1) | conv("post_quant_conv", 5, latent, 1)
    return made | linear("quant_linear", latent * 16, 5) | linear("post_quant_linear", 5, latent * 16)


def folder_of(path: Path, told: dict, shapes: Shapes) -> Weights:
    """A folder of the release's layout with weights that keep numbers in a healthy range, so that many codes occur."""
    draw = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            tensors[name] = 0.1 * x + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            tensors[name] = x if "pos_emb" in name else 1.3 * x / x[0].numel() ** 0.5
    path.mkdir()
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    (path / "config.json").write_text(json.dumps(COMMON | told | {"_diffusers_version": "0.27.2"}))
    return tensors


class Reference:
    """The two networks as functions of named tensors."""

    def __init__(self, weights: Weights) -> None:
        self.w = weights

    def norm(self, name: str, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return F.group_norm(x, GROUPS, self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def conv(self, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = self.w[f"{name}.weight"]
        return F.conv2d(x, weight, self.w[f"{name}.bias"], stride, 0 if stride == 2 else weight.shape[-1] // 2)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def resnet(self, name: str, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(f"{name}.conv1", F.silu(self.norm(f"{name}.norm1", x)))
        h = self.conv(f"{name}.conv2", F.silu(self.norm(f"{name}.norm2", h)))
        return h + (self.conv(f"{name}.conv_shortcut", x) if f"{name}.conv_shortcut.weight" in self.w else x)

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        i = 0
        while f"{name}.resnets.{i}.conv1.weight" in self.w:
            x, i = self.resnet(f"{name}.resnets.{i}", x), i + 1
        if f"{name}.downsamplers.0.conv.weight" in self.w:
            x = self.conv(f"{name}.downsamplers.0.conv", F.pad(x, (0, 1, 0, 1)), 2)
        if f"{name}.upsamplers.0.conv.weight" in self.w:
            x = self.conv(f"{name}.upsamplers.0.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return x

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = self.resnet(f"{name}.resnets.0", x)
        a = f"{name}.attentions.0"
        if f"{a}.to_q.weight" in self.w:
            h = self.norm(f"{a}.group_norm", x).flatten(2).transpose(1, 2)
            q, k, v = (self.linear(f"{a}.to_{part}", h) for part in "qkv")
            mixed = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
            x = x + self.linear(f"{a}.to_out.0", mixed).transpose(1, 2).reshape(x.shape)
        return self.resnet(f"{name}.resnets.1", x)

    def cross(self, name: str, x: torch.Tensor, context: torch.Tensor, heads: int = 4) -> torch.Tensor:
        q = self.norm(f"{name}.q_norm", x, 1e-5).flatten(2).transpose(1, 2) + self.w[f"{name}.q_pos_emb"]
        kv = self.norm(f"{name}.kv_norm", context, 1e-5).flatten(2).transpose(1, 2) + self.w[f"{name}.kv_pos_emb"]
        B, L, C = q.shape
        weights, biases = self.w[f"{name}.att.in_proj_weight"].chunk(3), self.w[f"{name}.att.in_proj_bias"].chunk(3)
        parts = [
            (y @ w.T + b).view(B, L, heads, -1).transpose(1, 2)
            for y, w, b in zip((q, kv, kv), weights, biases, strict=True)
        ]
        mixed = torch.softmax(parts[0] @ parts[1].transpose(2, 3) / (C // heads) ** 0.5, -1) @ parts[2]
        out = self.linear(f"{name}.att.out_proj", mixed.transpose(1, 2).reshape(B, L, C))
        return F.silu(x + out.transpose(1, 2).reshape(x.shape))

    def encoder(
        self, name: str, x: torch.Tensor, context: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, features, i = self.conv(f"{name}.conv_in", x), [], 0
        while f"{name}.down_blocks.{i}.resnets.0.conv1.weight" in self.w:
            x = self.block(f"{name}.down_blocks.{i}", x)
            features.append(x)
            if context is not None and x.shape[-2] <= 32:
                x = self.cross(f"{name}.cross_att_blocks.{i - 2}", x, context[i])
            i += 1
        x = F.silu(self.norm(f"{name}.conv_norm_out", self.middle(f"{name}.mid_block", x)))
        return self.conv(f"{name}.conv_out", x), features

    def decoder(
        self, name: str, z: torch.Tensor, context: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = middle = self.middle(f"{name}.mid_block", self.conv(f"{name}.conv_in", z))
        if context is not None:
            x = self.cross(f"{name}.cross_att_blocks.0", x, context)
        i = 0
        while f"{name}.up_blocks.{i}.resnets.0.conv1.weight" in self.w:
            x, i = self.block(f"{name}.up_blocks.{i}", x), i + 1
        return self.conv(f"{name}.conv_out", F.silu(self.norm(f"{name}.conv_norm_out", x))), middle


def quantise(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in [-1, 1] and their numbers, over the last dimension; the levels are odd, so nothing is shifted."""
    levels = torch.tensor(LEVELS)
    whole = torch.round(torch.tanh(z) * (levels - 1) * 1.001 / 2)
    basis = torch.tensor([1, 7, 35, 175, 875])
    return whole / (levels // 2), ((whole.long() + levels // 2) * basis).sum(-1)


@pytest.fixture
def pictures() -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    coarse = torch.rand(2, 3, 16, 20, generator=draw)
    return (
        F.interpolate(coarse, (256, 320), mode="bilinear") + 0.1 * torch.rand(2, 3, 256, 320, generator=draw)
    ).clamp(0, 1)


@torch.no_grad()
def test_a_folder_of_the_frame_tokenizer_gives_its_codes_and_pictures(tmp_path: Path, pictures: torch.Tensor) -> None:
    weights = folder_of(tmp_path / "rt1-frame-tokenizer", FRAME, frame_shapes(FRAME["block_out_channels"], LATENT))
    model, pictures = load_released(tmp_path / "rt1-frame-tokenizer"), pictures[:1]
    reference = Reference(weights)
    z = reference.conv("quant_linear", reference.encoder("encoder", pictures)[0])
    code, index = quantise(z.permute(0, 2, 3, 1))
    shown = reference.decoder("decoder", reference.conv("post_quant_linear", code.permute(0, 3, 1, 2)))[0].clamp(0, 1)
    codes = model.tokenize(pictures[None])
    assert index.shape == (1, 16, 20) and len(index.unique()) > 100
    assert torch.equal(codes.frames_BTN[0], index.flatten(1))
    assert (model.detokenize(codes)[0] - shown).abs().max() < 1e-4
    write_tokenizer(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "diffusion_pytorch_model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    assert load_released(tmp_path / "again").config == model.config


@torch.no_grad()
def test_a_folder_of_the_compressive_tokenizer_gives_its_codes_and_pictures(
    tmp_path: Path, pictures: torch.Tensor
) -> None:
    weights = folder_of(tmp_path / "rt1", COMPRESSIVE, compressive_shapes(COMPRESSIVE["block_out_channels"], LATENT))
    model = load_released(tmp_path / "rt1")
    assert isinstance(model, CompressiveTokenizer)
    reference = Reference(weights)
    context, frames = pictures[:1], pictures[1:]
    z, features = reference.encoder("encoder", context)
    code, index = quantise(reference.conv("quant_conv", z).permute(0, 2, 3, 1))
    z_frames = reference.encoder("cond_encoder", frames, [f.expand(1, -1, -1, -1) for f in features])[0]
    patches = z_frames.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(1, 80, -1)
    code_frames, index_frames = quantise(reference.linear("quant_linear", patches))
    picture, middle_features = reference.decoder("decoder", reference.conv("post_quant_conv", code.permute(0, 3, 1, 2)))
    latent = reference.linear("post_quant_linear", code_frames).view(1, 8, 10, 4, 4, LATENT)
    latent = latent.permute(0, 5, 1, 3, 2, 4).reshape(1, LATENT, 32, 40)
    shown = reference.decoder("cond_decoder", latent, middle_features.expand(1, -1, -1, -1))[0].clamp(0, 1)
    codes = model.tokenize(frames[None], context)
    assert codes.context_BK is not None and len(index.unique()) > 100 and len(index_frames.unique()) > 20
    assert torch.equal(codes.context_BK, index.flatten(1)) and torch.equal(codes.frames_BTN[0], index_frames)
    assert (model.context_cache(codes.context_BK).picture_B3HW - picture.clamp(0, 1)).abs().max() < 1e-4
    assert (model.detokenize(Codes(codes.frames_BTN, codes.context_BK))[0] - shown).abs().max() < 1e-4
    write_tokenizer(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "diffusion_pytorch_model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def test_the_published_sizes_have_the_release_s_names_and_shapes() -> None:
    for config, wanted in (
        (RT1_FRAME, frame_shapes([128, 256, 256, 512, 768], 64)),
        (RT1_COMPRESSIVE, compressive_shapes([128, 256, 256, 512], 64)),
    ):
        with torch.device("meta"):
            own = build_tokenizer(config).state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in own.items()} == wanted
        assert tokenizer_config(released_config(config)) == config
    assert len(frame_shapes([128, 256, 256, 512, 768], 64)) == 256 and len(wanted) == 506


def test_a_folder_that_is_something_else_is_refused_by_name(tmp_path: Path) -> None:
    told = {
        "block_out_channels": [8, 8, 16],
        "layers_per_block": 2,
        "latent_channels": 8,
        "norm_num_groups": 4,
        "patch_size": 4,
    }
    told |= {"resolution": 64, "max_att_resolution": 16}
    config = tokenizer_config(told, 64, 64)
    assert (config.kind, config.decoder_resnets, config.patch) == ("compressive", 3, 4)
    model = build_tokenizer(config)
    tensors = {n.replace(".to_q.", ".query."): t.contiguous() for n, t in model.state_dict().items()}
    save_file({**tensors, "quantize._levels": torch.ones(5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(told))
    held = load_released(tmp_path, 64, 64)  # names of an older diffusers, and a table that follows from the levels
    assert all(torch.equal(a, b) for a, b in zip(held.state_dict().values(), model.state_dict().values(), strict=True))
    with pytest.raises(ConfigError, match=r"config\.json: levels is .*the recipe's env\.tokenizer has \[5, 5\]"):
        check_released(tmp_path, replace(config, levels=[5, 5]))
    with pytest.raises(ConfigError, match=r"pos_emb has shape \[256, 16\], the configuration asks for \[320, 16\]"):
        load_released(tmp_path, 64, 80)
    save_file({**tensors, "quantize.embedding.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"quantize\.embedding\.weight is in the file but not in the tokenizer"):
        load_released(tmp_path, 64, 64)
    del tensors["encoder.conv_in.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"encoder\.conv_in\.bias is missing"):
        load_released(tmp_path, 64, 64)
    with pytest.raises(ConfigError, match=r"config\.json: missing"):
        load_released(tmp_path / "nowhere")
    for bad in ({"block_out_channels": 8}, {"latent_channels": "x"}, {"fsq_levels": "x"}, {"norm_num_groups": 0}):
        (tmp_path / "config.json").write_text(json.dumps(told | bad))
        with pytest.raises(ConfigError, match=r"config\.json: describes no tokenizer of 64 x 64 pixels"):
            check_released(tmp_path, config)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"act_fn": "gelu"}, "act_fn"),
        ({"num_vq_embeddings": 8192}, "learnt codebook"),
        ({"vq_fsq_levels": 12, "dyn_fsq_levels": 10}, "differ"),
        ({"fsq_levels": 11}, "fsq_levels = 11"),
        ({"down_block_types": ["AttnDownEncoderBlock2D"] * 5}, "down_block_types"),
        ({"patch_size": 4, "mid_block_add_attention": True}, "mid_block_add_attention"),
        ({"patch_size": 4, "max_att_resolution": 64}, "max_att_resolution"),
    ],
)
def test_a_setting_that_is_not_built_is_refused(told: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer_config(told)


def test_what_the_release_cannot_say_is_not_written() -> None:
    for config in (replace(RT1_FRAME, still=True), replace(RT1_COMPRESSIVE, decoder_resnets=2)):
        with pytest.raises(ConfigError, match="released layout"):
            released_config(config)
