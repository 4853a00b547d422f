"""Counting a model: parameters, arithmetic and activation bytes. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, head_dim: int = 128, **more
) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=131072,
        **more,
    )


# model sizes by name
GEOMETRIES = {
    "0.1b": _dense(12, 768, 12, 12, 3072, 32000, head_dim=64),
    "qwen2.5-0.5b": _dense(24, 896, 14, 2, 4864, 151936, head_dim=64, tied=True),
    "qwen2.5-1.5b": _dense(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944, 152064),
    "llama3-8b": _dense(32, 4096, 32, 8, 14336, 128256),
    "qwen2.5-14b": _dense(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648, 152064),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 151936, family="qwen3", qk_norm=True),
    "llama3-70b": _dense(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _dense(126, 16384, 128, 8, 53248, 128256),
    # gated MLP of the same parameter count as the original's 4 x hidden
    "gpt3-175b": _dense(96, 12288, 96, 96, 32768, 131072),
    "qwen3-30b-a3b": _dense(
        48, 2048, 32, 4, 6144, 151936, qk_norm=True, experts=128, experts_per_token=8, expert_ffn=768
    ),
    "qwen3-235b-a22b": _dense(
        94, 4096, 64, 4, 12288, 151936, qk_norm=True, experts=128, experts_per_token=8, expert_ffn=1536
    ),
    "gpt-oss-20b": _dense(24, 2880, 64, 8, 2880, 201088, head_dim=64, experts=32, experts_per_token=4, expert_ffn=2880),
    "mixtral-8x7b": _dense(32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2, expert_ffn=14336),
    "gpt-oss-120b": _dense(
        36, 2880, 64, 8, 2880, 201088, head_dim=64, experts=128, experts_per_token=4, expert_ffn=2880
    ),
}


@dataclass(frozen=True)
class Counts:
    """Parameters of one layer and of the ends."""

    attention: int  # q, k, v and output projections
    mlp: int  # all of it, every expert included
    mlp_active: int  # the part that one token uses
    embedding: int
    head: int
    layers: int

    @property
    def total(self) -> int:
        return self.layers * (self.attention + self.mlp) + self.embedding + self.head

    @property
    def active(self) -> int:
        """Parameters in a token's matmuls."""
        return self.layers * (self.attention + self.mlp_active) + (self.head or self.embedding)


def count(model: ModelConfig) -> Counts:
    """Parameters of a gated decoder."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (2 * q + 2 * kv)
    if model.experts:
        expert = 3 * model.hidden * model.expert_ffn
        mlp, active = (
            model.experts * expert + model.hidden * model.experts,
            model.experts_per_token * expert + model.hidden * model.experts,
        )
    else:
        mlp = active = 3 * model.hidden * model.ffn
    table = model.padded_vocab * model.hidden
    return Counts(attention, mlp, active, table, 0 if model.tied else table, model.layers)


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """Parameters of low-rank adapters: an A and a B for each of q, k, v, the output projection, and gate, up and down
    where they are dense.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    ends = [(model.hidden, q), (model.hidden, kv), (model.hidden, kv), (q, model.hidden)]
    if not model.experts:
        ends += [(model.hidden, model.ffn), (model.hidden, model.ffn), (model.ffn, model.hidden)]
    return model.layers * rank * sum(read + written for read, written in ends)


def flops_per_token(model: ModelConfig, sequence: float) -> float:
    """FLOPs of one trained token, forward and backward, with causal attention: the numerator of every MFU here."""
    return 6.0 * count(model).active + 6.0 * model.layers * sequence * model.heads * model.head_dim


def mlp_width(model: ModelConfig) -> int:
    """Columns of the gated MLP that a token fills."""
    return model.experts_per_token * model.expert_ffn if model.experts else model.ffn


def activation_bytes(model: ModelConfig, recompute: str, remade: bool = False) -> float:
    """bf16 activations that one token of one layer keeps for the backward pass, flash attention; `remade`: not the
    gated product.
    """
    if recompute == "full":
        return 2.0 * model.hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = 8.0 * model.hidden + 2.0 * (q + 2 * kv) + 2.0 * q
    if model.qk_norm:
        kept += 2.0 * (q + kv)  # inputs of the norms
    if model.experts:
        # the router's input in fp32, and the permuted tokens
        kept += (4.0 + 2.0 * model.experts_per_token) * model.hidden
    return kept + (4.0 if remade or recompute == "selective" else 6.0) * mlp_width(model)


def gradient_bytes(model: ModelConfig) -> float:
    """bf16 gradients of one token that live at once in a layer's backward pass: of the gated block, and of the
    experts' rows.
    """
    return 8.0 * mlp_width(model) + (4.0 * model.experts_per_token if model.experts else 6.0) * model.hidden
