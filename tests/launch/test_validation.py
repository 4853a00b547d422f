"""The cut a stage validates on: never trained on, and made only where it is asked for; replays find the journals of
a run.
"""

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import recipe as recipes
from terrella.launch.commands.train import replaying
from terrella.launch.settings.base import OnPolicy
from terrella.launch.stages.common import split_cut
from terrella.rl.rollout.config import Rollouts, Validation, Vllm
from terrella.rl.text_games.splits import RatioSampler


def test_the_cut_and_what_is_trained_on_share_nothing() -> None:
    items = list(range(100))
    assert split_cut(items, Validation(), "rlvr") == (items, [])
    trained, cut = split_cut(items, Validation(every=5, prompts=30), "rlvr")
    assert len(cut) == 30 and not set(cut) & set(trained) and sorted(trained + cut) == items
    with pytest.raises(ConfigError, match=r"rlvr.rollouts.validation.prompts = 100 leaves nothing"):
        split_cut(items, Validation(every=1, prompts=100), "rlvr")


def test_a_stream_never_gives_rows_of_the_cut() -> None:
    gold = [i % 3 == 0 for i in range(90)]
    cut = set(range(0, 90, 7))
    stream = RatioSampler(gold, ratio=1.0, seed=1, without=cut)
    seen = {stream[place] for place in range(20 * len(stream))}
    assert not seen & cut and seen == set(range(90)) - cut


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Validation(every=-1), "every"),
        (lambda: Vllm(colocated=True, tensor=2), "colocated"),
        (lambda: Vllm(sleep=1), "sleep"),
        (lambda: Vllm(colocated=True, adapters_only=True, sleep=2), "sleep"),
        (lambda: Rollouts(sampler=Vllm(colocated=True), ahead=1), "takes turns"),
    ],
)
def test_settings_that_cannot_work_are_refused(made, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_replay_points_every_sampling_stage_to_its_journal(tmp_path) -> None:
    config = recipes.load("sokoban-tiny", ())
    (stage,) = [s for s in config.stages if isinstance(s, OnPolicy)]
    with pytest.raises(ConfigError, match="keep_samples"):
        replaying(config, tmp_path)
    journal = tmp_path / "stages" / stage.name / "journal"
    journal.mkdir(parents=True)
    (journal / "samples-00000000-0.jsonl").write_text("")
    (found,) = [s for s in replaying(config, tmp_path).stages if isinstance(s, OnPolicy)]
    assert found.rollouts.replay == str(journal) and found.steps == stage.steps
