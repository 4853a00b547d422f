"""`python -m terrella.benchmarks.e2e`: one whole GRPO step (generate, score, train, bring the sampler up to date),
beside TRL; and the rollout of a video world model with forced actions, embedded beside vLLM.

Random weights and a reward that is a hash of the answer: groups differ, so that nothing is skipped. Every sample runs
to its limit, so that all implementations do the same work: one limit for all, or one for each out of a list with a long
tail, the same for every implementation, as answers of a trained model have. Each runs in a process of its own, warms up
on a small batch and is then timed on whole steps; while one runs, the next only imports. A start of vLLM alone takes
about a minute on an H200: allow ten for everything. `prepare` is rewards, advantages and packing: nothing is scored a
second time, as one update on fresh samples needs no other log-probs.

Ours trains bf16 weights with fp32 master weights and fp32 gradients; TRL runs in its fastest regime, with weights,
gradients and optimizer state all in bf16. TRL 1.16 has a fused head of its own in place of Liger's loss; Liger's layers
are on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..models.geometry import GEOMETRIES, flops_per_token
from . import record
from .children import Child, wait_for_word
from .rollout import CASES as ROLLOUTS
from .rollout import TINY as TINY_MODEL
from .rollout import Case, random_engine, recorder, requests_of, synchronize
from .sync import ColocatedVllm
from .train import PEAK_TFLOPS, QWEN

# half of its layers: fp32 master weights, gradients and moments of all of them are 137 GB
HALF_7B = replace(GEOMETRIES["qwen2.5-7b"], family="qwen2", layers=14, qkv_bias=True, rope_theta=1e6)
VIDEO = "video-gpt 127M 64x8, 7x(80+13)"
CASES = {
    "grpo qwen2.5-1.5b 256x8x512": Case(QWEN, 256, 8, 128, 512),
    "grpo qwen2.5-1.5b 32x8, long-tailed to 2048": Case(QWEN, 32, 8, 128, 2048, median=300),
    "grpo qwen2.5-7b/14 16x8, long-tailed to 1024": Case(HALF_7B, 16, 8, 128, 1024, median=200),
    "grpo tiny 4x2x8": Case(TINY_MODEL, 4, 2, 16, 8),
    "grpo tiny 4x2, long-tailed to 32": Case(TINY_MODEL, 4, 2, 16, 32, median=8),
    f"rollout {VIDEO}": ROLLOUTS[VIDEO],
    "rollout tiny 4x2, 3x(8+2)": ROLLOUTS["tiny 4x2, 3x(8+2)"],
}
IMPLEMENTATIONS = {"grpo": ("terrella embedded", "terrella vllm", "trl vllm"), "rollout": ("terrella embedded", "vllm")}
MICROBATCH = 16  # sequences in a microbatch at most, for all
MICROBATCH_TOKENS = 17500  # and tokens, padding included, of a model 1,536 wide; fewer of a wider one
VLLM_SHARE = 0.38  # of the GPU's memory: the cache then holds all samples of a step at once
CACHE_GIB = 48.0  # of the embedded sampler, as much as vLLM gets
PARTS = ("generate", "prepare", "train", "sync")


def reward_of(ids: Any) -> float:
    """A number in [0, 1] that belongs to an answer."""
    from ..core.rng import uniform

    return uniform(*ids[:16])


def microbatch(case: Case) -> int:
    """Sequences of the longest kind in a microbatch: a divisor of all."""
    tokens = min(MICROBATCH_TOKENS, MICROBATCH_TOKENS * QWEN.hidden // case.model.hidden)
    rows = case.prompts * case.samples
    return max(n for n in range(1, min(MICROBATCH, rows, tokens // case.length) + 1) if rows % n == 0)


def warm_up(case: Case) -> Case:
    """The beginning of the same work: as many samples, few tokens of each."""
    return replace(case, sampled=min(case.sampled, 20), spans=min(case.spans, 2), median=0)


def embedded_sampler(engine: Any, case: Case, cache_gib: float) -> Any:
    """On the engine's own weights, with a bound on its cache: the trainer needs the rest."""
    from ..rl.rollout.embedded import EmbeddedSampler
    from ..rl.rollout.open import sampling_weights

    rows = case.prompts * case.samples
    return EmbeddedSampler(
        sampling_weights(engine), case.model, version=lambda: engine.steps, max_batch=rows, cache_gib=cache_gib
    )


def trained_tokens(case: Case) -> int:
    """Tokens of a step's sequences, without padding."""
    return case.tokens + case.prompts * case.samples * (case.length - case.spans * case.sampled)


def peak_gib() -> float:
    """The most memory that torch took in this process; a colocated vLLM has its own."""
    import torch

    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


