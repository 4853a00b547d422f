"""`python -m terrella.benchmarks.copying`: next states sampled plainly and with proposals copied from the prompt.

A model that knows nothing copies nothing, so a small decoder is trained first, on transitions of this project's own
text games or recorded web pages: state and action in, the whole next state out. Texts are cut as general tokenizers do,
into words, single digits and marks. The cases of 1.5B have the cost of Qwen2.5-1.5B: its width and vocabulary, the
trained layers, and behind them layers that are computed in full and add nothing. Samples are drawn at temperature 1 for
held-out states and end at the end of the state.

Shape suffixes: B sequences, S tokens of each, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..models.config import ModelConfig
from ..models.rope import inverse_frequencies, rotate, rotation_table
from ..rl.rollout.embedded import EmbeddedSampler
from ..rl.rollout.sampler import SampleRequest, SamplingParams
from . import record
from .rollout import random_weights, recorder, synchronize
from .train import QWEN

SMALL = ModelConfig(
    layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1408, vocab=2048, max_positions=2048, tied=True
)
TINY = replace(SMALL, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
END = 1  # ends a state; 0 fills up
PIECES = re.compile(r"\d| ?[A-Za-z]+|[^\sA-Za-z0-9]|\s")


@dataclass(frozen=True)
class Case:
    """A model of `model`'s cost whose first `trained` layers learn."""

    domain: str
    model: ModelConfig
    trained: int
    steps: int
    sequences: int  # a step
    lr: float
    rows: tuple[int, ...] = (64, 2048)


WIDE = replace(QWEN, max_positions=2048, rope_theta=1e4, qkv_bias=False)
CASES = {
    "text-game 1.5b": Case("text-game", WIDE, 3, 500, 16, 4e-4),
    "web-page 1.5b": Case("web-page", WIDE, 3, 900, 48, 4e-4),
    "text-game small": Case("text-game", SMALL, 4, 1500, 16, 1e-3),
    "web-page small": Case("web-page", SMALL, 4, 2000, 64, 1e-3),
    "tiny": Case("web-page", TINY, 2, 10, 4, 4e-3, (2,)),
}
WAYS: dict[str, int | None] = {"plain": 0, "copy auto": None, "copy 7": 7, "copy 15": 15}


