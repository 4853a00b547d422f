"""The benchmark of web episodes, in a rank of the pool."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from terrella.benchmarks import episodes
from terrella.benchmarks.rollout import random_engine
from terrella.models.config import ModelConfig


def run(count: int, at_once: int, latency_ms: tuple[float, float]) -> dict[str, dict[str, Any]]:
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 64}
    model = ModelConfig(**sizes, vocab=episodes.tokenizer().vocab_size, max_positions=episodes.PROMPT + 8)
    engine = random_engine(model, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        worlds = episodes.players("dom", at_once, Path(folder), None, latency_ms)
        return {
            mode: asdict(episodes.measure(engine, model, worlds, count, mode == "independent", 0))
            for mode in ("lock-step", "independent")
        }
