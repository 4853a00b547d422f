"""One training step of each implementation that `train.py` times. Weights are drawn on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from ..models.config import ModelConfig


def make_tokens(model: ModelConfig, lengths: list[int]):
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab, (sum(lengths),), generator=draw), torch.randint(
        0, model.vocab, (sum(lengths),), generator=draw
    )


def ours(
    model: ModelConfig, lengths: list[int], formats: dict[str, Any], regime: str, graphs: bool = False
) -> Callable[[], float]:
    """One step of the engine; in the regime `pure` of its model with torch's Adam on the bf16 weights, which the
    engine never does. `formats` are settings of `PrecisionConfig`.
    """
    import torch

    from ..core.batch import PackedBatch
    from ..core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
    from ..core.engine import Engine, _Item
    from ..core.layout import document_layout
    from ..core.mcore import setup, shim
    from ..models import gpt

    if not torch.cuda.is_available():
        shim.install()
    setup.start_process_group(init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world=1)
    precision = PrecisionConfig("bf16" if torch.cuda.is_available() else "fp32", **formats)
    # drawn below; on the host it takes minutes
    gpt.initial_weight = lambda name, shape, seed, std: torch.zeros(()).expand(shape)
    build = gpt.build_gpt(model)
    parallel = ParallelConfig(cuda_graphs=graphs)
    engine = Engine(build, parallel, OptimizerConfig(lr=1e-5, clip_grad=1.0) if regime == "master" else None, precision)
    shapes = {p.name: p.param.shape for p in engine.local_parameters()}
    engine.load_weights(lambda name: draw(name, shapes[name], model.init_std, engine.device))
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

    def step() -> float:
        return engine.step([batch], cross_entropy).metrics["loss"]

    if regime == "master":
        return step
    chunk: Any = engine.chunks[0]
    for module in chunk.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
            if hasattr(module, name):
                setattr(module, name, False)
    layout = document_layout(batch.cu_seqlens_D1.tolist()).to(engine.device)
    update = pure_update(list(chunk.parameters()))

    def pure_step() -> float:
        if precision.own_fp8:
            chunk.cast_weights()
        value, _ = cross_entropy(
            *engine._read(chunk, chunk(batch.tokens_T, batch.positions_T, layout), _Item(batch, layout, total)), batch
        )
        value.backward()
        update()
        return float(value.detach())

    return pure_step


def cross_entropy(hidden_TH: Any, head: Any, local: Any) -> tuple[Any, dict[str, Any]]:
    """The loss of a batch, as the engine asks for it."""
    from ..kernels import PolicySettings, PolicyTerms, linear_policy_loss

    out = linear_policy_loss(
        hidden_TH,
        head.weight_VH,
        local.targets_T,
        PolicyTerms(ce_weight=local.ce_weight_T),
        PolicySettings(entropy=False),
        group=head.group,
        vocab_size=head.vocab_size,
        weight_grad_VH=head.weight_grad_VH,
        fp8=head.fp8,
    )
    return out.loss, {"loss": out.loss.detach()}


def draw(name: str, shape: Any, std: float, device: Any) -> Any:
    """A parameter's first values, on the device."""
    import torch

    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    return torch.ones(shape, device=device) if "norm" in name else torch.randn(shape, device=device) * std


def pure_update(parameters: list[Any]) -> Callable[[], None]:
    """Clipping and Adam on bf16 weights, gradients and moments."""
    import torch

    adam = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        adam.step()
        adam.zero_grad(set_to_none=True)

    return update


