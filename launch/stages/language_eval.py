"""Held-out questions: every model beside the answer that nothing changes and the true answer, with intervals."""

from __future__ import annotations

from typing import Any

from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.language import Question, answers
from ...rl.rollout.sampler import SamplingParams
from ...rl.statistics import Estimate
from ...rl.text_games.evaluate import Judged, Model, accuracies, breakdown, changed_gain, judge_rows, table
from ..job import Job
from ..recipe import LanguageEvaluate
from .common import build_engine
from .language import TEST, UNSEEN, Questions
from .reinforce import embedded_sampler

PARTS = {TEST: "Held-out transitions of known games", UNSEEN: "Games never seen in training"}


def run(stage: LanguageEvaluate, job: Job) -> dict[str, Any]:
    """Answer, judge, write the tables and the summary in words. Every rank answers its share."""
    questions = Questions(job, stage.data)
    parts = {part: asked for part in PARTS if (asked := questions.some(part, stage.n))}
    judged: dict[tuple[str, str], list[Any]] = {}
    progress = Progress(stage.name, len(stage.models) * len(parts), speak=job.speaks)
    for name in stage.models:
        sampler = embedded_sampler(build_engine(job, None, name), job)
        for part, asked in parts.items():
            judged[name, part] = judge_part(stage, job, questions, sampler, asked)
            progress.update(len(judged))
    if job.speaks:
        for part, asked in parts.items():
            rows = [q.row for q in asked]
            models = [Model(n, judged[n, part], "control" if n == stage.control else "model") for n in stage.models]
            job.run.write_result(f"{stage.name}-{part}", table(rows, models, stage.mode, PARTS[part]))
            for by in ("game", "verb") if stage.after and part == TEST else ():
                last = next(m for m in models if m.name == stage.after)
                job.run.write_result(f"{stage.name}-by-{by}", breakdown(rows, last, stage.mode, by))
        if stage.before and stage.after:
            write_json(job.run.path / "summary.json", summary(stage, {n: judged[n, TEST] for n in stage.models}))
    job.barrier()
    names = ("unchanged", "changed", "overall")
    return {f"{n}/{p}/{k}": e.value for (n, p), j in judged.items() for k, e in zip(names, accuracies(j), strict=True)}


def judge_part(stage: LanguageEvaluate, job: Job, questions: Questions, sampler: Any, asked: list[Question]) -> list[Any]:
    """All ranks' judgements of one model's answers, in the order of the questions."""
    mine = asked[job.rank :: job.ranks]
    tokenizer = questions.tokenizer
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=(tokenizer.eos_id,))
    told = answers(sampler, mine, tokenizer, params, fold(job.recipe.seed, 3), questions.multiple)
    shares = job.gather(judge_rows([q.row for q in mine], told, stage.mode))
    return [shares[i % job.ranks][i // job.ranks] for i in range(len(asked))]


def summary(stage: LanguageEvaluate, judged: dict[str, list[Judged]]) -> dict[str, Any]:
    """What happened, in plain words."""
    assert stage.before and stage.after
    scores = {name: accuracies(j) for name, j in judged.items()}
    gain = changed_gain(judged[stage.after], judged[stage.before])
    verdict = "rose" if gain.low > 0 else "fell" if gain.high < 0 else "did not change beyond chance:"
    before, after = scores[stage.before], scores[stage.after]
    share = after[0].n / max(1, after[2].n)
    paragraphs = [
        f"Change {points(gain)} on the same {gain.n} held-out transitions that change the state. Answering that nothing changes gets 0 % "
        f"of these, all of the unchanged ones, and {100 * share:.1f} % overall.",
        f"Unchanged {percent(before[0])} -> {percent(after[0])}; overall {percent(before[2])} -> {percent(after[2])}.",
    ]
    if stage.control:
        gap = changed_gain(judged[stage.after], judged[stage.control])
        control = scores[stage.control]
        paragraphs.append(
            f"Control, more imitation for the same gradient tokens: changed {percent(control[1])}, overall {percent(control[2])} "
            f"(RLVR minus control on changed transitions {points(gap)})."
        )
    words = f"RLVR on a language world model, changed transitions right ({stage.mode} judge): {verdict}"
    return {"headline": f"{words} {percent(before[1])} -> {percent(after[1])}.", "paragraphs": paragraphs}


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % (±{50 * (estimate.high - estimate.low):.1f})"


def points(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} points (95 % interval {100 * estimate.low:+.1f} to {100 * estimate.high:+.1f})"
