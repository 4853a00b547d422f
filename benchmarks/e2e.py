"""`python -m terrella.benchmarks.e2e`: one whole GRPO step (generate, score, train, bring the sampler up to date), beside TRL.

Random weights and a reward that is a hash of the answer: groups differ, so that nothing is skipped. Every sample runs to its limit,
so that all implementations do the same work. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from . import record
from .rollout import CASES as ROLLOUTS
from .rollout import Case, embedded_sampler, random_engine, recorder, requests_of, run_child, sync, synchronize, vllm_sampler

CASES = {name: case for name, case in ROLLOUTS.items() if not case.forced} | {
    "tiny 4x2, 8 new": Case(ROLLOUTS["tiny 4x2, 3x(8+2)"].model, 4, 2, 16, 8)
}
IMPLEMENTATIONS = ("terrella vllm", "terrella embedded", "trl vllm liger")
MICROBATCH_TOKENS = 16_384


def reward_of(ids: Any) -> float:
    """A number in [0, 1] that belongs to an answer."""
    from ..core.rng import uniform

    return uniform(*ids[:16])


def ours(case: Case, impl: str, steps: int) -> dict[str, Any]:
    """Our loop's parts, timed one by one."""
    import torch

    from ..data.packing import pack
    from ..data.trajectory import Trajectory
    from ..rl import algorithms
    from ..rl.algorithms.common import Scores
    from ..rl.algorithms.config import GRPO
    from ..rl.objective import make_loss
    from ..rl.rollout.episodes import sampled_sequence

    served = impl.endswith("vllm")
    engine = random_engine(case.model)
    sampler = vllm_sampler(case, gpu_memory=0.3) if served else embedded_sampler(engine, case)
    if served:
        sync(sampler, engine, 0)
    algorithm, loss = GRPO(), make_loss(algorithms.settings(GRPO(), 1.0))
    times: dict[str, list[float]] = {"generate": [], "prepare": [], "train": [], "sync": [], "step": []}
    drifts: list[float] = []
    for number in range(steps + 1):
        asked = requests_of(case, number)
        synchronize()
        marks = [time.perf_counter()]
        samples = sampler.generate(asked)
        synchronize()
        marks.append(time.perf_counter())
        trajectories = [
            Trajectory(r.key[1], r.key[2], [sampled_sequence(r.ids, s)], reward_of(s.ids)) for r, s in zip(asked, samples, strict=True)
        ]
        rows = algorithms.prepare(algorithm, trajectories, Scores(), lambda value: [value])
        batches = pack(rows, budget=max(MICROBATCH_TOKENS, case.length), pad=False)
        marks.append(time.perf_counter())
        result = engine.step(batches, loss)
        synchronize()
        marks.append(time.perf_counter())
        if served:
            sync(sampler, engine, engine.steps)
        marks.append(time.perf_counter())
        if number:
            for name, begun, ended in zip(("generate", "prepare", "train", "sync"), marks, marks[1:], strict=False):
                times[name].append(ended - begun)
            times["step"].append(marks[-1] - marks[0])
            drifts.append(result.metrics["drift"] / result.metrics["pg_tokens"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"times": times, "drift": statistics.mean(drifts), "peak_gib": peak}


def word_model(case: Case) -> Path:
    """A Hugging Face folder of the case's geometry with random weights and a tokenizer of one word per id, as TRL wants text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from ..models.families import write_hf_config

    folder = Path(tempfile.mkdtemp())
    settings = write_hf_config(case.model, "bfloat16")
    config = AutoConfig.for_model(settings.pop("model_type"), **{k: v for k, v in settings.items() if k != "torch_dtype"})
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(case.model.vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0").save_pretrained(folder)
    return folder


def trl(case: Case, steps: int) -> dict[str, Any]:
    """TRL's GRPO trainer with colocated vLLM and its Liger loss, on the same shapes."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    folder = word_model(case)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, case.model.vocab, (case.prompts * (steps + 1), case.prompt), generator=draw).tolist()
    data = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})
    micro = max(1, MICROBATCH_TOKENS // case.length)
    total = case.prompts * case.samples
    while total % micro:
        micro -= 1
    options = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": total // micro,
        "num_generations": case.samples,
        "max_completion_length": case.spans * case.sampled,
        "max_prompt_length": case.prompt,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": case.length,
        "use_liger_loss": True,
        "use_liger_kernel": True,
        "loss_type": "dapo",  # token-mean, as ours
        "beta": 0.0,
        "bf16": True,
        "max_steps": steps + 1,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "generation_kwargs": {"ignore_eos": True},
        "model_init_kwargs": {"dtype": torch.bfloat16},
    }
    known = set(GRPOConfig.__dataclass_fields__)
    dropped = sorted(set(options) - known)  # names that this version of TRL does not have
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            marks.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            marks.append(time.perf_counter())

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [reward_of([int(w[1:]) for w in text.split() if w[1:].isdigit()][:16] or [0]) for text in completions]

    arguments = GRPOConfig(**{k: v for k, v in options.items() if k in known})
    trainer = GRPOTrainer(model=str(folder), reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    seconds = [later - earlier for earlier, later in itertools.pairwise(marks)][1:]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return {
        "times": {"step": seconds},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "dropped": dropped,
        "mean_length": lengths[-1:],
    }


def child(impl: str, name: str, steps: int) -> None:
    """Time one implementation and print the figures as JSON."""
    figures = trl(CASES[name], steps) if impl.startswith("trl") else ours(CASES[name], impl, steps)
    print("RESULT " + json.dumps(figures), flush=True)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: the 1.5B case with a GPU, the tiny one without")
    parser.add_argument("--impl", action="append", choices=list(IMPLEMENTATIONS), help="default: all that can run")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for each implementation")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        impl, name = args.child.split("|")
        return child(impl, name, args.steps)
    cuda = torch.cuda.is_available()
    chosen = args.case or [name for name in CASES if name.startswith("qwen" if cuda else "tiny")]
    rows = recorder("e2e")
    for name in chosen:
        for impl in args.impl or IMPLEMENTATIONS:
            if impl.startswith("trl") and not (cuda and importlib.util.find_spec("trl")):
                print(f"{name} | {impl}: left out, it needs a GPU and trl")
                continue
            result = run_child(__spec__.name, ["--child", f"{impl}|{name}", "--steps", str(args.steps)], args.timeout)
            if isinstance(result, str):
                print(f"{name} | {impl}: failed:\n{result}")
                continue
            for part, seconds in result["times"].items():
                if seconds:
                    rows.add(name, impl, part, statistics.median(seconds), "s", min(seconds), max(seconds))
            step = statistics.median(result["times"]["step"])
            rows.add(name, impl, "speed", CASES[name].tokens / step, "tok/s")
            rows.add(name, impl, "peak memory", result["peak_gib"], "GB")
            if "drift" in result:
                rows.add(name, impl, "sampler drift, mean |dlogp|", result["drift"], "error")
            shares = ", ".join(f"{part} {statistics.median(s) / step:.0%}" for part, s in result["times"].items() if s and part != "step")
            print(f"{name} | {impl}: {step:.2f} s a step, {CASES[name].tokens / step:,.0f} sampled tok/s; {shares} {result.get('dropped')}")
    record.append(rows.rows, args.out)


if __name__ == "__main__":
    main()
