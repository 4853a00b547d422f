"""What a person should be told about a run: alarms it raised itself, and signs that its numbers cannot be trusted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .load import number

# Rules of thumb, not gates: they colour a report, they never stop a run.
INVALID_SHARE = 0.05
CLIP_SHARE = 0.5
DRIFT_MEAN = 0.05
ENTROPY_COLLAPSE = 0.1
FLAT_STEPS = 5

NOISE = 2.0  # standard errors that a reward must move by before it counts as moved
BROKEN = "lower the learning rate, and look at the rollouts of that step"
# first and last tenth of a stage are compared; below so many steps nothing is said of its reward
TENTH, FEWEST = 10, 20

NOT_METRICS = ("stage", "step")

# what to do about an alarm of rl/health.py; `watch` and the end screen print the same lines
REMEDIES = {
    "reward_std": (
        "all samples of a prompt score alike: choose tasks of mixed difficulty, or a reward with steps between 0 and 1"
    ),
    "entropy": "raise temperature, add algorithm.entropy_coef or algorithm.kl_coef, or lower the learning rate",
    "repetition": "lower the learning rate or add algorithm.kl_coef; look at the last rollouts",
    "truncated": "raise max_new_tokens, or penalise length in the reward",
    "length": "look whether longer answers score better in the rollouts; lower max_new_tokens or penalise length",
    "exploitation": (
        "the agent succeeds in its world model and not in the true world: train the model on more play, or the agent "
        "for fewer steps (validation.on_gap: stop)"
    ),
    "drift": "sampler and trainer disagree: check weight sync and precision (rollouts.sampler, precision)",
}


@dataclass(frozen=True)
class Finding:
    """One line of the warnings section: level is "error", "warning" or "note"."""

    level: str
    text: str


def spell_steps(steps: list[int]) -> str:
    """ "step 4", "steps 4, 9", or "12 steps, first 4, last 90"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 4:
        return "steps " + ", ".join(str(step) for step in steps)
    return f"{len(steps)} steps, first {steps[0]}, last {steps[-1]}"


