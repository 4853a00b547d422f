"""SPA's worlds as an environment: a task is a seed of a tag, an episode an agent's turns in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import ConfigError
from ...data.schema import TEXT
from ...data.tokenizers import Tokenizer
from ...data.trajectory import Invalid, Role, Trajectory
from ..environment import Split
from ..evaluation import Evaluation, Results
from ..language_tasks import Made
from ..multiturn import Imagination, Limits
from ..rollout.sampler import Sampler, SamplingParams
from ..tasks import Gather, Lesson, Scorer, Tasks
from ..worlds.tasks import Task, named_tasks, rotation
from .config import WorldsEnvironment
from .dynamics import transitions
from .evaluate import state_perplexity, summarise
from .results import AgentResults, gap_table
from .rollout import Instance, Player, Seat, actions_taken, describe_agents, turns_of, world_finder
from .selfplay import Lesson as Turn
from .selfplay import RandomPlayer, lessons, tagged_share

SEEDS = 1 << 30  # of a split: more than anyone plays
PROBED = 64  # instances whose state texts a model's perplexity is taken over


class Instances(Sequence[Instance]):
    """Seeds from a first one on, dealt to tags by weight."""

    def __init__(self, worlds: dict[str, Task], turns: list[str], first: int, imagined: bool = False) -> None:
        self.worlds, self.turns, self.first, self.imagined = worlds, turns, first, imagined

    def __len__(self) -> int:
        return SEEDS

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(SEEDS))]
        return Instance(self.worlds[self.turns[at % len(self.turns)]], self.first + at, self.imagined)


class WorldTasks(Tasks):
    """The worlds of some tags, met as the settings say."""

    evaluation_key, counted = 6, ("actions",)

    def __init__(
        self, settings: WorldsEnvironment, made: Made | None, tokenizer: Tokenizer, max_length: int | None
    ) -> None:
        super().__init__(tokenizer, max_length, settings.max_turns)
        self.settings = settings
        tags = [*settings.tags, *settings.test_tags]
        self.worlds = worlds = named_tasks(tags, settings.tag_files, settings.config)
        train = dict(zip(settings.tags, settings.weights or [1.0] * len(settings.tags), strict=True))
        test = dict.fromkeys(settings.test_tags, 1.0) or dict.fromkeys(settings.tags, 1.0)
        self.imagined_by = settings.imagined_by
        if settings.imagined_by is not None:
            self.counted = ("actions", "imagined_actions")
        self._instances: dict[Split, Instances] = {
            "train": Instances(worlds, rotation(train), settings.first_seed, settings.imagined_by is not None),
            "test": Instances(worlds, rotation(test), settings.test_seed),
        }
        self._player = Player(tokenizer, settings, Limits(max_turns=settings.max_turns))

    def of(self, split: Split) -> Sequence[Instance]:
        return self._instances[split]

    def order(self, seed: int, without: Collection[int] = ()) -> Callable[[int], int]:
        return lambda place: place  # seeds never end, and those to validate on come last

    def numbers(self, seed: int) -> Sequence[int]:
        return range(SEEDS)

    def some(self, n: int) -> list[Instance]:
        return self.of("test")[:n]  # type: ignore[return-value]

    def episode(self, task: Instance, prompt_id: int, sample_index: int) -> Seat:
        return Seat(task.task, task.seed, prompt_id, sample_index, imagined=task.imagined)

    def imagined(self, task: Instance) -> Instance:
        return replace(task, imagined=True)

    def step_tables(self, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """How much of the success in imagination is true, wherever both were looked at."""
        return {"gap": gap_table(name, rows)} if any("validation/gap" in row for row in rows) else {}

    def parts(self, n: int) -> dict[str, list[Instance]]:
        """A part for each tag, all with the same seeds."""
        tags = dict.fromkeys(self.settings.test_tags or self.settings.tags)
        return {
            tag: [Instance(self.worlds[tag], self.settings.test_seed + number) for number in range(n)] for tag in tags
        }

    def shown_as(self, model: str, temperature: float, part: str) -> str:
        return f"{model}-{part}"  # greedy episodes come last and are kept: the report shows the same rooms of every arm

    def judgements(self, episodes: Sequence[Seat], played: Sequence[Trajectory]) -> list[Trajectory]:
        return [replace(trajectory, sequences=[]) for trajectory in played]

    def probe(self, score: Scorer, tasks: Sequence[Instance]) -> list[float]:
        """Perplexity of state texts without and with coordinates, each as shown in the prompt and alone."""
        return [
            state_perplexity(score, tasks[:PROBED], self.tokenizer, self.settings, coordinates=coordinates, alone=alone)
            for coordinates in (False, True)
            for alone in (False, True)
        ]

    def results(self, evaluation: Evaluation) -> Results:
        return AgentResults(evaluation).results()

    def play(self, sampler: Sampler, episodes: Sequence[Seat], params: SamplingParams, seed: int) -> list[Trajectory]:
        if self.imagination is None and any(seat.imagined for seat in episodes):
            raise ConfigError(
                "env.imagined_by: only RL trains in an imagined world; give it in the env of the stage of kind rl"
            )
        world = Imagination(self.imagination, self.max_length) if self.imagination else None
        return self._player.play(sampler, episodes, params, seed, world)

    def measures(self, trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, float]:
        return describe_agents(trajectories, gather)

    def scores(self, trajectories: Sequence[Trajectory], samples: int) -> dict[str, float]:
        scores = summarise(trajectories)
        return {f"pass@{k}": scores.passes(k).value for k in (1, samples)}

    def actions(self, trajectories: Sequence[Trajectory]) -> int:
        return actions_taken(trajectories)

    def tally(self, trajectories: Sequence[Trajectory]) -> dict[str, int]:
        return super().tally(trajectories) | {"imagined_actions": actions_taken(trajectories, imagined=True)}

    def progress(self, values: dict[str, Any]) -> str:
        return f"{super().progress(values)}  success {values.get('agent/success', float('nan')):.3f}"

    def shown(self, episode: Seat) -> list[dict[str, Any]]:
        return turns_of(episode)

    def player(self, episodes: Sequence[Seat]) -> Sampler:
        """The random policy."""
        actions = min(self.settings.random_actions, self.settings.actions_per_turn)
        return RandomPlayer(world_finder(episodes), self.tokenizer, actions, self.settings.fmt)

    def taught(self, episode: Seat, trajectory: Trajectory, held_out_share: float) -> list[Lesson]:
        """Every turn on its own: the answer, its state tags filled as the settings say, or what followed it."""
        assert episode.episode is not None
        settings = self.settings
        if settings.teaches == "transitions":
            turns = transitions(episode.episode, held_out_share)
        else:
            turns = lessons(
                episode.episode, settings.states, settings.only_tagged, held_out_share, settings.learn_blanks
            )
        return [Lesson(turn.sequence, _fields(episode, turn), turn.held_out) for turn in turns]

    def counts(self, episodes: Sequence[Seat], trajectories: Sequence[Trajectory]) -> dict[str, int]:
        pairs = zip(episodes, trajectories, strict=True)
        valid = [seat.episode for seat, t in pairs if not isinstance(t.reward, Invalid) and seat.episode]
        turns = sum(len(episode.parsed) for episode in valid)
        successes = sum(bool(t.info.get("success")) for t in trajectories)
        counted = {"successes": successes, "turns": turns, "tagged": round(tagged_share(valid) * turns) if turns else 0}
        return super().counts(episodes, trajectories) | counted

    def shares(self, counts: dict[str, int]) -> dict[str, float]:
        return {"kept_share": counts["tagged"] / max(counts["turns"], 1)}


def _fields(seat: Seat, turn: Turn) -> dict[str, Any]:
    """A turn as a sample of text: what was asked and answered, the states around it, and where it comes from."""
    episode = seat.episode
    assert episode is not None
    prompt = [i for i, role in zip(turn.sequence.ids, turn.sequence.roles, strict=True) if role == Role.PROMPT]
    return {
        "messages.json": [
            {"role": "user", "content": episode.tokenizer.decode(prompt[: turn.asked])},
            {"role": "assistant", "content": turn.text},
        ],
        "states.json": [episode.states[turn.turn], episode.states[turn.turn + 1]],
        "meta.json": {
            "schema": TEXT,
            "task": seat.task.name,
            "seed": seat.seed,
            "sample": seat.sample_index,
            "turn": turn.turn,
            "success": episode.success,
            "reward": float(sum(turn.reward for turn in episode.turns)),
        },
    }
