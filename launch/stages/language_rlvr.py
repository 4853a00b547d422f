"""RLVR of a language world model: sampled answers, a rule as judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data.trajectory import Trajectory
from ...rl.language import AnswerEpisode, Question
from ...rl.rollout.sampler import Sampler, SamplingParams
from ..job import Job
from ..settings.language import LanguageReinforce
from .language import Questions
from .on_policy import Drill, practise


def run(stage: LanguageReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    questions = Questions(job, stage.data)
    cut = questions.cut(stage.rollouts.validation, stage.name)
    stream = questions.stream(stage.non_gold_ratio, without=cut)

    def answer(question: Question, place: int, sample: int) -> AnswerEpisode:
        made = {"kind": stage.reward, "mode": stage.mode, "multiple": questions.multiple}
        return AnswerEpisode(question, place, sample, questions.tokenizer, **made)

    def episodes_of(step: int) -> list[AnswerEpisode]:
        places = job.mesh.share(range(step * stage.prompts_per_step, (step + 1) * stage.prompts_per_step))
        asked = [(place, questions.at(stream[place])) for place in places]
        return [answer(q, place, k) for place, q in asked for k in range(stage.samples_per_prompt)]

    def held_back() -> list[AnswerEpisode]:
        return [answer(questions.at(i), i, k) for i in job.mesh.share(cut) for k in range(stage.rollouts.validation.samples)]

    def unreadable(sampler: Sampler, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        return {"reward/unreadable": sum(job.mesh.gather(sum(bool(t.info.get("reason")) for t in trajectories)))}

    drill = Drill(
        params=SamplingParams(max_new_tokens=stage.max_new_tokens, temperature=stage.temperature, stop_ids=(questions.tokenizer.eos_id,)),
        microbatch_tokens=stage.microbatch_tokens,
        episodes_of=episodes_of,
        progress=lambda values: f"reward {values['reward/mean']:.3f}",
        turns=turns,
        measure=unreadable,
        held_back=held_back,
    )
    return practise(stage, job, drill, stage.lora)


def turns(episode: AnswerEpisode) -> list[dict[str, Any]]:
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