def series(metrics: Iterable[dict[str, Any]], stage: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in one stage, non-finite values left out."""
    points = []
    for record in metrics:
        value = number(record.get(name))
        if record["stage"] == stage and value is not None and math.isfinite(value):
            points.append((record["step"], value))
    return points


def recorded_faults(metrics: list[dict[str, Any]]) -> list[Finding]:
    """Non-finite numbers, skipped updates, invalid rollouts and the run's own alarms, each with its steps."""
    non_finite: dict[tuple[str, str], list[int]] = defaultdict(list)
    raised: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in metrics:
        for name, raw in record.items():
            value = number(raw)
            if value is None or name in NOT_METRICS:
                continue
            if not math.isfinite(value):
                non_finite[record["stage"], name].append(record["step"])
            elif value > 0 and (name.startswith("alarm/") or name == "skipped" or name.endswith("/skipped")):
                raised[record["stage"], name].append(record["step"])
    found = [
        Finding("error", f"{stage}: {name} is not a finite number at {spell_steps(steps)}; {BROKEN}")
        for (stage, name), steps in non_finite.items()
    ]
    for (stage, name), steps in raised.items():
        alarm = name.removeprefix("alarm/")
        if alarm == "entropy" and name != alarm and reward_move(metrics, stage) > NOISE:
            continue  # where the reward rises, certainty is what was learnt
        what = f"alarm “{alarm}”" if name.startswith("alarm/") else f"{name} updates"
        remedy = (
            REMEDIES.get(alarm)
            if name.startswith("alarm/")
            else "gradients were not finite: lower the learning rate or clip_grad"
        )
        found.append(Finding("warning", f"{stage}: {what} at {spell_steps(steps)}" + (f"; {remedy}" if remedy else "")))
    return found


def invalid_rollouts(metrics: list[dict[str, Any]], stage: str, samples: int | None) -> list[Finding]:
    """Counts under `invalid...` metrics: such rollouts were left out of the statistics, which a reader must know; of
    a step of so many samples more than a few are a warning.
    """
    counts: dict[str, list[float]] = defaultdict(list)
    for record in metrics:
        for name, raw in record.items():
            value = number(raw)
            if record["stage"] == stage and name.startswith("invalid") and value and math.isfinite(value):
                counts[name].append(value)
    found = []
    for name, values in counts.items():
        share = max(values) / samples if samples else 0.0
        most = f", up to {100 * share:.1f} % of a step’s," if samples else " in all,"
        text = f"{stage}: {name}: {sum(values):g} rollouts{most} left out of the statistics; report.html says why"
        found.append(Finding("warning" if share > INVALID_SHARE else "note", text))
    return found


def reward_move(metrics: list[dict[str, Any]], stage: str) -> float:
    """By how many standard errors the mean reward of the last tenth of a stage is above that of the first; 0 where
    nothing can be said.
    """
    points = [value for _, value in series(metrics, stage, "reward/mean")]
    if len(points) < FEWEST:
        return 0.0
    size = max(2, len(points) // TENTH)
    first, last = points[:size], points[-size:]
    means = [sum(part) / size for part in (first, last)]
    variance = sum(
        sum((v - m) ** 2 for v in part) / (size - 1) / size for part, m in zip((first, last), means, strict=True)
    )
    gain = means[1] - means[0]
    return gain / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gain) if gain else 0.0


def nothing_learnt(metrics: list[dict[str, Any]], stage: str, ended: bool) -> list[Finding]:
    """A stage whose gradient was zero throughout, or whose reward ended where it began. A few steps say something only
    where no more will follow.
    """
    norms = series(metrics, stage, "grad_norm")
    rewards = series(metrics, stage, "reward/mean")
    if len(norms) >= (1 if ended else FLAT_STEPS) and all(value == 0 for _, value in norms):
        recorded = f"all {len(norms)} recorded steps" if len(norms) > 1 else "the one recorded step"
        alike = all(value == 0 for _, value in series(metrics, stage, "trained_share"))
        if rewards and alike:
            cause, remedy = "no group had samples of different reward", REMEDIES["reward_std"]
        elif rewards:
            cause, remedy = "no sample was better than another", "look at the rollouts and their rewards in report.html"
        else:
            cause, remedy = "nothing carries a loss", "look at the roles of the data with terrella shards inspect"
        return [
            Finding(
                "warning",
                (f"{stage}: nothing was learnt: the gradient was 0 in {recorded}, as {cause}; {remedy}"),
            )
        ]
    if len(rewards) >= FEWEST and abs(reward_move(metrics, stage)) <= NOISE:
        size = max(2, len(rewards) // TENTH)
        first, last = (sum(v for _, v in part) / size for part in (rewards[:size], rewards[-size:]))
        text = (
            f"{stage}: nothing was learnt that shows: mean reward {first:.3g} in the first tenth of the steps, "
            f"{last:.3g} in the last"
        )
        return [
            Finding(
                "warning",
                (
                    f"{text}; train longer (--steps), raise the learning rate, or begin with tasks that are sometimes "
                    "solved"
                ),
            )
        ]
    return []


def learning_signs(metrics: list[dict[str, Any]], stage: str, ended: bool) -> list[Finding]:
    """Rules of thumb about a stage's last steps: no reward spread, collapsed entropy, heavy clipping, sampler drift."""
    findings = nothing_learnt(metrics, stage, ended)
    rises = reward_move(metrics, stage) > NOISE
    spread = series(metrics, stage, "reward/std")
    if not findings and len(spread) >= FLAT_STEPS and all(abs(value) < 1e-9 for _, value in spread[-FLAT_STEPS:]):
        findings.append(
            Finding(
                "warning",
                (
                    f"{stage}: the reward had no spread in the last {FLAT_STEPS} steps, so nothing can be learnt; "
                    f"{REMEDIES['reward_std']}"
                ),
            )
        )
    trained = series(metrics, stage, "trained_share")
    if len(trained) >= FLAT_STEPS and all(value == 0 for _, value in trained[-FLAT_STEPS:]) and not findings:
        findings.append(
            Finding(
                "warning",
                (
                    f"{stage}: no group had a reward difference in the last {FLAT_STEPS} steps, nothing was trained; "
                    f"{REMEDIES['reward_std']}"
                ),
            )
        )
    # without trained tokens nothing below was measured
    metrics = [record for record in metrics if record.get("trained_share") != 0]
    entropy = series(metrics, stage, "entropy")
    # a world model that imitates a deterministic world should become certain
    acts = bool(series(metrics, stage, "reward/mean"))
    if (
        acts
        and not rises
        and len(entropy) >= FLAT_STEPS
        and entropy[0][1] > 0
        and entropy[-1][1] < ENTROPY_COLLAPSE * entropy[0][1]
    ):
        text = f"{stage}: entropy fell from {entropy[0][1]:.3g} to {entropy[-1][1]:.3g} and the reward did not rise"
        findings.append(Finding("warning", f"{text}; {REMEDIES['entropy']}"))
    clipped = series(metrics, stage, "clip_fraction")
    if clipped and clipped[-1][1] > CLIP_SHARE:
        findings.append(
            Finding(
                "warning",
                (
                    f"{stage}: {100 * clipped[-1][1]:.0f} % of the tokens were clipped at step {clipped[-1][0]}; try a "
                    "lower lr"
                ),
            )
        )
    drift = series(metrics, stage, "logprob_drift/mean")
    worst = max(drift, key=lambda point: point[1], default=None)
    if worst and worst[1] > DRIFT_MEAN:
        text = (
            f"{stage}: sampler and trainer disagree by {worst[1]:.3g} nats a token at step {worst[0]}; check "
            "weight sync and precision"
        )
        findings.append(Finding("warning", text))
    return findings


def check_metrics(
    metrics: list[dict[str, Any]], samples: Mapping[str, int] | None = None, ended: bool = False
) -> list[Finding]:
    """Everything the records alone can tell, worst first. `samples` are those of a step, by stage; of a run that has
    ended no more steps will follow.
    """
    stages = list(dict.fromkeys(record["stage"] for record in metrics))
    findings = recorded_faults(metrics)
    for stage in stages:
        findings += invalid_rollouts(metrics, stage, (samples or {}).get(stage)) + learning_signs(metrics, stage, ended)
    return worst_first(findings)


def check_tables(tables: list[dict[str, Any]]) -> list[Finding]:
    """A score without its baseline, its sample size or an interval misleads: say so."""
    found = []
    for table in tables:
        if table.get("facts"):
            continue
        if not any(row.get("kind") == "baseline" for row in table["rows"]):
            found.append(
                Finding(
                    "warning",
                    (
                        f"“{table['title']}” has no baseline row; its scores cannot be judged alone: add one to the "
                        "evaluation"
                    ),
                )
            )
        cells = [
            cell
            for row in table["rows"]
            if row.get("kind") != "ceiling"
            for cell in row["cells"]
            if isinstance(cell, dict)
        ]
        bare = sum(
            1 for cell in cells if cell.get("value") is not None and (cell.get("low") is None or cell.get("n") is None)
        )
        if (empty := without_results(table)) is not None:
            found.append(empty)
        if (worse := below_baseline(table)) is not None:
            found.append(worse)
        if table.get("known"):
            text = f"“{table['title']}”: {table['known']:g} of the tasks are among those to train on"
            found.append(Finding("warning", f"{text}; leave them out, for their scores say nothing of new tasks"))
        if bare:
            found.append(
                Finding("note", f"“{table['title']}”: {bare} scores come without an interval or a sample size")
            )
    return found


def without_results(table: dict[str, Any]) -> Finding | None:
    """Where all results of a model were invalid: the run ends well, and its table says nothing of that model."""
    empty = []
    for row in table["rows"]:
        sizes = [cell["n"] for cell in row["cells"] if isinstance(cell, dict) and cell.get("n") is not None]
        if row.get("kind") in ("model", "control") and sizes and not any(sizes):
            empty.append(str(row.get("name")))
    if not empty:
        return None
    why = table.get("invalid") or "see in the rollouts why"
    return Finding("warning", f"“{table['title']}”: no valid result of {', '.join(empty)}; {why}")


def below_baseline(table: dict[str, Any]) -> Finding | None:
    """Where a model does worse than the best trivial baseline, in shares (0 to 1) or a unit that the table names; more
    is better unless the table says otherwise."""
    below = []
    for index, column in enumerate(table["columns"]):
        scores = [
            (row, number(row["cells"][index].get("value")))
            for row in table["rows"]
            if isinstance(row["cells"][index], dict)
        ]
        sign = -1 if column in table.get("lower", []) else 1
        trivials = [score for row, score in scores if row.get("kind") == "baseline" and score is not None]
        trivial = max(trivials, key=lambda score: sign * score, default=None)
        unit = table.get("unit")
        if trivial is None or (unit is None and not all(score is None or 0 <= score <= 1 for _, score in scores)):
            continue
        write = "{:.4g}".format if unit else "{:.1%}".format
        for row, score in scores:
            # chance alone puts half of all equals below
            best = number(row["cells"][index].get("high" if sign > 0 else "low"))
            if (
                row.get("kind") == "model"
                and score is not None
                and sign * (score if best is None else best) < sign * trivial
            ):
                below.append(
                    f"{row.get('name')} in “{column}” ({write(score)} against {write(trivial)})".replace("%", " %")
                )
    if not below:
        return None
    more = f", and {len(below) - 2} more" if len(below) > 2 else ""
    remedy = "train longer, or see in the rollouts what goes wrong"
    return Finding("warning", f"“{table['title']}”: below the trivial baseline: {'; '.join(below[:2])}{more}; {remedy}")


def worst_first(findings: list[Finding]) -> list[Finding]:
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: order[finding.level])
