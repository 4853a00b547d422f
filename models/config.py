"""What a decoder is: its sizes and switches. Importable without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = 1.0  # how many times longer the context becomes
    original_max_positions: int = 0  # positions that the model was trained with
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3: shorter wavelengths than this share of them stay as they are
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn: rotations below which frequencies are interpolated
    attention_factor: float | None = None  # yarn: scale of the attention scores; default: from `factor`
    truncate: bool = True  # yarn: round the limits to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. `family` chooses the Hugging Face names and nothing else."""

    # whose names and defaults of Hugging Face apply
    family: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm", "gemma3_text"] = "llama"
    layers: int = 2  # transformer blocks
    hidden: int = 64  # width of the residual stream
    heads: int = 4  # attention heads
    kv_heads: int = 4  # heads of keys and values; fewer than `heads` means grouped attention
    head_dim: int = 16  # width of a head
    ffn: int = 128  # inner width of the feed-forward layers
    vocab: int = 256  # tokens of the tokenizer
    max_positions: int = 2048  # the longest sequence
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # how they are stretched for longer contexts
    rotary_fraction: float = 1.0  # of head_dim
    rotary_interleaved: bool = False  # neighbouring dimensions rotate together (GLM), not the two halves
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm
    tied: bool = False  # input and output embeddings are one matrix
    qkv_bias: bool = False  # biases on queries, keys and values
    qk_norm: bool = False  # RMSNorm on queries and keys
    # gemma: norms around both halves of a layer, their weights around 0, a GELU gate, embeddings times sqrt(hidden)
    block: Literal["llama", "gemma"] = "llama"
    sliding_window: int = 0  # positions that a sliding layer sees, 0: no layer slides
    global_every: int = 6  # with a sliding window: every so many-th layer sees all of its document
    local_rope_theta: float = 10000.0  # base of the rotary frequencies of sliding layers
    query_scale: float | None = None  # of the attention scores; default: 1 / sqrt(head_dim)
    init_std: float = 0.02  # standard deviation of fresh weights
    experts: int = 0  # experts of a layer; 0 makes a dense model
    experts_per_token: int = 0  # experts that each token is sent to
    expert_ffn: int = 0  # inner width of an expert
    expert_weights_sum_to_one: bool = True  # over the experts a token is sent to

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "max_positions",
            "rope_theta",
            "local_rope_theta",
            "norm_eps",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads ({self.heads})")
        if self.head_dim % 2 or int(self.head_dim * self.rotary_fraction) % 2:
            raise ValueError(f"head_dim: {self.head_dim} and its rotary part must be even")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction: {self.rotary_fraction} must be above 0 and at most 1")
        if self.query_scale is not None and self.query_scale <= 0:
            raise ValueError(f"query_scale: {self.query_scale} must be above 0")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token: must be between 1 and experts ({self.experts})")
        if self.sliding_window < 0 or self.global_every < 1:
            raise ValueError("sliding_window: must not be negative, and global_every must be at least 1")
        if self.block == "gemma" and (self.experts or self.rotary_interleaved):
            raise ValueError("block: gemma has neither experts nor interleaved rotary dimensions")
        if self.block != "gemma" and (self.sliding_window or self.query_scale is not None):
            raise ValueError(f"{'sliding_window' if self.sliding_window else 'query_scale'}: needs block: gemma")
        if bool(self.experts) != bool(self.expert_ffn):
            raise ValueError("expert_ffn: set it where there are experts, and only there")

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by on their way into the first layer."""
        return self.hidden**0.5 if self.block == "gemma" else 1.0

    @property
    def padded_vocab(self) -> int:
        """Rows of embedding and head: the same for every layout, so that checkpoints move between them."""
        multiple = 64 if self.vocab >= 1024 else 8
        return (self.vocab + multiple - 1) // multiple * multiple

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What a layout cuts into parts, as `check_layout` takes it."""
        names = ("layers", "heads", "kv_heads", "head_dim", "experts")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        return sizes | {"ffn": self.expert_ffn if self.experts else self.ffn, "vocab": self.padded_vocab}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        scaling = values.get("rope_scaling")
        known = {f.name for f in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]}: not a field of a model")
        return cls(**{**values, "rope_scaling": RopeScaling(**scaling) if scaling else None})


@dataclass(frozen=True)
class NamedModel(ModelConfig):
    """The model of a recipe: its sizes, and the folder or pinned hub id that they are from, where one is named."""

    # a Hugging Face folder, or owner/name of the hub; gives the sizes that the recipe leaves out
    folder: str | None = None

    @property
    def sizes(self) -> ModelConfig:
        """The decoder alone."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in fields(ModelConfig)})


VIDEO_GPT = ModelConfig(
    family="llama",
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    ffn=3072,
    vocab=9008,
    max_positions=8192,
    norm_eps=1e-6,
)  # the multi-step video world model; the single-step one has vocab 4633
