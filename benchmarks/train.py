"""`python -m terrella.benchmarks.train`: training throughput of one model beside its rivals, each in a process of its own, in one run.

Every implementation trains the same geometry on the same tokens in one microbatch. Regime `master`: bf16 weights with fp32 master
weights, fp32 gradients and clipping at 1.0, which is how this project trains. Regime `pure`: weights and optimizer state in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models.config import VIDEO_GPT, ModelConfig
from . import record

QWEN = ModelConfig(
    family="qwen2",
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    vocab=151936,
    max_positions=32768,
    rope_theta=1e6,
    tied=True,
    qkv_bias=True,
)
TINY = ModelConfig(family="qwen2", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, tied=True, qkv_bias=True)
CASES: dict[str, tuple[ModelConfig, list[int]]] = {
    "qwen2.5-1.5b 4x4096": (QWEN, [4096] * 4),
    "qwen2.5-1.5b packed 16k": (QWEN, [7000, 2500, 1000, 3000, 884, 1500, 500]),
    "video-gpt 127M 8x2024": (VIDEO_GPT, [2024] * 8),
    "tiny 4x64": (TINY, [64] * 4),
}
IMPLEMENTATIONS = {
    "terrella": {"regimes": ("master",)},
    "terrella cudnn attention": {"regimes": ("master",), "needs": "cuda"},
    "terrella TE": {"regimes": ("master",), "needs": "transformer_engine"},
    "terrella TE fp8": {"regimes": ("master",), "needs": "transformer_engine"},
    "megatron-core TE": {"regimes": ("master",), "needs": "transformer_engine"},
    "transformers sdpa": {"regimes": ("master", "pure")},
    "transformers compile": {"regimes": ("master", "pure"), "needs": "cuda"},
    "transformers liger": {"regimes": ("master", "pure"), "needs": "liger_kernel"},
}
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}


def flops_per_token(model: ModelConfig, lengths: list[int]) -> float:
    """Matrix-multiply work of forward and backward, causal attention counted as half."""
    qkv = model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads)
    layer = qkv + model.heads * model.head_dim * model.hidden + 3 * model.hidden * model.ffn
    attention = sum(n * n for n in lengths) / sum(lengths) * model.heads * model.head_dim
    return 6.0 * (model.layers * layer + model.vocab * model.hidden) + 6.0 * model.layers * attention


def make_tokens(model: ModelConfig, lengths: list[int]):
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab, (sum(lengths),), generator=draw), torch.randint(0, model.vocab, (sum(lengths),), generator=draw)


def ours(model: ModelConfig, lengths: list[int], layers: str, fp8: bool, cudnn: bool) -> Callable[[], float]:
    """One step of the engine."""
    import torch

    from ..core.batch import PackedBatch
    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine
    from ..core.mcore import setup, shim
    from ..kernels import PolicySettings, PolicyTerms, linear_policy_loss
    from ..models.gpt import build_gpt

    if not torch.cuda.is_available():
        shim.install()
    setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    precision = PrecisionConfig("bf16" if torch.cuda.is_available() else "fp32", fp8=fp8)
    engine = Engine(build_gpt(model, layers=layers), ParallelConfig(), OptimizerConfig(lr=1e-5, clip_grad=1.0), precision)  # type: ignore[arg-type]
    tokens, targets = make_tokens(model, lengths)
    total = len(tokens)
    batch = PackedBatch(
        tokens_T=tokens,
        targets_T=targets,
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_D1=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        ce_weight_T=torch.full((total,), 1.0 / total),
    ).to(engine.device)

    def loss(hidden_TH, head, local):
        out = linear_policy_loss(
            hidden_TH,
            head.weight_VH,
            local.targets_T,
            PolicyTerms(ce_weight=local.ce_weight_T),
            PolicySettings(entropy=False),
            group=head.group,
            vocab_size=head.vocab_size,
            weight_grad_VH=head.weight_grad_VH,
        )
        return out.loss, {"loss": out.loss.detach()}

    def step() -> float:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        choice = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext()
        with choice:
            return engine.step([batch], loss).metrics["loss"]

    return step


def stock_megatron(model: ModelConfig, lengths: list[int]) -> Callable[[], float]:
    """GPTModel with TransformerEngine's stock layers and its own cross-entropy, as Megatron users run it."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ..core.config import ParallelConfig
    from ..core.mcore import setup

    if len(set(lengths)) > 1:
        raise ValueError("the stock model is timed on even sequences only")
    setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    setup.start_parallel(ParallelConfig(), 0)
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        apply_rope_fusion=True,
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=model.padded_vocab,
        max_sequence_length=max(lengths),
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        share_embeddings_and_output_weights=model.tied,
    ).cuda()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), gpt)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-5, use_distributed_optimizer=True, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    tokens, targets = (x.view(len(lengths), -1).cuda() for x in make_tokens(model, lengths))
    positions = torch.arange(lengths[0], device="cuda").expand(len(lengths), -1)

    def forward(_, chunk):
        return chunk(tokens, positions, None, labels=targets), lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def step() -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        records = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=ddp,
            num_microbatches=1,
            seq_length=lengths[0],
            micro_batch_size=len(lengths),
            forward_only=False,
        )
        optimizer.step()
        return float(records[0]["loss"])

    return step


