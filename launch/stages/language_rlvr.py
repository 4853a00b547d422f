"""RLVR of a language world model: sampled answers, a rule as judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data.trajectory import Trajectory
from ...rl.language import AnswerEpisode, Question
from ...rl.rollout.sampler import SamplingParams
from ..job import Job
from ..settings.language import LanguageReinforce
from .language import Questions
from .on_policy import StageTrainer


def run(stage: LanguageReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    return LanguageTrainer(stage, job).train()


class LanguageTrainer(StageTrainer):
    """RL on the questions of a data stage."""

    def __init__(self, stage: LanguageReinforce, job: Job) -> None:
        self.language, self.questions = stage, Questions(job, stage.data)
        self.cut = self.questions.cut(stage.rollouts.validation, stage.name)
        self.stream = self.questions.stream(stage.non_gold_ratio, without=self.cut)
        stop_ids = self.questions.tokenizer.stop_ids
        params = SamplingParams(max_new_tokens=stage.max_new_tokens, temperature=stage.temperature, stop_ids=stop_ids)
        super().__init__(stage, job, params, stage.microbatch_tokens, stage.lora)

    def answer(self, question: Question, place: int, sample: int) -> AnswerEpisode:
        rules = {"kind": self.language.reward, "mode": self.language.mode, "multiple": self.questions.multiple}
        return AnswerEpisode(question, place, sample, self.questions.tokenizer, **rules)

    def deal(self, number: int) -> list[AnswerEpisode]:
        asked = [(place, self.questions.at(self.stream[place])) for place in self.places(number)]
        return [self.answer(q, place, k) for place, q in asked for k in range(self.stage.samples_per_prompt)]

    def held_back(self) -> list[AnswerEpisode]:
        samples = range(self.stage.rollouts.validation.samples)
        return [self.answer(self.questions.at(i), i, k) for i in self.mesh.share(self.cut) for k in samples]

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        return {"reward/unreadable": sum(self.mesh.gather(sum(bool(t.info.get("reason")) for t in trajectories)))}

    def turns(self, episode: AnswerEpisode) -> list[dict[str, Any]]:
        """The question and its answer as the report shows them."""
        question = episode.question
        return [
            {
                "prompt": question.prompt,
                "action": question.row.get("tick_state", {}).get("lastAction", ""),
                "prediction": episode.response or "",
                "truth": question.answer,
                "exact": episode.response == question.answer,
            }
        ]
