"""The outcome reward model's verdicts on the episodes of a collect stage, which later stages believe in place of the
world's.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder, write_json
from ...data.tokenizers import load_tokenizer
from ...models.hub import resolve
from ...rl.webrl.orm import NO, YES, accuracy
from ...rl.webrl.prompts import EOT, JUDGE, SYSTEM
from ..job import Job
from ..settings.verbs import Start
from ..settings.web import WebJudge
from .common import build_engine
from .verbs import tokenizer_of
from .web import VERDICTS, read_played
from .web_orm import probabilities


def check(stage: WebJudge, job: Job) -> None:
    """A reward model of a folder of its own reads the tokens of the recipe's start, or its verdicts mean nothing."""
    orm = next(other for other in job.recipe.stages if other.name == stage.orm)
    if not isinstance(orm, Start) or not orm.folder or not job.mesh.is_main:
        return
    words = f"{SYSTEM}{JUDGE}{EOT} {YES}{NO}"
    if load_tokenizer(resolve(orm.folder)).encode(words) != tokenizer_of(job).encode(words):
        raise ConfigError(
            f"stages: {orm.name}.folder = {orm.folder} has another tokenizer than the recipe's start; the episodes "
            "that it judges are written in the start's tokens"
        )


def run(stage: WebJudge, job: Job) -> dict[str, Any]:
    """Judge all episodes, and say how often the world agrees where it knows."""
    played = read_played(job, stage.data)
    scores = probabilities(job, build_engine(job, None, stage.orm), played)
    if job.mesh.is_main:
        folder = make_folder(job.stage_folder(stage.name))
        job.run.guard()
        write_json(folder / VERDICTS, {t.key: score for t, score in zip(played, scores, strict=True)})
    known = [(score, t.success) for score, t in zip(scores, played, strict=True) if t.score is not None]
    agreed = accuracy([score for score, _ in known], [truth for _, truth in known]) if known else {}
    successes = sum(t.labelled(score).success for t, score in zip(played, scores, strict=True))
    return {
        "trajectories": len(played),
        "invalid": job.outcome(stage.data)["invalid"],
        "steps": sum(len(t.steps) for t in played),
        "successes": successes,
        "solved": sum((t.score or 0.0) >= 1.0 for t in played),
        "success_rate": successes / max(len(played), 1),
        **{f"orm/{name}": getattr(value, "value", value) for name, value in agreed.items()},
    }