class Ours:
    """Our loop's parts, timed one by one."""

    def __init__(self, case: Case, served: bool) -> None:
        from ..rl import algorithms
        from ..rl.algorithms.config import GRPO
        from ..rl.objective import make_loss

        self.algorithm, self.loss = GRPO(), make_loss(algorithms.settings(GRPO(), 1.0))
        self.served, self.case = served, case
        self.engine = random_engine(case.model)
        self.colocated = ColocatedVllm(case, self.engine, VLLM_SHARE) if served else None
        self.sampler = self.colocated.sampler if self.colocated else embedded_sampler(self.engine, case, CACHE_GIB)
        if self.colocated:
            self.colocated.sync(0)

    def step(self, case: Case, turn: int, microbatches: int | None = None) -> dict[str, float]:
        """One step, or its first microbatches alone; seconds of its parts, and the drift between sampler and
        trainer.
        """
        from ..data.packing import pack
        from ..data.trajectory import Trajectory
        from ..rl import algorithms
        from ..rl.algorithms.common import Scores
        from ..rl.rollout.episodes import sampled_sequence

        asked = requests_of(case, turn)
        synchronize()
        marks = [time.perf_counter()]
        samples = self.sampler.generate(asked)
        synchronize()
        marks.append(time.perf_counter())
        trajectories = [
            Trajectory(r.key[1], r.key[2], [sampled_sequence(r.ids, s)], reward_of(s.ids))
            for r, s in zip(asked, samples, strict=True)
        ]
        rows = algorithms.prepare(
            self.algorithm, trajectories, Scores(device=self.engine.device), lambda value: [value]
        )
        batches = pack(rows, budget=microbatch(self.case) * self.case.length)
        marks.append(time.perf_counter())
        result = self.engine.step(batches[:microbatches], self.loss)
        synchronize()
        marks.append(time.perf_counter())
        if self.colocated:
            self.colocated.sync(self.engine.steps)
            marks.append(time.perf_counter())
        else:
            # it samples from the engine's own weights: exactly nothing, not a clock's noise to be compared
            marks.append(marks[-1])
        times = {name: end - begin for name, begin, end in zip(PARTS, marks, marks[1:], strict=False)}
        assert sum(len(s.ids) for s in samples) == case.tokens
        return times | {"step": marks[-1] - marks[0], "drift": result.metrics["drift"] / result.metrics["pg_tokens"]}


def ours(case: Case, impl: str, steps: int) -> dict[str, Any]:
    """Warm up, then time whole steps."""
    work = Ours(case, impl.endswith("vllm"))
    work.step(warm_up(case), 10**6, microbatches=2)
    say("warm")
    measured = [work.step(case, turn) for turn in range(steps)]
    figures = {
        "times": {part: [f[part] for f in measured] for part in (*PARTS, "step")},
        "drift": measured[-1]["drift"],
    }
    figures["peak_gib"] = peak_gib()
    if work.colocated:
        figures |= {"syncs": work.colocated.times(5)}
    return figures