class MasterAdam:
    """fp32 master weights and gradients for any module of bf16 parameters: each gradient is added to its fp32 buffer and freed."""

    def __init__(self, parameters: list[Any], lr: float) -> None:
        import torch

        self.pairs = [(p, p.detach().float().clone()) for p in parameters]
        for p, master in self.pairs:
            master.grad = torch.zeros_like(master)
            p.register_post_accumulate_grad_hook(lambda q, buffer=master.grad: (buffer.add_(q.grad), setattr(q, "grad", None))[1])
        self.adam = torch.optim.AdamW([m for _, m in self.pairs], lr=lr, fused=True)

    def step(self) -> None:
        import torch

        masters = [m for _, m in self.pairs]
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        self.adam.step()
        torch._foreach_copy_([p.data for p, _ in self.pairs], masters)
        torch._foreach_zero_([m.grad for m in masters])


def transformers_model(model: ModelConfig, lengths: list[int], kind: str, regime: str) -> Callable[[], float]:
    """One step of transformers: eager, compiled, or with Liger's kernels."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..models.families import write_hf_config

    if len(set(lengths)) > 1:
        raise ValueError("transformers is timed on even sequences only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = write_hf_config(model, "bfloat16")
    config = AutoConfig.for_model(settings.pop("model_type"), **{k: v for k, v in settings.items() if k != "torch_dtype"})
    if kind == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2  # type: ignore[import-not-found]

        (apply_liger_kernel_to_qwen2 if model.family == "qwen2" else apply_liger_kernel_to_llama)()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):  # initialising 1.5B parameters on the host takes minutes
        net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    net.config.use_cache = False
    run = torch.compile(net) if kind == "compile" else net
    parameters = list(net.parameters())
    tokens, targets = (x.view(len(lengths), -1).to(device) for x in make_tokens(model, lengths))
    # transformers shifts labels itself: give them one place later, so that every token has its target
    labels = torch.cat([tokens[:, :1], targets[:, :-1]], 1)
    if regime == "master":
        master = MasterAdam(parameters, 1e-5)

        def update() -> None:
            master.step()
    else:
        adam = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            adam.step()
            adam.zero_grad(set_to_none=True)

    def step() -> float:
        loss = run(input_ids=tokens, labels=labels).loss
        loss.backward()
        update()
        return float(loss.detach())

    return step


def make_step(impl: str, regime: str, case: str) -> Callable[[], float]:
    """The step function of an implementation."""
    model, lengths = CASES[case]
    if impl.startswith("terrella"):
        return ours(model, lengths, "te" if " TE" in impl else "ours", impl.endswith("fp8"), "cudnn" in impl)
    if impl == "megatron-core TE":
        return stock_megatron(model, lengths)
    return transformers_model(model, lengths, impl.split()[1], regime)


def child(impl: str, regime: str, case: str, steps: int) -> None:
    """Time one implementation and print the figures as JSON."""
    import torch

    cuda = torch.cuda.is_available()
    step = make_step(impl, regime, case)
    losses = [step() for _ in range(4)]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(step())
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    print("RESULT " + json.dumps({"times": times, "losses": losses, "peak_gib": peak}), flush=True)


def missing(need: str | None) -> str:
    """Why an implementation cannot run here, or nothing."""
    import torch

    if need == "cuda" or need == "transformer_engine":
        if not torch.cuda.is_available():
            return "no GPU"
    if need not in (None, "cuda") and importlib.util.find_spec(need) is None:
        return f"{need} is not installed"
    return ""


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: the 1.5B case with a GPU, the tiny one without")
    parser.add_argument("--impl", action="append", choices=list(IMPLEMENTATIONS), help="default: all that can run")
    parser.add_argument("--regime", choices=["master", "pure", "both"], default="master")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each implementation")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        impl, regime, case = args.child.split("|")
        return child(impl, regime, case, args.steps)
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if cuda else ""
    packages = ("torch", "triton", "transformers", "megatron-core", "transformer_engine", "liger_kernel")
    versions = " ".join(f"{name} {_version(name)}" for name in packages)
    recorder = record.Recorder("train", "python -m terrella.benchmarks.train " + " ".join(sys.argv[1:]), gpu, versions)
    peak = next((v for k, v in PEAK_TFLOPS.items() if k in gpu), None)
    for case in args.case or (["qwen2.5-1.5b 4x4096"] if cuda else ["tiny 4x64"]):
        model, lengths = CASES[case]
        for impl in args.impl or IMPLEMENTATIONS:
            for regime in IMPLEMENTATIONS[impl]["regimes"]:
                if args.regime not in (regime, "both"):
                    continue
                why = missing(IMPLEMENTATIONS[impl].get("needs"))
                if why:
                    print(f"{case} | {impl} | {regime}: left out, {why}")
                    continue
                _one(recorder, case, impl, regime, args, sum(lengths), flops_per_token(model, lengths), peak)
                record.append(recorder.rows, args.out)  # at once: a run that is cut short keeps what it measured
                recorder.rows.clear()


def _one(recorder, case: str, impl: str, regime: str, args, tokens: int, flops: float, peak: float | None) -> None:
    command = [sys.executable, "-m", "terrella.benchmarks.train", "--child", f"{impl}|{regime}|{case}", "--steps", str(args.steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        print(f"{case} | {impl} | {regime}: left out, not done in {args.timeout:.0f} s")
        return
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        print(f"{case} | {impl} | {regime}: failed\n{done.stderr[-1500:]}")
        return
    result = json.loads(line.removeprefix("RESULT "))
    name = impl if regime == "master" else f"{impl} (pure bf16)"
    rates = sorted(tokens / t for t in result["times"])
    middle = statistics.median(rates)
    recorder.add(case, name, "tokens_per_s", middle, "tokens/s", rates[len(rates) // 5], rates[-1 - len(rates) // 5])
    recorder.add(case, name, "peak", result["peak_gib"], "GiB")
    recorder.add(case, name, "first_loss", result["losses"][0], "nat")
    share = ""
    if peak is not None:
        recorder.add(case, name, "mfu", middle * flops / peak / 1e10, "%")
        share = f" {middle * flops / peak / 1e10:.1f} % of {peak:.0f} TFLOP/s"
    memory = f"peak {result['peak_gib']:.1f} GiB"
    print(f"{case} | {name}: {middle:,.0f} tokens/s{share}, {memory}, first loss {result['losses'][0]:.4f}", flush=True)


def _version(name: str) -> str:
    from importlib import metadata

    for candidate in (name, name.replace("_", "-")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(candidate)
    return "-"


if __name__ == "__main__":
    main()
