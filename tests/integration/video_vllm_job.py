"""vLLM in a process of its own for the video test: `python -m terrella.tests.integration.video_vllm_job MODEL
REQUESTS ANSWERS`.
"""

import json
import sys
from pathlib import Path

from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
from terrella.rl.rollout.vllm_config import VllmSettings
from terrella.rl.rollout.vllm_local import LocalVllm


def read(told: dict) -> SampleRequest:
    params = SamplingParams(
        told["sampled"], told["temperature"], allowed=tuple(told["allowed"]) if told["allowed"] else None
    )
    return SampleRequest(
        tuple(told["ids"]), tuple(told["key"]), params, tuple((at, tuple(ids)) for at, ids in told["forced"])
    )


def main(model: str, asked: str, answers: str) -> None:
    requests = [read(told) for told in json.loads(Path(asked).read_text())]
    settings = VllmSettings(model=model, dtype="float32", max_length=128, max_sequences=16, eager=True)
    samples = LocalVllm(settings).generate(requests)
    Path(answers).write_text(json.dumps([[list(s.ids), list(s.given), list(s.logprobs)] for s in samples]))


if __name__ == "__main__":
    main(*sys.argv[1:])