def word_model(case: Case) -> tuple[Path, Any]:
    """A Hugging Face folder of the case's geometry with random weights, and a tokenizer of one word per id, as TRL
    wants text.

    The tokenizer is handed over as it is: read from a folder of this family it would become the family's own kind.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from ..models.families import write_hf_config

    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    cuda = torch.cuda.is_available()
    settings = write_hf_config(case.model, "bfloat16" if cuda else "float32")
    config = AutoConfig.for_model(
        settings.pop("model_type"), **{k: v for k, v in settings.items() if k not in ("torch_dtype", "dtype")}
    )
    with torch.device("cuda" if cuda else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32).save_pretrained(
            folder
        )
    vocab = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, case.model.vocab)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    if cuda:
        torch.cuda.empty_cache()
    return folder, tokenizer


def trl_options(case: Case, steps: int, cuda: bool) -> dict[str, Any]:
    """TRL at its fastest on this work: vLLM beside the trainer and awake, no recomputation, Liger's layers, its own
    fused head and loss, no second forward pass for an importance correction (ours makes none either)."""
    total, micro = case.prompts * case.samples, microbatch(case)
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": total // micro,
        "gradient_checkpointing": False,
        "num_generations": case.samples,
        "max_completion_length": case.spans * case.sampled,
        "temperature": 1.0,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": VLLM_SHARE,
        "vllm_max_model_length": case.length,
        "vllm_enable_sleep_mode": False,
        "vllm_importance_sampling_correction": False,
        "use_liger_kernel": cuda,
        "loss_type": "dapo",  # token mean, as ours
        "beta": 0.0,
        "bf16": cuda,
        "use_cpu": not cuda,
        "optim": "adamw_torch_fused" if cuda else "adamw_torch",
        "max_steps": steps,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "generation_kwargs": {"ignore_eos": True},
        "model_init_kwargs": {"dtype": "bfloat16" if cuda else "float32"},
    }


def trl(case: Case, steps: int) -> dict[str, Any]:
    """TRL's GRPO trainer with colocated vLLM, on the same shapes."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    cuda = torch.cuda.is_available()
    options = trl_options(case, steps, cuda)
    unknown = set(options) - set(GRPOConfig.__dataclass_fields__)
    if unknown:
        raise SystemExit(f"trl: this version has no settings {sorted(unknown)}")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, case.model.vocab, (case.prompts * steps, case.prompt), generator=draw).tolist()
    data = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            marks.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            marks.append(time.perf_counter())

    def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [reward_of(ids) for ids in completion_ids]

    folder, tokenizer = word_model(case)
    arguments = {
        "reward_funcs": reward,
        "args": GRPOConfig(**options),
        "train_dataset": data,
        "processing_class": tokenizer,
    }
    trainer = GRPOTrainer(model=str(folder), callbacks=[Clock()], **arguments)
    say("vllm is up")
    times: dict[str, list[float]] = {"generate": [], "sync": []}

    def timed(name: str, call: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            begun = time.perf_counter()
            answer = call(*args, **kwargs)
            synchronize()
            times[name].append(time.perf_counter() - begun)
            return answer

        return inner

    generation = trainer.vllm_generation
    _warm_up_trl(trainer, case, ids)
    _limit_trl(generation.llm, case)
    say("warm")
    generation.generate, generation.sync_weights = (
        timed("generate", generation.generate),
        timed("sync", generation.sync_weights),
    )
    trainer.train()
    step = [later - earlier for earlier, later in itertools.pairwise(marks)]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    seen = trainer.state.num_input_tokens_seen  # prompts and answers
    if (
        not lengths
        or any(abs(n * case.prompts * case.samples - case.tokens) > 1 for n in lengths)
        or seen != steps * trained_tokens(case)
    ):
        raise SystemExit(f"trl: answers of {lengths} tokens on average, {seen} tokens in all: not the same work")
    rest = [s - g - y for s, g, y in zip(step, times["generate"], times["sync"], strict=True)]
    return {"times": {**times, "prepare and train": rest, "step": step}, "peak_gib": peak_gib()}


def _limit_trl(llm: Any, case: Case) -> None:
    """Give every request of TRL's vLLM the length that is due to it."""
    generate, turns = llm.generate, itertools.count()

    def limited(prompts: list[Any], sampling_params: Any, **kwargs: Any) -> Any:
        lengths = case.lengths(next(turns))
        each = [sampling_params.clone() for _ in lengths]
        for params, length in zip(each, lengths, strict=True):
            params.min_tokens = params.max_tokens = length
        return generate(prompts, sampling_params=each, **kwargs)

    llm.generate = limited


def _warm_up_trl(trainer: Any, case: Case, ids: list[list[int]]) -> None:
    """What a first step would do once, outside the time: kernels are compiled and memory is taken."""
    import torch

    small = warm_up(case)
    few = trainer.vllm_generation.max_completion_length
    trainer.vllm_generation.max_completion_length = small.sampled
    trainer.vllm_generation.generate(
        prompts=[row for row in ids[: case.prompts] for _ in range(case.samples)], images=None, num_generations=1
    )
    trainer.vllm_generation.max_completion_length = few
    device = trainer.accelerator.device
    tokens = torch.randint(3, case.model.vocab, (microbatch(case), case.length), device=device)
    labels = tokens.clone()
    labels[:, : case.prompt] = -100
    with trainer.compute_loss_context_manager():
        output = trainer.model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels, fused_lm_head=True
        )
    output.log_probs.mean().backward()
    trainer.model.zero_grad(set_to_none=True)


def rollouts(case: Case, impl: str, rounds: int) -> dict[str, Any]:
    """Seconds of whole rollouts."""
    engine = random_engine(case.model, lr=0)
    colocated = ColocatedVllm(case, engine, 0.6) if impl == "vllm" else None
    sampler = colocated.sampler if colocated else embedded_sampler(engine, case, CACHE_GIB)
    if colocated:
        colocated.sync(0)
    seconds = []
    for turn in range(rounds + 1):
        work = case if turn else warm_up(case)
        asked = requests_of(work, turn)
        synchronize()
        begun = time.perf_counter()
        samples = sampler.generate(asked)
        synchronize()
        seconds.append(time.perf_counter() - begun)
        assert sum(sum(not given for given in s.given) for s in samples) == work.tokens
    return {"times": {"step": seconds[1:]}, "peak_gib": peak_gib()}