def transitions(domain: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(question, whole next state) to learn from, and held out."""
    if domain == "web-page":
        from ..rl.web_pages.data import load_transitions, split_pages
        from ..rl.web_pages.prompt import bare_page_prompt

        split = split_pages(load_transitions())
        train, test = ([(bare_page_prompt(s), s.next_observation) for s in part] for part in (split.train, split.test))
        return train, test
    from ..rl.text_games.crawl import crawl_all
    from ..rl.text_games.rows import action_of

    rows = crawl_all(["charge-torch", "weigh-stones"], range(40))
    pairs = [(f"{json.dumps(r['current_state'])}\nAction: {action_of(r)}\n", json.dumps(r["tick_state"])) for r in rows]
    test = set(range(0, len(pairs), 5))
    return [p for i, p in enumerate(pairs) if i not in test], [pairs[i] for i in test]


class Words:
    """Numbers for the pieces of texts, as they are met."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {"": 0, "\0": END}

    def __call__(self, text: str) -> list[int]:
        return [self.number.setdefault(piece, len(self.number)) for piece in PIECES.findall(text)]


def states(named: dict[str, torch.Tensor], c: ModelConfig, layers: int, ids_BS: torch.Tensor) -> torch.Tensor:
    """The whole forward pass of the first layers, differentiable; models/decode.py against no cache."""
    rows, length = ids_BS.shape
    inverse_R, factor = inverse_frequencies(c)
    table = rotation_table(torch.arange(length, device=ids_BS.device), inverse_R.to(ids_BS.device), factor)
    cos, sin = table[:, None, :].chunk(2, -1)
    per = c.heads // c.kv_heads
    x = named["embedding.word_embeddings.weight"][ids_BS]
    for index in range(layers):
        p = f"decoder.layers.{index}."
        h = F.rms_norm(x, (c.hidden,), named[p + "input_layernorm.weight"], c.norm_eps)
        h = F.linear(h, named[p + "self_attention.linear_qkv.weight"])
        h = h.view(rows, length, c.kv_heads, per + 2, c.head_dim)
        q, k = h[..., :per, :].reshape(rows, length, c.heads, c.head_dim), h[..., per, :]
        q, k = (rotate(x, cos, sin, False).transpose(1, 2).to(h.dtype) for x in (q, k))
        o = F.scaled_dot_product_attention(q, k, h[..., per + 1, :].transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).flatten(2), named[p + "self_attention.linear_proj.weight"])
        h = F.rms_norm(x, (c.hidden,), named[p + "pre_mlp_layernorm.weight"], c.norm_eps)
        gate, up = F.linear(h, named[p + "mlp.linear_fc1.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, named[p + "mlp.linear_fc2.weight"])
    return F.rms_norm(x, (c.hidden,), named["decoder.final_layernorm.weight"], c.norm_eps)


def train(case: Case, pairs: list[tuple[list[int], list[int]]], words: int) -> tuple[dict[str, torch.Tensor], float]:
    """Weights that have learnt the transitions, and the last loss of a token of the answers. Words without number get
    a zero row of the head.
    """
    model = replace(case.model, vocab=words, tied=True)
    named = {name: x.float() for name, x in random_weights(model).items()}
    learnt = {n: x for n, x in named.items() if not n.startswith("decoder.layers.") or layer_of(n) < case.trained}
    for x in learnt.values():
        x.requires_grad_()
    device = named["decoder.final_layernorm.weight"].device
    optimizer = torch.optim.AdamW(list(learnt.values()), case.lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    shown = 0.0
    for step in range(case.steps):
        warm, left = min(1.0, (step + 1) / 50), 0.5 * (1 + math.cos(math.pi * step / case.steps))
        optimizer.param_groups[0]["lr"] = case.lr * warm * max(0.05, left)
        chosen = [pairs[i] for i in torch.randint(0, len(pairs), (case.sequences,), generator=draw).tolist()]
        longest = max(len(q) + len(a) for q, a in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
        answer = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for row, (q, a) in enumerate(chosen):
            ids[row, : len(q) + len(a)] = torch.tensor(q + a)
            answer[row, len(q) : len(q) + len(a)] = True
        ids, answer = ids.to(device), answer.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = states(named, model, case.trained, ids[:, :-1])
            logits = F.linear(hidden, named["embedding.word_embeddings.weight"][:words])
        loss_BS = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        weight_BS = answer[:, 1:] + 0.2 * (ids[:, 1:] != 0)
        optimizer.zero_grad()
        ((loss_BS * weight_BS).sum() / weight_BS.sum()).backward()
        torch.nn.utils.clip_grad_norm_(list(learnt.values()), 1.0)
        optimizer.step()
        if step + 1 == case.steps:
            shown = float((loss_BS.detach() * answer[:, 1:]).sum() / answer.sum())
    done = finish(case.model, named, case.trained, words)
    del named, learnt, optimizer  # the sampler's cache takes what is free
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return done, shown


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


def finish(model: ModelConfig, named: dict[str, torch.Tensor], trained: int, words: int) -> dict[str, torch.Tensor]:
    """At the case's own cost: layers behind the trained ones add nothing, and the vocabulary has its whole size."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    done = {name: x.detach().to(dtype) for name, x in named.items()}
    for name, x in done.items():
        adds = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        if name.startswith("decoder.layers.") and layer_of(name) >= trained and adds:
            x.zero_()
    table = done["embedding.word_embeddings.weight"]
    whole = table.new_zeros(model.padded_vocab, model.hidden)
    whole[:words] = table[:words]
    done["embedding.word_embeddings.weight"] = whole
    return done


def measure(
    case: Case, named: dict[str, torch.Tensor], asked: list[SampleRequest], copy: int | None, rounds: int
) -> tuple[list[float], list[Any], dict[str, float]]:
    """Seconds of each round, the samples, and what the sampler says of its passes. A round before compiles."""
    sampler = EmbeddedSampler(lambda: named, case.model, max_batch=len(asked), copy=copy, continuous=True)
    seconds: list[float] = []
    samples: list[Any] = []
    seen: dict[str, float] = {}
    for number in range(rounds + 1):
        synchronize()
        begun = time.perf_counter()
        samples = sampler.generate(asked)
        synchronize()
        if number:
            seconds.append(time.perf_counter() - begun)
        seen = sampler.rest()
    return seconds, samples, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="default: all but tiny with a GPU, else tiny"
    )
    parser.add_argument("--rows", type=int, action="append", help="requests at once; default: 64 and 2,048")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    kept = recorder("copying")
    for name in args.case or [n for n in CASES if (n == "tiny") != torch.cuda.is_available()]:
        case, words = CASES[name], Words()
        learn, held = ([(words(q), [*words(a), END]) for q, a in part] for part in transitions(case.domain))
        size = len(words.number)
        assert size <= case.model.vocab, f"{size} words"
        begun = time.perf_counter()
        named, loss = train(case, learn, size)
        print(
            f"{name}: {size} words, {case.steps} steps in {time.perf_counter() - begun:.0f} s, loss of an answer's "
            f"token {loss:.4f}, questions {sum(len(q) for q, _ in held) / len(held):.0f} and answers "
            f"{sum(len(a) for _, a in held) / len(held):.0f} tokens",
            flush=True,
        )
        most = max(len(a) for _, a in held) + 20
        params = SamplingParams(most, stop_ids=(END,), allowed=(1, size))
        for rows in args.rows or case.rows:
            chosen = [held[i * 7 % len(held)] for i in range(min(rows, 256))]
            truth = [chosen[i % len(chosen)][1] for i in range(rows)]
            asked = [SampleRequest(tuple(chosen[i % len(chosen)][0]), (5, i), params) for i in range(rows)]
            plain: tuple[float, list[Any]] | None = None
            for way in args.way or WAYS:
                seconds, samples, seen = measure(case, named, asked, WAYS[way], args.rounds)
                middle = sorted(seconds)[len(seconds) // 2]
                tokens = sum(len(s.ids) for s in samples)
                right = sum(list(s.ids) == a for s, a in zip(samples, truth, strict=True)) / rows
                plain = plain or (middle, samples)
                same = sum(a.ids == b.ids for a, b in zip(samples, plain[1], strict=True)) / rows
                speed = tokens / middle
                impl, work = f"terrella embedded, {way}", f"{name}, {rows} rows"
                kept.add(work, impl, "speed", speed, "tok/s", tokens / max(seconds), tokens / min(seconds))
                kept.add(work, impl, "calls per token", seen["time/calls_per_token"], "")
                print(
                    f"{work} | {way}: {middle:.3f} s ({min(seconds):.3f} - {max(seconds):.3f}), {speed:,.0f} tok/s, "
                    f"x{plain[0] / middle:.2f}; {1 / seen['time/calls_per_token']:.2f} tokens a call, "
                    f"{seen['time/copied']:.1%} copied; {right:.0%} true states, {same:.1%} the same samples",
                    flush=True,
                )
    record.append(kept.rows, args.out)


if __name__ == "__main__":
    main()
