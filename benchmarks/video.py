"""Video rewards: frames a second of each metric and of decoding on the device at hand: `python -m terrella.benchmarks.video`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..models.video.config import TokenizerConfig
from ..models.video.lpips import weights_folder
from ..models.video.tokenizer import Codes, build_tokenizer
from ..rl.rewards.video import FUNCTIONS, METRICS

DECODER = TokenizerConfig(
    kind="compressive", height=64, width=64, channels=[64, 128, 128, 256], decoder_resnets=3, levels=[8, 5, 5, 5], patch=2
)


def rate(work: Callable[[], object], frames: int, seconds: float, device: torch.device) -> float:
    """Frames a second after one warm-up call."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    settle()
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        work()
        settle()
        calls += 1
    return calls * frames / (time.perf_counter() - begun)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=3584)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (given.frames, 3, given.size, given.size)
    a, b = torch.rand(shape, device=device), torch.rand(shape, device=device)
    told: dict[str, float] = {}
    for name in METRICS:
        net = {"lpips": "vgg", "lpips_alex": "alex"}.get(name)
        if net and not (weights_folder() / f"{net}.safetensors").is_file():
            print(f"{name}: no weights in {weights_folder()}, left out")
            continue
        told[name] = rate(lambda f=FUNCTIONS[name]: f(a, b), given.frames, given.seconds, device)
        print(f"{name}: {told[name]:,.0f} frames/s")
    if given.size == DECODER.height:
        model = build_tokenizer(DECODER).to(device).eval()
        clips = max(given.frames // 7, 1)
        codes = torch.randint(0, DECODER.codebook, (clips, 7, DECODER.frame_tokens), device=device)
        cache = model.context_cache(torch.randint(0, DECODER.codebook, (clips, DECODER.context_tokens), device=device))  # type: ignore[union-attr]

        def decode() -> object:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                return model.detokenize(Codes(codes), cache)

        told["decode"] = rate(decode, clips * 7, given.seconds, device)
        print(f"decode: {told['decode']:,.0f} frames/s")
    if given.out:
        given.out.write_text(json.dumps({"device": str(device), "size": given.size, "frames_per_s": told}, indent=1))


if __name__ == "__main__":
    main()
