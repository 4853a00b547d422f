"""Held-out questions: every model beside the answer that nothing changes and the true answer, with intervals."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid
from ...rl.language import Question, answers
from ...rl.rollout.sampler import SamplingParams
from ...rl.statistics import Estimate
from ...rl.text_games import evaluate as games
from ...rl.text_games.crawl import bare_prompt, prompts
from ...rl.text_games.world import drift, drift_table
from ...rl.web_pages import evaluate as pages
from ..job import Job
from ..settings.language import LanguageEvaluate, TextGameData
from .common import build_engine, sampler_of, sampling
from .language import TEST, UNSEEN, Questions

PARTS = {TEST: "Held-out transitions", UNSEEN: "Transitions of worlds never seen in training"}
Judgements = list[Any]  # games.Judged, or verdicts on pages; Invalid where the sampler failed


def run(stage: LanguageEvaluate, job: Job) -> dict[str, Any]:
    """Answer, judge, write the tables and the summary in words. Every rank answers its share."""
    questions = Questions(job, stage.data)
    most = {TEST: stage.n, UNSEEN: stage.unseen_n}
    parts = {part: asked for part in PARTS if (asked := questions.some(part, most[part]))}
    if TEST not in parts:
        raise ConfigError(f"stages: '{stage.data}' has no held-out questions for '{stage.name}'; name their shards with test: FOLDER")
    found: dict[tuple[str, str], Judgements] = {}
    likeliest: dict[tuple[str, str], Judgements] = {}
    walked: dict[str, list[list[bool]]] = {}
    progress = Progress(stage.name, len(stage.models) * len(parts), speak=job.mesh.is_main)
    for name in stage.models:
        with sampling(job, stage.name, build_engine(job, None, name), sampler_of(stage, job)) as sampler:
            for part, asked in parts.items():
                found[name, part] = judge_part(stage, job, questions, sampler, asked, stage.temperature)
                if stage.greedy:
                    likeliest[name, part] = judge_part(stage, job, questions, sampler, asked, 0.0)
                progress.update(len(found))
            if stage.drift_steps and parts[TEST][0].domain == "text-game":
                walked |= drifts(stage, job, questions, sampler, name)
    web = parts[TEST][0].domain == "web-page"
    if job.mesh.is_main:
        for part, asked in parts.items():
            judged = {name: found[name, part] for name in stage.models}
            how = f"temperature {stage.temperature:g}" if stage.temperature else "greedy"
            for name, told in (page_tables if web else game_tables)(stage, part, asked, judged, how).items():
                job.run.write_result(f"{stage.name}-{name}", told)
            if stage.greedy:
                judged = {name: likeliest[name, part] for name in stage.models}
                told = (page_tables if web else game_tables)(stage, part, asked, judged, "greedy")[part]
                job.run.write_result(f"{stage.name}-{part}-greedy", told)
        if walked:
            told = drift_table(walked, f"Imagined states still exact after k steps, temperature {stage.temperature:g}")
            job.run.write_result(f"{stage.name}-drift", told)
        if stage.before and stage.after:
            tested = {name: found[name, TEST] for name in stage.models}
            told = page_summary(stage, parts[TEST], tested) if web else game_summary(stage, tested)
            write_json(job.run.path / "summary.json", told)
    job.mesh.barrier()
    scores = {
        (name, part): pages.scores([q.answer for q in parts[part]], j) if web else games.accuracies(j) for (name, part), j in found.items()
    }
    columns = pages.COLUMNS if web else games.COLUMNS
    told = {f"{n}/{p}/{k}": e.value for (n, p), es in scores.items() for k, e in zip(columns, es, strict=True)}
    for one, other in compared(stage):
        paired = gains(parts[TEST], found[one, TEST], found[other, TEST])
        told |= {f"{one} minus {other}/{k}": e.to_cell() for k, e in zip(columns, paired, strict=True)}
    return told


def compared(stage: LanguageEvaluate) -> list[tuple[str, str]]:
    """The pairs of models whose difference on the same questions is told."""
    pairs = [(stage.after, stage.before), (stage.after, stage.control), (stage.control, stage.before)]
    return [(one, other) for one, other in pairs if one and other]


def gains(asked: list[Question], after: Judgements, before: Judgements) -> list[Estimate]:
    """Paired differences by the columns of the table."""
    if asked[0].domain == "web-page":
        return pages.gains([q.answer for q in asked], after, before)
    return games.gains(after, before)


def judge_part(
    stage: LanguageEvaluate, job: Job, questions: Questions, sampler: Any, asked: list[Question], temperature: float
) -> Judgements:
    """All ranks' judgements of one model's answers, in the order of the questions."""
    mine = job.mesh.share(asked)
    tokenizer = questions.tokenizer
    params = SamplingParams(stage.max_new_tokens, temperature, stop_ids=tokenizer.stop_ids)

    def judge() -> Judgements:
        told = answers(sampler, mine, tokenizer, params, fold(job.recipe.seed, 3), questions.multiple)
        if asked[0].domain == "web-page":
            return pages.judge_pages([q.answer for q in mine], told, stage.mode)
        return games.judge_rows([q.row for q in mine], told, stage.mode)

    return [verdict for part in job.mesh.gather(job.mesh.from_leader(judge)) for verdict in part]


def drifts(stage: LanguageEvaluate, job: Job, questions: Questions, sampler: Any, name: str) -> dict[str, list[list[bool]]]:
    """How long one model's imagined games stay the true ones; every rank walks its own episodes."""
    data = next(s for s in job.recipe.stages if s.name == stage.data)
    if not isinstance(data, TextGameData):
        raise ConfigError(f"stages: {stage.name}.drift_steps needs a text-game-data stage; '{stage.data}' is none")
    write = prompts() if data.prompt == "full" else bare_prompt
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=questions.tokenizer.stop_ids)

    def predict(rows: list[dict[str, Any]]) -> list[str | Invalid]:
        asked = [Question("text-game", write(row), "", row, False) for row in rows]
        return answers(sampler, asked, questions.tokenizer, params, fold(job.recipe.seed, 4), questions.multiple)

    each = -(-stage.drift_episodes // job.mesh.data_size)
    first = 10_000 + job.mesh.data_rank * each
    shares = job.mesh.gather(job.mesh.from_leader(lambda: drift(data.games, each, stage.drift_steps, predict, first_seed=first)))
    joined = {key: [[hit for share in shares for hit in share[key][k]] for k in range(stage.drift_steps)] for key in ("model", "copy")}
    return {name: joined["model"], "copy": joined["copy"]}


def kind_of(stage: LanguageEvaluate, name: str) -> str:
    return "control" if name == stage.control else "model"


def game_tables(
    stage: LanguageEvaluate, part: str, asked: list[Question], judged: dict[str, Judgements], how: str
) -> dict[str, dict[str, Any]]:
    """The table of all models, and for the model of the headline its games and its verbs."""
    rows = [q.row for q in asked]
    models = [games.Model(name, j, kind_of(stage, name)) for name, j in judged.items()]
    tables = {part: games.table(rows, models, stage.mode, f"{PARTS[part]}, {how}")}
    for model in models if part == TEST else []:
        if model.name == stage.after:
            tables |= {f"by-{by}": games.breakdown(rows, model, stage.mode, by) for by in ("game", "verb")}
    return tables


def page_tables(
    stage: LanguageEvaluate, part: str, asked: list[Question], judged: dict[str, Judgements], how: str
) -> dict[str, dict[str, Any]]:
    """The table of all models."""
    models = [(name, kind_of(stage, name), j) for name, j in judged.items()]
    return {part: pages.table([q.answer for q in asked], models, stage.mode, f"{PARTS[part]}, {how}")}


def game_summary(stage: LanguageEvaluate, judged: dict[str, Judgements]) -> dict[str, Any]:
    """What happened, in plain words."""
    assert stage.before and stage.after
    scores = {name: games.accuracies(j) for name, j in judged.items()}
    gain = games.gains(judged[stage.after], judged[stage.before])[1]
    before, after = scores[stage.before], scores[stage.after]
    share = after[0].n / max(1, after[2].n)
    paragraphs = [
        f"Change {points(gain)} on the same {gain.n} held-out transitions that change the state. Answering that nothing changes gets 0 % "
        f"of these, all of the unchanged ones, and {100 * share:.1f} % overall.",
        f"Unchanged {percent(before[0])} -> {percent(after[0])}; overall {percent(before[2])} -> {percent(after[2])}.",
    ]
    if stage.control:
        gap = games.gains(judged[stage.after], judged[stage.control])[1]
        control = scores[stage.control]
        paragraphs.append(
            f"Control, more imitation for the same gradient tokens: changed {percent(control[1])}, overall {percent(control[2])} "
            f"(RLVR minus control on changed transitions {points(gap)})."
        )
    words = f"RLVR on a language world model, changed transitions right ({stage.mode} judge): {verdict(gain)}"
    return {"headline": f"{words} {percent(before[1])} -> {percent(after[1])}.", "paragraphs": paragraphs}


def page_summary(stage: LanguageEvaluate, asked: list[Question], judged: dict[str, Judgements]) -> dict[str, Any]:
    """The same for web pages: F1 where the page changes."""
    assert stage.before and stage.after

    f1 = {name: pages.scores([q.answer for q in asked], j)[3] for name, j in judged.items()}
    change = gains(asked, judged[stage.after], judged[stage.before])[3]
    empty = pages.scores([q.answer for q in asked], pages.judge_pages([q.answer for q in asked], [pages.NOTHING] * len(asked), stage.mode))
    paragraphs = [
        f"Change {points(change)} on the same {change.n} held-out transitions that change the page. Answering that nothing changes gets "
        f"{percent(empty[3])} on these and {percent(empty[2])} on all."
    ]
    if stage.control:
        gap = gains(asked, judged[stage.after], judged[stage.control])[3]
        paragraphs.append(
            f"Control, more imitation for the same gradient tokens: {percent(f1[stage.control])} (RLVR minus control {points(gap)})."
        )
    words = f"RLVR on a web-page world model, F1 of changed pages ({stage.mode} judge): {verdict(change)}"
    return {"headline": f"{words} {percent(f1[stage.before])} -> {percent(f1[stage.after])}.", "paragraphs": paragraphs}


def verdict(gain: Estimate) -> str:
    return "rose" if gain.low > 0 else "fell" if gain.high < 0 else "did not change beyond chance:"


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % (±{50 * (estimate.high - estimate.low):.1f})"


def points(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} points (95 % interval {100 * estimate.low:+.1f} to {100 * estimate.high:+.1f})"
