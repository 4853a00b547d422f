"""Cross-entropy on true answers: supervised fine-tuning of a language world model, or going on with it as a control."""

from __future__ import annotations

import time
from typing import Any

from ...core.progress import Progress
from ...data.packing import pack
from ...kernels.policy_loss import PolicySettings
from ...rl.loop import even_out, require_finite
from ...rl.objective import make_loss
from ..job import Job
from ..settings.language import LanguageSupervised
from .common import Checkpoints, build_engine
from .language import Questions


def run(stage: LanguageSupervised, job: Job) -> dict[str, Any]:
    """Train to the last step, or until as many answer tokens were learnt from as the other stage saw."""
    questions = Questions(job, stage.data)
    stream = questions.stream(stage.non_gold_ratio)
    engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
    steps = stage.steps if stage.steps is not None else matched_steps(stage, job, questions)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, steps)
    start, extra = checkpoints.resume(engine)
    tokens = extra.get("tokens", 0)
    loss = make_loss(PolicySettings())
    progress = Progress(stage.name, steps, start=start, speak=job.speaks)
    for step in range(start, steps):
        begun = time.monotonic()
        places = range(step * stage.sequences_per_step, (step + 1) * stage.sequences_per_step)
        mine = [questions.at(stream[place]) for place in places[engine.data_rank :: engine.data_size]]
        total = sum(job.gather(sum(questions.answer_tokens(q) for q in mine)))
        batches = even_out(pack(questions.sequences(mine, total), budget=stage.microbatch_tokens, pad=False), job.gather)
        result = engine.step(batches, loss)
        tokens += total
        values = {
            "loss": result.metrics["loss"],
            "entropy": result.metrics["entropy"] / max(1.0, result.metrics["tokens"]),
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": tokens,
        }
        require_finite(values, step)
        took = time.monotonic() - begun
        if job.speaks and ((step + 1) % stage.log_every == 0 or step + 1 == steps):
            job.run.metrics.append(stage.name, step + 1, {**values, "time/step_s": took, "time/tokens_per_s": total / took})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, {"tokens": tokens})
    return {"steps": steps, "tokens": tokens, "checkpoint": checkpoints.final()}


def matched_steps(stage: LanguageSupervised, job: Job, questions: Questions) -> int:
    """Steps until the stream has given at least as many answer tokens as the other stage saw gradient tokens."""
    assert stage.match_tokens_of is not None
    stream, wanted, seen, steps = questions.stream(stage.non_gold_ratio), job.outcome(stage.match_tokens_of)["tokens"], 0, 0
    lengths: dict[int, int] = {}
    while seen < wanted:
        for place in range(steps * stage.sequences_per_step, (steps + 1) * stage.sequences_per_step):
            index = stream[place]
            if index not in lengths:
                lengths[index] = questions.answer_tokens(questions.at(index))
            seen += lengths[index]
        steps += 1
    return steps