def say(what: str) -> None:
    """Progress of a child, for its log."""
    print(f"{time.perf_counter():.1f} s: {what}", flush=True)


def child(impl: str, name: str, steps: int) -> None:
    """Import, wait for the word, time one implementation and print the figures as JSON."""
    heavy = (
        ["torch", "megatron.core"]
        + (["vllm"] if "vllm" in impl else [])
        + (["trl", "datasets"] if impl.startswith("trl") else [])
    )
    for module in heavy:
        if importlib.util.find_spec(module.split(".")[0]):
            importlib.import_module(module)
    say("imported")
    wait_for_word()
    say("begun")
    case = CASES[name]
    if name.startswith("rollout"):
        figures = rollouts(case, impl, steps)
    else:
        figures = trl(case, steps) if impl.startswith("trl") else ours(case, impl, steps)
    print("RESULT " + json.dumps(figures), flush=True)


def add_rows(rows: record.Recorder, name: str, impl: str, result: dict[str, Any]) -> None:
    """The figures of one implementation as rows, and a line of print."""
    import torch

    case, times = CASES[name], result["times"]
    step = statistics.median(times["step"])
    rows.add(name, impl, "tokens_per_s", case.tokens / step, "tok/s")
    for part, seconds in times.items():
        if seconds:
            rows.add(name, impl, part, statistics.median(seconds), "s", min(seconds), max(seconds))
            if part != "step":
                rows.add(name, impl, f"share of {part}", statistics.median(seconds) / step, "part")
    if len(times) > 1:  # of TRL rewards and updates cannot be told apart
        parts = [seconds for part, seconds in times.items() if part in ("prepare", "train", "prepare and train")]
        training = statistics.median(map(sum, zip(*parts, strict=True)))
        rows.add(name, impl, "trained tokens_per_s", trained_tokens(case) / training, "tok/s")
    if torch.cuda.is_available():
        rows.add(name, impl, "peak memory of the trainer", result["peak_gib"], "GB")
        rows.add(name, impl, "peak memory of the device", result["device_gib"], "GB")
        peak = next((v for k, v in PEAK_TFLOPS.items() if k in torch.cuda.get_device_name()), None)
        if times.get("train") and peak:
            work = sum(flops_per_token(case.model, n) * n for n in (case.prompt + x for x in case.lengths()))
            rows.add(name, impl, "mfu in training", work / statistics.median(times["train"]) / peak / 1e12, "share")
    if "drift" in result:
        rows.add(name, impl, "sampler drift, mean |dlogp|", result["drift"], "error")
    if "syncs" in result:
        rows.add(
            name,
            impl,
            "sync again",
            statistics.median(result["syncs"]),
            "s",
            min(result["syncs"]),
            max(result["syncs"]),
        )
    shares = ", ".join(f"{part} {statistics.median(s) / step:.0%}" for part, s in times.items() if s and part != "step")
    print(f"{name} | {impl}: {step:.2f} s a step, {case.tokens / step:,.0f} sampled tok/s; {shares}", flush=True)


def can_run(impl: str, cuda: bool) -> bool:
    needs = [n for n in ("vllm", "trl") if n in impl]
    return all(importlib.util.find_spec(n) for n in needs) and (cuda or not impl.startswith("trl"))


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="default: the full ones with a GPU, the tiny ones without"
    )
    parser.add_argument("--impl", action="append", help="default: all that can run")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for each implementation")
    parser.add_argument(
        "--logs", type=Path, help="where the output of each implementation goes; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        impl, name = args.child.split("|")
        return child(impl, name, args.steps)
    cuda = torch.cuda.is_available()
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    work = []
    for name in args.case or [n for n in CASES if ("tiny" in n) != cuda]:
        for impl in IMPLEMENTATIONS[name.split()[0]]:
            if args.impl and impl not in args.impl:
                continue
            if can_run(impl, cuda):
                work.append((name, impl))
            else:
                print(f"{name} | {impl}: left out, it needs a GPU or a package that is not here", flush=True)
    words = ["--steps", str(args.steps), "--child"]
    children = [
        Child(__spec__.name, [*words, f"{impl}|{name}"], logs / f"{k}.log") for k, (name, impl) in enumerate(work)
    ]
    failed = []
    for place, ((name, impl), one) in enumerate(zip(work, children, strict=True)):
        for following in children[place : place + 2]:
            following.start()
        result = one.finish(args.timeout)
        if isinstance(result, str):
            print(f"{name} | {impl}: failed:\n{result}", flush=True)
            failed.append(f"{name} | {impl}")
            continue
        rows = recorder("e2e")
        add_rows(rows, name, impl, result)
        record.append(rows.rows, args.out)  # at once: a run that is cut short keeps what it measured
    if failed:
        raise SystemExit(f"no figures of: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
