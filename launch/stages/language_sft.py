"""Cross-entropy on true answers: supervised fine-tuning of a language world model, or going on with it as a control."""

from __future__ import annotations

from typing import Any

from ...data.balance import spread
from ..job import Job
from ..settings.language import LanguageSupervised
from .common import build_engine
from .fitting import Portion, fit
from .language import Questions, answer_tokens, weighted


def run(stage: LanguageSupervised, job: Job) -> dict[str, Any]:
    """Train to the last step, or until as many answer tokens were learnt from as the other stage saw."""
    questions = Questions(job, stage.data)
    stream = questions.stream(stage.non_gold_ratio)
    engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
    steps = stage.steps if stage.steps is not None else matched_steps(stage, job, questions)

    def portion(step: int) -> Portion:
        places = range(step * stage.sequences_per_step, (step + 1) * stage.sequences_per_step)
        mine = [questions.lesson(stream[place]) for place in job.mesh.share(places)]
        total = sum(job.mesh.gather(sum(map(answer_tokens, mine))))
        rows = weighted(mine, total, stage.question_weight, questions.tokenizer.pad_id)
        return Portion(spread(rows, stage.microbatch_tokens, job.mesh, job.model.hidden).batches, total)

    return fit(stage, job, engine, steps, lambda kept: portion)


def matched_steps(stage: LanguageSupervised, job: Job, questions: Questions) -> int:
    """Steps until the stream has given at least as many answer tokens as the other stage saw gradient tokens."""
    assert stage.match_tokens_of is not None
    stream, wanted, seen, steps = questions.stream(stage.non_gold_ratio), job.outcome(stage.match_tokens_of)["tokens"], 0, 0
    lengths: dict[int, int] = {}
    while seen < wanted:
        for place in range(steps * stage.sequences_per_step, (steps + 1) * stage.sequences_per_step):
            index = stream[place]
            if index not in lengths:
                lengths[index] = answer_tokens(questions.lesson(index))
            seen += lengths[index]
        steps += 1
    return steps
