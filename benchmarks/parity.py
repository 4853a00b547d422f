"""`python -m terrella.benchmarks.parity`: whether training in fp8 learns as training in bf16 does.

The layers of a 0.5B model are trained on bytes of this project's own files, from the same start, in bf16 with several
orders of the text and in fp8. The loss on text that no run sees is compared: the band is what the order of the text
alone does to bf16. Runs are kept one by one in a file, so that several commands add up to one table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from ..models.geometry import GEOMETRIES
from . import record

BYTES = 256  # tokens
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 forward": {"fp8": True, "fp8_products": "forward"},
    "fp8": {"fp8": True},
    "fp8 all": {"fp8": True, "fp8_products": "all"},
    "fp8 all + head": {"fp8": True, "fp8_products": "all", "fp8_head": True},
    "fp8 all but the ends": {"fp8": True, "fp8_products": "all", "fp8_skip": 1},
}


@dataclass(frozen=True)
class Case:
    """A step trains on `rows` pieces of `length` bytes; `held_out` pieces are for the comparison."""

    model: ModelConfig
    rows: int
    length: int
    held_out: int
    lr: float


CASES = {
    "0.5b": Case(replace(GEOMETRIES["qwen2.5-0.5b"], vocab=BYTES), 16, 1024, 64, 5e-4),
    "tiny": Case(ModelConfig(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=BYTES), 2, 64, 4, 1e-2),
}


def read_pieces(root: Path, length: int) -> list[bytes]:
    """The text of the project's files end to end, cut into pieces with one byte more than a row: its last target."""
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".md", ".yaml", ".csv") and p.is_file())
    shown = [p for p in files if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    text = b"".join(path.read_bytes() for path in shown)
    size = length + 1
    return [text[i : i + size] for i in range(0, len(text) - size + 1, size)]


def train(case: Case, form: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    """One run: [step, loss on held-out text] every so many steps, and the tokens per second in between."""
    import torch

    from ..core.batch import PackedBatch
    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine
    from ..kernels import linear_logprob
    from ..models import gpt
    from .trainers import cross_entropy, draw

    pieces = read_pieces(Path(__file__).resolve().parents[1], case.length)
    torch.manual_seed(0)
    order = torch.randperm(len(pieces)).tolist()  # the same pieces are held out from every run
    held_out, rest = order[: case.held_out], order[case.held_out :]
    if len(rest) < case.rows:
        raise ValueError(f"the project's files make {len(pieces)} pieces of {case.length} bytes, too few to train on")
    shuffle = torch.Generator().manual_seed(1 + seed)

    def batch(places: list[int]) -> PackedBatch:
        rows = torch.stack([torch.frombuffer(bytearray(pieces[i]), dtype=torch.uint8).long() for i in places])
        total = len(places) * case.length
        return PackedBatch(
            tokens_T=rows[:, :-1].reshape(-1),
            targets_T=rows[:, 1:].reshape(-1),
            positions_T=torch.arange(case.length).repeat(len(places)),
            cu_seqlens_D1=torch.arange(len(places) + 1).int() * case.length,
            max_seqlen=case.length,
            ce_weight_T=torch.full((total,), 1.0 / total),
        )

    def score(hidden_TH, head, local):
        options = {"vocab_size": head.vocab_size, "fp8": head.fp8}
        return {"logprob": linear_logprob(hidden_TH, head.weight_VH, local.targets_T, **options)[0]}

    gpt.initial_weight = lambda name, shape, seed, std: torch.zeros(()).expand(shape)  # drawn on the device below
    schedule = OptimizerConfig(case.lr, "cosine", min(50, steps // 4), steps, case.lr / 10, weight_decay=0.1)
    engine = Engine(gpt.build_gpt(case.model), ParallelConfig(), schedule, PrecisionConfig("bf16", **FORMATS[form]))
    shapes = {p.name: p.param.shape for p in engine.local_parameters()}
    torch.manual_seed(0)
    engine.load_weights(lambda name: draw(name, shapes[name], case.model.init_std, engine.device))
    tests = [batch(held_out[i : i + case.rows]) for i in range(0, len(held_out), case.rows)]
    left: list[int] = []
    curve, norms, taken = [], [], 0.0
    for step in range(1, steps + 1):
        if len(left) < case.rows:
            left += [rest[i] for i in torch.randperm(len(rest), generator=shuffle).tolist()]
        now, left = left[: case.rows], left[case.rows :]
        begun = time.perf_counter()
        result = engine.step([batch(now)], cross_entropy)
        taken += time.perf_counter() - begun
        if result.skipped:
            raise RuntimeError(f"{form}, seed {seed}: the gradient of step {step} is not finite")
        norms.append(result.grad_norm)
        if step % every == 0 or step == steps:
            logprob = torch.cat([r["logprob"].float() for r in engine.score(tests, score)])
            curve.append([step, -float(logprob.mean())])
            print(f"{form}, seed {seed}, step {step}: held-out loss {curve[-1][1]:.4f}", flush=True)
    rate = steps * case.rows * case.length / taken
    return {
        "format": form,
        "seed": seed,
        "curve": curve,
        "tokens_per_s": rate,
        "largest_norm": max(norms[steps // 4 :]),
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each point of the curves: bf16's band over its seeds, and where every other run lies."""
    plain = [run for run in runs if run["format"] == "bf16"]
    others = [run for run in runs if run["format"] != "bf16"]
    lines = []
    for i, (step, _) in enumerate(plain[0]["curve"] if plain else []):
        values = [run["curve"][i][1] for run in plain if len(run["curve"]) > i]
        low, high = min(values), max(values)
        cells = [f"step {step}: bf16 {low:.4f} to {high:.4f} ({len(values)} seeds)"]
        for run in others:
            if len(run["curve"]) > i:
                value = run["curve"][i][1]
                place = "inside" if low <= value <= high else f"{value - high if value > high else value - low:+.4f}"
                cells.append(f"{run['format']} seed {run['seed']} {value:.4f} {place}")
        lines.append("; ".join(cells))
    return lines


def main() -> None:
    import torch

    from ..core.mcore import setup, shim

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="default: bf16, fp8 and fp8 all")
    parser.add_argument("--seed", action="append", type=int, help="of the text's order; default: 0, 1 and 2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks at the held-out text")
    parser.add_argument("--runs", type=Path, required=True, help="file of finished runs; what it has is not run again")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        shim.install()
    setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    gpu = torch.cuda.get_device_name() if cuda else ""
    command = record.command_line("python -m terrella.benchmarks.parity", sys.argv[1:])
    recorder = record.Recorder("parity", command, gpu, f"torch {torch.__version__}")
    settings = {"case": args.case, "steps": args.steps, "every": args.every}

    def finished() -> list[dict[str, Any]]:
        lines = args.runs.read_text().splitlines() if args.runs.exists() else []
        return [run for run in map(json.loads, lines) if run["settings"] == settings]

    for form in args.format or ["bf16", "fp8", "fp8 all"]:
        for seed in args.seed or [0, 1, 2]:
            if any((run["format"], run["seed"]) == (form, seed) for run in finished()):
                continue
            run: dict[str, Any] = train(CASES[args.case], form, seed, args.steps, args.every)
            run["settings"] = settings
            args.runs.parent.mkdir(parents=True, exist_ok=True)
            with args.runs.open("a") as stream:
                stream.write(json.dumps(run) + "\n")
            name, case = f"{form}, seed {seed}", f"{args.case}, {args.steps} steps"
            recorder.add(case, name, "heldout_loss", run["curve"][-1][1], "nat")
            recorder.add(case, name, "tokens_per_s", run["tokens_per_s"], "tokens/s")
            record.append(recorder.rows, args.out)
            recorder.rows.clear()
            print(f"{name}: {run['tokens_per_s']:,.0f} tokens/s, largest gradient norm {run['largest_norm']:.2f}")
    print("\n".join(table(finished())))


if __name__ == "__main__":
    main()
