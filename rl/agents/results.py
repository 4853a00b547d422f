"""An evaluation of agents in tables and words: success beside the random policy and the ceiling, what arms did, know
and cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..evaluation import Evaluation, Results, percent, points
from .evaluate import AgentScores, baseline_rows, difference, summarise
from .rollout import Instance

GREEDY = 0.0


class AgentResults:
    """The scores of every arm on every tag, sampled and, where the evaluation has temperature 0, greedy."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation, self.samples = evaluation, evaluation.samples
        self.greedy = GREEDY in evaluation.temperatures
        self.temperature = next((t for t in evaluation.temperatures if t != GREEDY), GREEDY)
        self.scores = {
            key: summarise([trajectory for samples in judged for trajectory in samples])
            for key, judged in evaluation.judged.items()
        }
        if self.temperature == GREEDY:
            self.greedy, self.samples = False, 1  # one column is enough

    def sampled(self, name: str, tag: str) -> AgentScores:
        return self.scores[name, self.temperature, tag]

    def certain(self, name: str, tag: str) -> AgentScores:
        return self.scores[name, GREEDY, tag]

    def results(self) -> Results:
        """All that the evaluation leaves."""
        tables = {name: table for tag in self.evaluation.tasks for name, table in self.tables(tag).items()}
        return Results(tables, self.outcome(), self.summary() if self.evaluation.after else None)

    def outcome(self) -> dict[str, Any]:
        """Every arm's numbers, and what the headline's arm is ahead of it."""
        cells: dict[str, Any] = {}
        best, costs = self.evaluation.after, self.evaluation.costs
        for name in self.evaluation.models:
            for tag in self.evaluation.tasks:
                scores = self.sampled(name, tag)
                cells |= {f"{name}/{tag}/pass@{k}": scores.passes(k).to_cell() for k in self.tries()}
                if best not in (None, name):
                    cells[f"{best} minus {name}/{tag}/pass@1"] = difference(self.sampled(best, tag), scores).to_cell()
                    if self.greedy:
                        gain = difference(self.certain(best, tag), self.certain(name, tag))
                        cells[f"{best} minus {name}/{tag}/greedy"] = gain.to_cell()
                if self.greedy:
                    cells[f"{name}/{tag}/greedy"] = self.certain(name, tag).passes(1).to_cell()
        spent = {
            f"{name}/{what}": cost[i] for i, what in enumerate(("actions", "tokens")) for name, cost in costs.items()
        }
        return cells | spent

    def tries(self) -> list[int]:
        """1 and all powers of two up to the samples of a seed, and all of them."""
        return sorted({1, self.samples, *(2**i for i in range(11) if 2**i < self.samples)})

    def tables(self, tag: str) -> dict[str, dict[str, Any]]:
        """The table of success, and the table of what the arms did, cost and know."""
        evaluation, k = self.evaluation, self.samples
        tries = sorted({1, k})
        instances: list[Instance] = evaluation.tasks[tag]
        seeds = [instance.seed for instance in instances]
        rows, facts, ceiling = [], [], []
        for name, kind, first, last in baseline_rows(instances[0].task, seeds, k):
            # chance decides random play either way
            cells = [*([first.to_cell()] if self.greedy else []), *[e.to_cell() for e in (first, last)[: len(tries)]]]
            (ceiling if kind == "ceiling" else rows).append({"name": name, "kind": kind, "cells": cells})
        for name in evaluation.models:
            scores, kind = self.sampled(name, tag), evaluation.kind_of(name)
            alone = [self.certain(name, tag).passes(1).to_cell()] if self.greedy else []
            rows.append({"name": name, "kind": kind, "cells": [*alone, *[scores.passes(n).to_cell() for n in tries]]})
            known = [{"value": v} if math.isfinite(v) else "none" for v in evaluation.probes[name, tag]]
            spent = [{"value": cost} for cost in evaluation.costs[name]]
            seen = [e.to_cell() for e in (scores.effective, scores.format_ok, scores.tokens, scores.actions)]
            facts.append({"name": name, "kind": kind, "cells": [*seen, *known, *spent]})
        invalid = sum(self.sampled(name, tag).invalid for name in evaluation.models)
        perplexities = ["state perplexity", "alone", "with coordinates", "alone"]
        return {
            tag: {
                "title": f"{tag}: success",
                "columns": [*(["greedy"] if self.greedy else []), *[f"Pass@{n}" for n in tries]],
                "rows": rows + ceiling,
                "note": f"{len(seeds)} seeds from {seeds[0]}, {k} sample{'s' * (k > 1)} each at temperature "
                f"{self.temperature:g}; "
                f"unbiased Pass@k; 95 % intervals over seeds. {invalid} invalid samples left out.",
            },
            f"{tag}-turns": {
                "title": f"{tag}: what the arms did, know and cost",
                "facts": True,  # no scores, so no baseline stands beside them
                "columns": [
                    *("turns with effect", "right format", "answer tokens", "actions"),
                    *(*perplexities, "actions in training", "gradient tokens"),
                ],
                "rows": facts,
                "note": "Perplexity of the first state's tokens: as it stands in the first prompt, and alone after "
                "one token. Actions and "
                "tokens of training count an arm's stage, all it started from and the play it learnt from.",
            },
        }

    def summary(self) -> dict[str, Any]:
        """The headline's arm against every other one on the first tag, in plain words."""
        evaluation, best = self.evaluation, str(self.evaluation.after)
        tag = next(iter(evaluation.tasks))
        others = [name for name in evaluation.models if name != best]
        gains = {name: difference(self.sampled(best, tag), self.sampled(name, tag)) for name in others}
        ahead = ", ".join(name for name, gain in gains.items() if gain.low > 0) or "none"
        beyond = f"; ahead of {ahead} beyond chance" if others else ""
        success = self.sampled(best, tag).passes(1)
        gained = {name: points(gain, "points of Pass@1") for name, gain in gains.items()}
        paragraphs = [f"{best} minus {name}: {gained[name]}, {gain.n} seeds." for name, gain in gains.items()]
        if self.greedy:
            behind = [name for name in others if difference(self.certain(best, tag), self.certain(name, tag)).low <= 0]
            shares = ", ".join(f"{name} {percent(self.certain(name, tag).passes(1))}" for name in (best, *others))
            against = "every other arm" if not behind else f"all but {', '.join(behind)}"
            ahead_of = f"; {best} is ahead of {against} beyond chance" if others else ""
            paragraphs.append(f"Greedy, without chance: {shares}{ahead_of}.")
        instances: list[Instance] = evaluation.tasks[tag]
        for name, kind, one, _ in baseline_rows(instances[0].task, [i.seed for i in instances], self.samples):
            above = f", above {best}" if kind == "baseline" and one.low > success.high else ""
            paragraphs.append(f"{kind.capitalize()}: {name} {percent(one)}{above}.")
        budgets = "; ".join(f"{name} {actions:,}, {tokens:,}" for name, (actions, tokens) in evaluation.costs.items())
        pair = [evaluation.models[0], best]  # the report opens with one room, played by both
        return {
            "headline": f"{tag}: {best} solves {percent(success)} at the first try{beyond}.",
            "paragraphs": [*paragraphs, f"Budgets (actions, gradient tokens): {budgets}."],
            "compare": [{"name": name, "rollouts": evaluation.shown[name, tag]} for name in pair],
        }


def gap_table(stage: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Success in the imagined and in the true world, by step of an RL stage that trained in the imagined one."""
    keys = ("validation/imagined/pass@1", "validation/pass@1", "validation/gap")
    return {
        "title": f"{stage}: success in imagination and in the true world",
        "facts": True,  # each row is its own baseline
        "columns": ["imagined", "true", "gap"],
        "rows": [
            {"name": f"step {row['step']}", "kind": "model", "cells": [{"value": row[key]} for key in keys]}
            for row in rows
            if keys[-1] in row
        ],
        "note": "The same held-out tasks, seeds and random numbers in both worlds. The gap is what the agent exploits "
        "of its world model.",
    }
