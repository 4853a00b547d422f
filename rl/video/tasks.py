"""Video as an environment: a task is a true clip, an episode a prediction of its frames with the true actions forced
in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.files import make_folder, write_json
from ...core.mesh import Mesh
from ...core.rng import permutation
from ...data.shards import ShuffledOrder
from ...data.tokenizers import ByteTokenizer, Tokenizer
from ...data.trajectory import Invalid, TokenSequence, Trajectory
from ..environment import Split
from ..evaluation import TEST, Evaluation, Results
from ..language_tasks import Made
from ..rewards.video import Metric, require_weights
from ..rollout.episodes import rollout
from ..rollout.sampler import Sampler, SamplingParams
from ..tasks import Gather, Lesson, Tasks
from .artifacts import ACTIONS, Clip, Clips, action_bins, frozen_tokenizer
from .collect import count_episodes, record_episodes, write_clips
from .config import VideoEnvironment
from .evaluate import ClipScores, copy_baseline, imagine, score_rows, without_repeats
from .imagine import ClipDecoder, ClipTask, ImaginedClip, Judge, judge_by_clip
from .measures import room, time_table
from .results import ClipJudgement, VideoResults


@lru_cache(maxsize=1)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return permutation(count, seed, 31, epoch)


@dataclass
class HeldOutClip:
    """One sample of a clip in an evaluation."""

    clip: Clip
    prompt_id: int
    sample_index: int
    judgement: ClipJudgement | None = None


class VideoTasks(Tasks):
    """The clips of the stage that env.data names."""

    free_text = shows_turns = False

    def __init__(
        self, settings: VideoEnvironment, made: Made, tokenizer: Tokenizer | None = None, max_length: int | None = None
    ) -> None:
        self.settings, self.made, self.layout = settings, made, settings.layout
        self._clips: dict[Split, Clips] = {
            "train": Clips(settings, made, "train"),
            "test": Clips(settings, made, "test"),
        }
        self._beside: dict[tuple[int, ...], tuple[list[ClipScores], list[ClipScores]]] = {}
        self.lesson_tokens = int(self.layout.loss_mask_L.sum())
        super().__init__(ByteTokenizer(), None, max_turns=1)  # codes have no text
        self.pad_id = -1  # and clips no padding

    @cached_property
    def decoder(self) -> ClipDecoder:
        """The frozen tokenizer's."""
        return ClipDecoder(frozen_tokenizer(self.settings, self.made), self.layout, self.settings.bf16)

    @cached_property
    def judge(self) -> Judge:
        """The reward of RL."""
        reward = self.settings.reward
        return Judge(self.decoder, reward.weights, reward.aggregate, reward.repetition_penalty)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What an evaluation measures."""
        return tuple(self.settings.metrics)

    def of(self, split: Split) -> Clips:
        return self._clips[split]

    def require_source(self) -> None:
        for made in (self.made, self.made.uses["episodes"]):
            if made.settings.get("prompts") is not None:
                raise ConfigError(f"stages: {made.name}.prompts: env says what is made of videos; leave it out")
        if self.stage == self.settings.episodes and self.settings.shards is not None:
            count_episodes(self.settings, self.made)

    def make(self, guard: Callable[[], None]) -> dict[str, int]:
        """The episodes, or before their clips the bins of actions."""
        guard()
        if self.stage == self.settings.data:
            write_json(make_folder(self.made.folder) / ACTIONS, action_bins(self.settings, self.made).ranges)
            return {}
        return (record_episodes if self.settings.shards is None else count_episodes)(self.settings, self.made)

    def make_part(self, guard: Callable[[], None], mesh: Mesh) -> dict[str, int]:
        return write_clips(self.settings, self.made, mesh) if self.stage == self.settings.data else {}

    def require_judge(self, split: Split, samples: int) -> None:
        asked = max([self.settings.runs, *self.settings.best_of])
        if split == "test" and asked > samples:
            raise ConfigError(
                f"env.best_of, env.runs: {asked} samples of a clip are asked for, the eval stage has samples = "
                f"{samples}"
            )
        rewarded = [name for name, weight in self.settings.reward.weights.items() if weight]
        require_weights(rewarded if split == "train" else self.metrics)

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        used = self.remaining(without)

        def number(place: int) -> int:
            epoch, at = divmod(place, len(used))
            return used[_order(len(used), seed, epoch)[at]]

        return number

    def lesson_order(self, seed: int) -> Callable[[int], int]:
        clips = self.of("train")
        counts = clips.shards.counts if len(clips) == len(clips.shards) else [len(clips)]  # a part is one pile
        return ShuffledOrder(counts, seed=seed).__getitem__

    def params(self, max_new_tokens: int | None, temperature: float) -> SamplingParams:
        allowed = self.layout.ids_of("frame") if self.settings.visual_ids_only else None
        return SamplingParams(self.layout.sampled, temperature, top_k=self.settings.top_k, allowed=allowed)

    def lessons(self, tasks: Sequence[Clip], where: str) -> list[list[TokenSequence]]:
        return [[self.layout.sequence(clip.row_L)] for clip in tasks]

    def taught(self, episode: Any, trajectory: Trajectory, held_out_share: float) -> list[Lesson]:
        raise ConfigError(
            "collect: has nothing to do for clips of video, which an sft stage reads as the stage env.data left them"
        )

    def episode(self, task: Clip, prompt_id: int, sample_index: int) -> Any:
        if not task.rewarded:
            return HeldOutClip(task, prompt_id, sample_index)
        return ImaginedClip(task.task(prompt_id), sample_index, self.layout, self.judge)

    def play(self, sampler: Sampler, episodes: Sequence[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        clips = [episode for episode in episodes if isinstance(episode, HeldOutClip)]
        if not clips:
            judge_by_clip(episodes)
            return rollout(sampler, episodes, params, seed)
        for number in range(max(clip.sample_index for clip in clips) + 1):
            self._evaluate(sampler, [clip for clip in clips if clip.sample_index == number], params, seed)
        return [Trajectory(clip.prompt_id, clip.sample_index, [], 0.0) for clip in clips]

    def measures(self, trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, float]:
        """Means of the metrics and of repetition, how much the samples of one clip differ, and the speed of the
        judge.
        """
        valid = [(t.prompt_id, t.reward, t.info) for t in trajectories if not isinstance(t.reward, Invalid)]
        samples = [sample for part in gather(valid) for sample in part]
        judge, (seconds, pictures) = self.judge, (self.judge.seconds, self.judge.pictures)
        judge.seconds, judge.pictures = 0.0, 0
        names = samples[0][2] if samples else ()
        means = {f"clip/{name}": sum(float(info[name]) for _, _, info in samples) / len(samples) for name in names}
        speed = {"time/judge_s": seconds, "time/judged_frames_per_s": pictures / max(seconds, 1e-9)}
        return means | room([(prompt, reward) for prompt, reward, _ in samples]) | speed

    def progress(self, values: dict[str, Any]) -> str:
        return f"reward {values['reward/mean']:.4f}"

    def step_tables(self, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {"time": time_table(name, rows)}

    # Evaluation.

    def parts(self, n: int) -> dict[str, list[Clip]]:
        clips = self.of("test")
        chosen = permutation(len(clips), self.made.seed, 41)[:n]
        return {TEST: [replace(clips[number], rewarded=False) for number in chosen]}

    def shown_as(self, model: str, temperature: float, part: str) -> str | None:
        return None  # the report has moving pictures

    def _evaluate(self, sampler: Sampler, clips: list[HeldOutClip], params: SamplingParams, seed: int) -> None:
        """One sample of every clip, judged; of the first ones also what is trivial, what is true, and the rejection
        of repeats.
        """
        if not clips:
            return
        tasks = [clip.clip.task(clip.prompt_id) for clip in clips]
        scores = imagine(sampler, tasks, self.decoder, self.metrics, params, clips[0].sample_index, seed)
        again, tries = None, self.settings.reject_repeats
        if clips[0].sample_index:
            for clip, score in zip(clips, scores.each(), strict=True):
                clip.judgement = ClipJudgement(score)
            return
        if tries:
            again = without_repeats(scores, tries, sampler, tasks, self.decoder, self.metrics, params, seed).each()
        known = zip(clips, scores.each(), again or [None] * len(clips), *self._trivial_and_true(tasks), strict=True)
        for clip, score, retried, still, truth in known:
            clip.judgement = ClipJudgement(score, retried, still, truth)

    def _trivial_and_true(self, tasks: Sequence[ClipTask]) -> tuple[list[ClipScores], list[ClipScores]]:
        """The scores of the last given frame for ever and of the true tokens, made once for all models."""
        key = tuple(task.prompt_id for task in tasks)
        if key not in self._beside:
            rows = np.stack([task.row_L for task in tasks])
            still = copy_baseline(tasks, self.metrics, self.decoder.device)
            trivial = ClipScores(still, np.ones(len(tasks), bool), rows)
            self._beside[key] = trivial.each(), score_rows(rows, tasks, self.decoder, self.metrics).each()
        return self._beside[key]

    def judgements(self, episodes: Sequence[HeldOutClip], played: Sequence[Trajectory]) -> list[Any]:
        return [clip.judgement for clip in episodes]

    def results(self, evaluation: Evaluation) -> Results:
        return VideoResults(self.settings, evaluation, self.decoder).results()
