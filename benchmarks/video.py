"""`python -m terrella.benchmarks.video`: frames a second of each picture metric, of decoding, of the whole reward,
on this device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..models.video.config import TokenizerConfig
from ..models.video.lpips import weights_folder
from ..models.video.tokenizer import Codes, build_tokenizer
from ..rl.rewards.video import FUNCTIONS, Metric, frame_metrics
from . import record

HORIZON = 7
NETS = {"lpips": "vgg", "lpips_alex": "alex"}
DECODER = TokenizerConfig(
    kind="compressive",
    height=64,
    width=64,
    channels=[32, 64, 128],
    encoder_resnets=1,
    latent=64,
    levels=[8, 5, 5, 5],
    patch=4,
    still=True,
)  # that of video-gpu


def rates(work: Callable[[], object], frames: int, seconds: float, device: torch.device) -> list[float]:
    """Frames a second of each call, after two that warm up."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        work()
    settle()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        settle()
        found.append(frames / (time.perf_counter() - begun))
    return found


def has_weights(name: str) -> bool:
    return name not in NETS or (weights_folder() / f"{NETS[name]}.safetensors").is_file()


@torch.no_grad()
def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m terrella.benchmarks.video", description=__doc__)
    parser.add_argument(
        "--frames", type=int, default=3584, help="frames judged at once: 32 prompts x 16 samples x 7 frames"
    )
    parser.add_argument("--size", type=int, default=64, help="pixels of a side; decoding is measured at 64")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="CSV file to append to")
    given = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = sys.argv[1:] if words is None else words
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    command = record.command_line("python -m terrella.benchmarks.video", arguments)
    recorder = record.Recorder("video", command, name, f"torch {torch.__version__}")
    case = f"{given.size} px, {given.frames} frames at once"

    def put(metric: str, work: Callable[[], object], frames: int = given.frames) -> None:
        measured = rates(work, frames, given.seconds, device)
        cuts = statistics.quantiles(measured, n=5, method="inclusive")
        low, middle, high = cuts[0], statistics.median(measured), cuts[3]
        recorder.add(case, "terrella", metric, middle, "frames/s", low, high)
        print(f"{metric}: {middle:,.0f} frames/s  ({low:,.0f} to {high:,.0f})", flush=True)

    shape = (given.frames, 3, given.size, given.size)
    a, b = torch.rand(shape, device=device), torch.rand(shape, device=device)
    for metric in FUNCTIONS:
        if has_weights(metric):
            put(metric, lambda f=FUNCTIONS[metric]: f(a, b))
        else:
            print(f"{metric}: no weights in {weights_folder()}, left out")
    if given.size == DECODER.height:
        clips = max(given.frames // HORIZON, 1)
        model = build_tokenizer(DECODER).to(device).eval()
        codes = torch.randint(0, DECODER.codebook, (clips, HORIZON, DECODER.frame_tokens), device=device)
        context = torch.randint(0, DECODER.codebook, (clips, DECODER.context_tokens), device=device)
        cache = model.context_cache(context)  # type: ignore[union-attr]
        true = b[: clips * HORIZON].view(clips, HORIZON, *b.shape[1:])

        def decode() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                return model.detokenize(Codes(codes), cache)

        put("decode", decode, clips * HORIZON)
        for net in ("lpips_alex", "lpips"):
            if has_weights(net):
                names: tuple[Metric, ...] = ("mae", net)  # type: ignore[assignment]
                put(
                    f"reward: decode + mae + {net}",
                    lambda names=names: frame_metrics(decode().float(), true, names),
                    clips * HORIZON,
                )
    record.append(recorder.rows, given.out)


if __name__ == "__main__":
    main()
