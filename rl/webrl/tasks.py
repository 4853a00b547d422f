"""Web sites as an environment: a task is an instruction, an episode an agent's rounds on its pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, LengthError
from ...core.rng import fold, shuffled
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Trajectory
from ..environment import Split
from ..evaluation import SHOWN, TEST, Evaluation, Results
from ..language_tasks import Made
from ..rollout.sampler import Sampler, SamplingParams
from ..tasks import Gather, Lesson, Tasks, held_out
from ..worlds.web.generate import SiteTask
from .config import WebSiteEnvironment
from .episode import act_randomly, demonstrate
from .oracle import Oracle
from .prompts import Prompter
from .results import ORACLE, RANDOM, Outcomes, site_results
from .sites import TASKS, Players, Seat, lives_elsewhere, pool_of, read_tasks, reset_sites, write_tasks
from .steps import WebTrajectory, converted, key_of, lessons_of


class SiteTasks(Tasks):
    """The tasks of web sites, met as the settings say."""

    evaluation_key, collection_key, counted = 41, 31, ("episodes", "successes", "actions")

    def __init__(
        self, settings: WebSiteEnvironment, made: Made | None, tokenizer: Tokenizer, max_length: int | None
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.settings, self.made = settings, made
        self.prompter = Prompter(tokenizer, settings.max_prompt_tokens, settings.pad_prompts_to)
        self._players = {split: Players(settings, self.prompter, split) for split in ("train", "test")}
        self._require("max_verdict_tokens", settings.max_verdict_tokens + 1)
        if settings.demonstrations and not Path(settings.demonstrations).exists():
            raise ConfigError(
                f"env.demonstrations = {settings.demonstrations}: no such folder; terrella shards make webrl (or "
                "sharegpt) makes it"
            )

    def _require(self, setting: str, needed: int) -> None:
        if self.max_length is not None and needed > self.max_length:
            raise LengthError(
                f"env.{setting}: prompts and answers take {needed} positions, model.max_positions is {self.max_length}"
            )

    @cached_property
    def _train(self) -> list[SiteTask]:
        if self.made is not None and self.made.finished:
            return read_tasks(self.made.folder / TASKS)
        return pool_of(self.settings)

    @cached_property
    def _test(self) -> list[SiteTask]:
        return pool_of(self.settings, "test")

    def of(self, split: Split) -> list[SiteTask]:
        return self._test if split == "test" else self._train

    def chosen(self, n: int) -> list[SiteTask]:
        """Those that a stage chose, or some of all, drawn for the stage that asks."""
        if self.settings.data is not None:
            return self._train[:n]
        return random.Random(f"{self.seed} {self.stage}").sample(self._train, min(n, len(self._train)))

    def keep(self, folder: Path, chosen: Sequence[SiteTask]) -> None:
        write_tasks(folder / TASKS, chosen)

    def recorded(self) -> tuple[list[Seat], list[Trajectory]] | None:
        """Converted demonstrations."""
        if self.settings.demonstrations is None:
            return None
        kept = converted(Path(self.settings.demonstrations), self.prompter)
        seats = [Seat(self._train[0], number, 0, kept=one) for number, one in enumerate(kept)]
        infos = [{"success": one.success, "steps": len(one.steps), "site": one.site} for one in kept]
        return seats, [
            Trajectory(seat.prompt_id, 0, [], one.reward, [], i)
            for seat, one, i in zip(seats, kept, infos, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        return {"tasks": len(self._train)}

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        """Every task comes once before any comes again, in a fresh order every time."""
        used = [i for i in range(len(self._train)) if i not in set(without)]
        return lambda place: used[shuffled(len(used), fold(seed, 61), place)]

    def some(self, n: int) -> list[SiteTask]:
        return self._test[:n]

    def require_room(self, max_new_tokens: int | None, split: Split | None = None) -> None:
        self._require("max_prompt_tokens", self.settings.max_prompt_tokens + (max_new_tokens or 0))

    def params(self, max_new_tokens: int | None, temperature: float) -> SamplingParams:
        return replace(super().params(max_new_tokens, temperature), stop_ids=self.prompter.stop_ids)

    def reset(self, split: Split) -> None:
        reset_sites(self.settings, split)

    def episode(self, task: SiteTask, prompt_id: int, sample_index: int) -> Seat:
        return Seat(task, prompt_id, sample_index)

    def player(self, episodes: Sequence[Seat]) -> Any:
        """The scripted oracles."""
        if self.settings.demonstrations is None and not all(seat.task.steps for seat in episodes):
            raise ConfigError(
                "env.tag: not all of its tasks have an oracle; name a model that plays, or env.demonstrations"
            )
        return Oracle(self.settings, self.prompter, self.stage, self.seed)

    def play(
        self, sampler: Sampler | Oracle, episodes: Sequence[Seat], params: SamplingParams, seed: int
    ) -> list[Trajectory]:
        if isinstance(sampler, Oracle):
            return sampler.play(episodes)
        players = self._players["test" if episodes and episodes[0].task.split == "test" else "train"]
        return players.play(sampler, episodes, params, seed, self.ranks)

    def tally(self, trajectories: Sequence[Trajectory]) -> dict[str, int]:
        valid = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
        successes, actions = (sum(info[name] for info in valid) for name in ("success", "steps"))
        return {"episodes": len(valid), "successes": successes, "actions": actions}

    def measures(self, trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, float]:
        parts = gather(self.tally(trajectories))
        total = {name: sum(part[name] for part in parts) for name in self.counted}
        played = max(total["episodes"], 1)
        return {"web/success": total["successes"] / played, "web/steps": total["actions"] / played}

    def actions(self, trajectories: Sequence[Trajectory]) -> int:
        return self.tally(trajectories)["actions"]

    def progress(self, values: dict[str, Any]) -> str:
        return f"success {values['web/success']:.3f}"

    def shown(self, episode: Seat) -> list[dict[str, Any]]:
        """The page before each action, what was written, and the next page."""
        rounds = episode.episode.rounds if episode.episode else []
        after = [html for _, _, html, _, _ in rounds[1:]] + [rounds[-1][2] if rounds else ""]
        return [
            {"prompt": html, "action": response, "prediction": "", "truth": page, "exact": False}
            for (_, _, html, response, _), page in zip(rounds, after, strict=False)
        ]

    def pictures(self, episodes: Sequence[Seat], played: Sequence[Trajectory]) -> list[dict[str, Any]]:
        valid = [seat for seat, t in zip(episodes, played, strict=True) if not isinstance(t.reward, Invalid)]
        return [strip(seat) for seat in valid[:SHOWN] if seat.episode is not None]

    def taught(self, episode: Seat, trajectory: Trajectory, held_out_share: float) -> list[Lesson]:
        """Every step, those of failures too: reward models, critics and actors learn from them."""
        kept = _kept(episode)
        return lessons_of(kept, held_out(kept.key, held_out_share))

    def counts(self, episodes: Sequence[Seat], trajectories: Sequence[Trajectory]) -> dict[str, int]:
        pairs = zip(episodes, trajectories, strict=True)
        valid = [seat for seat, t in pairs if not isinstance(t.reward, Invalid)]
        kept = [_kept(seat) for seat in valid]
        return {
            "steps": sum(len(one.steps) for one in kept),
            "successes": sum(one.success for one in kept),
            "solved": sum((one.score or 0.0) >= 1.0 for one in kept),
            "pages_cut": sum(seat.cut or (seat.episode is not None and seat.episode.cut > 0) for seat in valid),
            **super().counts(episodes, trajectories),
        }

    def shares(self, counts: dict[str, int]) -> dict[str, float]:
        return {"pool": len(self._train), "success_rate": counts["successes"] / max(counts["trajectories"], 1)}

    # Evaluation.

    def shown_as(self, model: str, temperature: float, part: str) -> str:
        return model

    def judgements(self, episodes: Sequence[Seat], played: Sequence[Trajectory]) -> list[Any]:
        return [t.reward if isinstance(t.reward, Invalid) else (t.info["site"], t.info["success"]) for t in played]

    def results(self, evaluation: Evaluation) -> Results:
        tasks = evaluation.tasks[TEST]
        return site_results(evaluation, {who: self._scripted_by(who, tasks) for who in self.scripts(tasks)})

    def scripts(self, tasks: Sequence[SiteTask]) -> list[str]:
        """Who plays beside the models. Without scripts, as on sites elsewhere, there is no oracle; and nobody clicks
        there at random unless the recipe says so."""
        harmless = self.settings.random_elsewhere or not lives_elsewhere(self.settings, "test")
        return [*([RANDOM] if harmless else []), *([ORACLE] if any(task.steps for task in tasks) else [])]

    def _scripted_by(self, who: str, tasks: Sequence[SiteTask]) -> Outcomes:
        outcomes: Outcomes = {}
        for number, task in enumerate(tasks):
            if who == ORACLE and not task.steps:
                continue
            episode = self._players["test"].episode(0, task, number, 0)
            rng = random.Random(f"{self.seed} {self.stage} {who} {number}")
            if who == ORACLE:
                demonstrate(episode, 0.0, rng)
            else:
                act_randomly(episode, rng)
            if episode.fault is None:  # a fault of the sites is no failure, as it is none of a model's
                outcomes[number, 0] = (task.task.sites[0], episode.solved)
        return outcomes


def _kept(seat: Seat) -> WebTrajectory:
    """A valid episode as it is kept."""
    if seat.kept is not None:
        return seat.kept
    assert seat.episode is not None
    return seat.episode.trajectory(key_of(seat.prompt_id, seat.sample_index))


def strip(seat: Seat) -> dict[str, Any]:
    """An ended episode for the report: every page, and what was written on it."""
    task, episode = seat.task.task, seat.episode
    assert episode is not None
    turns = [{"prompt": f"{task.intent}\n\n{html}", "action": response} for _, _, html, response, _ in episode.rounds]
    ends = {"task_id": task.task_id, "site": task.sites[0], "steps": len(turns), "answer": episode.answer}
    return {"prompt_id": task.intent, "sample": seat.sample_index, "reward": episode.reward, "turns": turns, **ends}
