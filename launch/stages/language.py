"""What the stages that make questions share, and the tokenizer of a recipe of text."""

from __future__ import annotations

from ...data.tokenizers import Tokenizer
from ...rl.evaluation import TEST
from ...rl.language_tasks import UNSEEN
from ..job import Job
from ..settings.language import TextGameData, WebPageData
from ..settings.verbs import Start
from .verbs import learnt_tokenizer
from .verbs import tokenizer_of as verb_tokenizer

TRAIN = "train"
__all__ = ["TEST", "TRAIN", "UNSEEN", "start_of", "tokenizer_of"]


def start_of(job: Job) -> Start | None:
    """The recipe's start; without one a tokenizer is learnt from the data, and the first stage trains from scratch."""
    return next((s for s in job.recipe.stages if isinstance(s, Start)), None)


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of a recipe of text: that of its start, or the one that its data stage learnt."""
    stage = next((s for s in job.recipe.stages if isinstance(s, TextGameData | WebPageData)), None)
    return (stage and learnt_tokenizer(job, job.stage_folder(stage.name))) or verb_tokenizer(job)
