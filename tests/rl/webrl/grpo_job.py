"""GRPO on a web task, run in a rank of the pool: the page is the right one already, so the agent has to learn to say
so.
"""

from __future__ import annotations

from typing import Any

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.mesh import Mesh
from terrella.core.rng import shuffled
from terrella.data.tokenizers import PieceTokenizer
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.rl.algorithms.config import GRPO
from terrella.rl.loop import Trainer
from terrella.rl.loop_settings import LoopSettings
from terrella.rl.multiturn import Limits, rollout_worlds
from terrella.rl.objective import logprob_score
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.open import sampling_weights
from terrella.rl.rollout.sampler import SamplingParams
from terrella.rl.webrl.episode import WebEpisode
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.sites import Seat
from terrella.rl.worlds.web.generate import SiteTask
from terrella.rl.worlds.web.tasks import parse_task
from terrella.rl.worlds.web.world import WebWorld

WORDS = ['exit(message="")', 'do(action="Click", element="0")', 'do(action="Click", element="1")', 'do(action="Wait")']
GROUPS, SAMPLES = 4, 8


def tasks() -> list[SiteTask]:
    """Stay on the page where the episode starts, and end there."""
    found = []
    for site, path in (("map", "/"), ("map", "/nearby"), ("shopping", "/"), ("shopping", "/cart")):
        url = f"http://{site}.test{path}"
        judged = {
            "eval_types": ["url_match"],
            "reference_answers": None,
            "reference_url": url,
            "url_note": "EXACT",
            "program_html": [],
        }
        record = {
            "task_id": f"{site}{path}",
            "sites": [site],
            "intent": f"Stay at {path}",
            "start_url": url,
            "require_login": True,
        }
        found.append(SiteTask(parse_task({**record, "eval": judged}), "train", ()))
    return found


def learn(steps: int) -> list[dict[str, Any]]:
    """Train and return the record."""
    tokenizer = PieceTokenizer([*map(chr, range(32, 127)), "\n", *WORDS])
    vocab = tokenizer.vocab_size
    model = ModelConfig(
        layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=vocab, max_positions=512, init_std=0.1
    )
    engine = Engine(build_gpt(model), ParallelConfig(), OptimizerConfig(lr=1e-2), PrecisionConfig(), 0)
    frozen = Engine(build_gpt(model), ParallelConfig(), None, PrecisionConfig(), 0)
    sampler = EmbeddedSampler(sampling_weights(engine), model, version=lambda: engine.steps)
    params = SamplingParams(1, 1.0, allowed=(vocab - len(WORDS), vocab))
    prompter, known = Prompter(tokenizer, 400, pad_to=400), tasks()
    worlds = [WebWorld(max_steps=3) for _ in range(GROUPS * SAMPLES)]
    record: list[dict[str, Any]] = []

    class Learner(Trainer):
        def episodes(self, step: int) -> list[Any]:
            places = range(step * GROUPS, (step + 1) * GROUPS)
            return [
                Seat(known[shuffled(len(known), 0, place)], place, sample)
                for place in places
                for sample in range(SAMPLES)
            ]

        def play(self, sampler: Any, episodes: list[Any], seed: int) -> list[Any]:
            makers = [
                (lambda s=s, w=w: WebEpisode(w, s.task, s.prompt_id, s.sample_index, prompter))
                for s, w in zip(episodes, worlds, strict=True)
            ]
            return rollout_worlds(sampler, makers, params, seed, Limits(workers=2))

        def reference(self, batches: list[Any]) -> list[Any]:
            return [r["logprob"] for r in frozen.score(batches, logprob_score(1.0))]

        def record(self, step: int, values: dict[str, Any], episodes: Any, trajectories: Any) -> None:
            turns = [len(t.sequences) for t in trajectories]
            record.append(
                {**values, "turns": max(turns), "invalid": sum(not isinstance(t.reward, float) for t in trajectories)}
            )

    settings = LoopSettings(microbatch_tokens=16384, drift_gate=0.05, seed=0, kl_every=100)
    Learner(engine, sampler, GRPO(), params, Mesh(), settings).run(range(steps))
    return record
