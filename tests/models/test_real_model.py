"""A real public model: SmolLM2-135M-Instruct, in the folder that TERRELLA_SMOLLM2 names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from terrella.models import hf
from terrella.tests.parallel.pool import run_ranks

FOLDER = os.environ.get("TERRELLA_SMOLLM2", "")
pytestmark = [pytest.mark.integration, pytest.mark.skipif(not FOLDER, reason="TERRELLA_SMOLLM2 names no folder")]


def test_round_trip_and_greedy_text(tmp_path: Path) -> None:
    """Equal logits, the same greedy text as transformers, export equal to the bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    count = len(expected) - prompt.shape[1]
    job = "terrella.tests.models.hf_jobs:greedy"
    result = run_ranks(job, 1, folder=FOLDER, out=str(tmp_path), prompt=prompt[0].tolist(), count=count)[0]
    assert result["tokens"] == expected
    assert result["proof"]["max_logit_difference"] <= result["proof"]["tolerance"]
    before, after = hf.HFFolder(Path(FOLDER)), hf.HFFolder(tmp_path)
    for name in after.names():
        assert torch.equal(before.get(name), after.get(name)), name