def stock_megatron(model: ModelConfig, lengths: list[int], regime: str) -> Callable[[], float]:
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
    experts: dict[str, Any] = {}
    # as its makers run it: grouped matmuls, fused sorting, no auxiliary loss so that the loss is comparable
    if model.experts:
        experts = {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_ffn,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
        }
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
        gradient_accumulation_fusion=regime == "master",
        qk_layernorm=model.qk_norm,
        **experts,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.experts or None, moe_grouped_gemm=bool(model.experts), qk_layernorm=model.qk_norm
        ),
        vocab_size=model.padded_vocab,
        max_sequence_length=max(lengths),
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        share_embeddings_and_output_weights=model.tied,
    ).cuda()
    tokens, targets = (x.view(len(lengths), -1).cuda() for x in make_tokens(model, lengths))
    positions = torch.arange(lengths[0], device="cuda").expand(len(lengths), -1)
    if regime == "pure":
        update = pure_update(list(gpt.parameters()))

        def pure_step() -> float:
            loss = gpt(tokens, positions, None, labels=targets).float().mean()
            loss.backward()
            update()
            return float(loss.detach())

        return pure_step
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), gpt
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-5, use_distributed_optimizer=True, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16
    )
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads

    def forward(_, chunk):
        return chunk(tokens, positions, None, labels=targets), lambda out: (
            out.float().mean(),
            {"loss": out.detach().float().mean()},
        )

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
    """fp32 master weights and gradients for any module of bf16 parameters: each gradient is added to its fp32 buffer
    and freed.
    """

    def __init__(self, parameters: list[Any], lr: float) -> None:
        import torch

        self.pairs = [(p, p.detach().float().clone()) for p in parameters]
        for p, master in self.pairs:
            master.grad = torch.zeros_like(master)
            p.register_post_accumulate_grad_hook(
                lambda q, buffer=master.grad: (buffer.add_(q.grad), setattr(q, "grad", None))[1]
            )
        self.adam = torch.optim.AdamW([m for _, m in self.pairs], lr=lr, fused=True)

    def step(self) -> None:
        import torch

        masters = [m for _, m in self.pairs]
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        self.adam.step()
        torch._foreach_copy_([p.data for p, _ in self.pairs], masters)
        torch._foreach_zero_([m.grad for m in masters])


def transformers_model(model: ModelConfig, lengths: list[int], kind: str, regime: str) -> Callable[[], float]:
    """One step of transformers: eager, compiled, with torchao's fp8 layers, each compiled, or with Liger's kernels.
    Ragged documents lie end to end, told apart by position.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..models.families import write_hf_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = write_hf_config(model, "bfloat16")
    config = AutoConfig.for_model(
        settings.pop("model_type"), **{k: v for k, v in settings.items() if k != "torch_dtype"}
    )
    if kind.startswith("liger"):
        import liger_kernel.transformers as liger  # type: ignore[import-not-found]

        getattr(liger, f"apply_liger_kernel_to_{model.family if model.family in ('qwen2', 'qwen3_moe') else 'llama'}")()
    # fp32 weights, cast where they are used: the other way to train with master weights
    autocast = kind.endswith("autocast")
    dtype = torch.bfloat16 if device == "cuda" and not autocast else torch.float32
    # by position ids it sees where documents begin: no dense mask
    attention = "flash_attention_4" if kind.endswith("fa4") else "sdpa"
    with torch.device(device):  # initialising 1.5B parameters on the host takes minutes
        net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    net.config.use_cache = False
    net.train()
    if kind == "torchao":  # scales for each row, all three products, the head in bf16: its makers' recipe
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

        recipe = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(net, config=recipe, module_filter_fn=lambda _, name: "lm_head" not in name)
        # one layer is compiled for all; the whole model at once takes minutes
        for layer in net.model.layers:
            layer.compile()
        net.loss_function = torch.compile(net.loss_function)
    run = torch.compile(net) if kind == "compile" else net
    parameters = list(net.parameters())
    rows = len(lengths) if len(set(lengths)) == 1 else 1
    tokens, targets = (x.view(rows, -1).to(device) for x in make_tokens(model, lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).view(rows, -1).to(device)
    # transformers shifts labels itself: give them one place later, so that every token has its target
    labels = torch.cat([tokens[:, :1], targets[:, :-1]], 1)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    inputs |= {"position_ids": positions} if rows == 1 else {}
    if rows == 1 and attention != "sdpa":  # what it would find by position ids, but for a length that is no integer
        bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        inputs |= {f"cu_seq_lens_{x}": bounds for x in "qk"} | {f"max_length_{x}": max(lengths) for x in "qk"}
    update = pure_update(parameters) if regime == "pure" or autocast else MasterAdam(parameters, 1e-5).step

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = run(**inputs).loss
        loss.backward()
        update()
        return float(loss.detach())

    return step


def make_step(impl: str, regime: str, model: ModelConfig, lengths: list[int]) -> Callable[[], float]:
    """The step function of an implementation."""
    if impl.startswith("terrella"):
        formats: dict[str, Any] = {"layers": "te" if " TE" in impl else "ours", "fp8": " fp8" in impl}
        layers = impl.removesuffix(" + head")
        if layers.startswith("terrella fp8 "):
            formats["fp8_products"] = layers.removeprefix("terrella fp8 ")
        formats["fp8_head"] = layers != impl
        return ours(model, lengths, formats, regime, impl.endswith("graphs"))
    if impl == "megatron-core TE":
        return stock_megatron(model, lengths, regime)
    return transformers_model(model, lengths, impl.removeprefix("transformers "), regime)
