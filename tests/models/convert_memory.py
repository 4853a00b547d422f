"""`python -m terrella.tests.models.convert_memory FOLDER`: how much memory a conversion and its proof take, printed
as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from terrella.models import convert, hf
from terrella.models.config import ModelConfig
from terrella.models.families import FAMILIES, parameter_names
from terrella.models.families.base import hf_names

SHARD = 48 << 20
WIDE = ModelConfig(layers=12, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=512)
TINY = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=32, vocab=64)


def own_memory() -> int:
    """Bytes this process holds for itself; pages of mapped files are not counted, the system can drop them."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Watch(threading.Thread):
    """Looks every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = own_memory()
        self.done = False

    def run(self) -> None:
        while not self.done:
            self.peak = max(self.peak, own_memory())
            time.sleep(0.004)


def make(folder: Path, config: ModelConfig) -> int:
    """A Hugging Face folder of random weights; returns the bytes of a layer."""
    family, draw, layer = FAMILIES[config.family], torch.Generator().manual_seed(0), 0
    shapes = {
        "embedding.word_embeddings.weight": (config.vocab, config.hidden),
        "output_layer.weight": (config.vocab, config.hidden),
        "self_attention.linear_qkv.weight": (config.heads * config.head_dim, config.hidden),
        "self_attention.linear_proj.weight": (config.hidden, config.heads * config.head_dim),
        "mlp.linear_fc1.weight": (config.ffn, config.hidden),
        "mlp.linear_fc2.weight": (config.hidden, config.ffn),
    }

    def tensors():
        nonlocal layer
        for name in parameter_names(config):
            shape = next((s for end, s in shapes.items() if name.endswith(end)), (config.hidden,))
            for part in hf_names(family, name):
                tensor = torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, 0.05, generator=draw)
                layer += tensor.nbytes if ".layers.0." in part else 0
                yield part, tensor

    hf.write_folder(folder, config, tensors(), "fp32", None, SHARD)
    return layer


def main() -> None:
    folder = Path(sys.argv[1])
    make(folder / "tiny", TINY)
    # so that imports and buffers of the libraries are not counted
    convert.from_any(folder / "tiny", folder / "tiny-checkpoint")
    convert.to_hf(folder / "tiny-checkpoint", folder / "tiny-again", dtype="fp32")
    layer = make(folder / "wide", WIDE)
    found = {"layer": layer, "shard": SHARD, "model": layer * WIDE.layers}
    for name, work in (
        ("from_hf", lambda: convert.from_any(folder / "wide", folder / "checkpoint", shard_bytes=SHARD)),
        ("to_hf", lambda: convert.to_hf(folder / "checkpoint", folder / "again", dtype="fp32", shard_bytes=SHARD)),
    ):
        watch = Watch()
        watch.start()
        work()
        watch.done = True
        found[name] = watch.peak - watch.before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
