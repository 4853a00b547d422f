"""On a GPU with vLLM: a colocated engine gets its weights by CUDA IPC, sleeps and wakes, and says what the trainer
says.
"""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_ipc_sleep_and_offload(tmp_path) -> None:
    """Drift in bf16 stays small after each sync and is large against other weights; each turn has the other's
    memory.
    """
    from terrella.benchmarks.rollout import random_engine
    from terrella.models.config import ModelConfig
    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler
    from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
    from terrella.tests.integration.colocated_jobs import another_step, gap

    model = ModelConfig(
        family="qwen2",
        layers=4,
        hidden=1024,
        heads=8,
        kv_heads=2,
        head_dim=128,
        ffn=4096,
        vocab=32000,
        tied=True,
        qkv_bias=True,
    )
    engine = random_engine(model, lr=1e-3)
    settings = Vllm(colocated=True, sleep=2, offload=True, max_length=256, max_sequences=64, gpu_memory=0.3)
    opened = open_sampler(settings, engine, model, tmp_path)
    try:
        assert opened.publish is not None and opened.rest is not None
        asked = [SampleRequest(tuple(range(10 + i, 40 + i)), (1, i, 0, 0), SamplingParams(32)) for i in range(32)]
        for _ in range(2):
            opened.publish(engine.steps)
            samples = opened.sampler.generate(asked)
            memory = opened.rest()
            assert gap(engine, asked, samples) < 0.1
            # vLLM's share is given back
            assert memory["time/gib_while_training"] < memory["time/gib_while_sampling"] - 20
            another_step(engine)
        assert gap(engine, asked, samples) > 0.1  # other weights are told apart
    finally:
        opened.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each side")
def test_nccl_between_two_gpus(tmp_path) -> None:
    from terrella.benchmarks.rollout import TINY, random_engine
    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler
    from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
    from terrella.tests.integration.colocated_jobs import gap

    engine = random_engine(TINY, lr=1e-3)
    settings = Vllm(devices=["1"], max_length=128, max_sequences=16, gpu_memory=0.3)
    opened = open_sampler(settings, engine, TINY, tmp_path)
    try:
        assert opened.publish is not None
        opened.publish(engine.steps)
        asked = [SampleRequest(tuple(range(5, 20)), (1, i, 0, 0), SamplingParams(16)) for i in range(8)]
        assert gap(engine, asked, opened.sampler.generate(asked)) < 0.1
    finally:
        opened.close()
