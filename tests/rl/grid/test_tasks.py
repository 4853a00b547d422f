"""A grid's world model as an environment: rooms and play of a collect stage, tasks, lessons and tables."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrella.core.errors import ConfigError
from terrella.core.rng import fold
from terrella.data.schema import TEXT
from terrella.data.shards import ShardWriter
from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.evaluation import TEST, Evaluation
from terrella.rl.grid.config import GridEnvironment
from terrella.rl.grid.evaluate import score_predictions
from terrella.rl.grid.imagination import GridDynamics, make_task
from terrella.rl.grid.rooms import layout, transitions
from terrella.rl.grid.tasks import GridTasks
from terrella.rl.language_tasks import Made
from terrella.rl.rollout.sampler import Sample, SampleRequest

DYNAMICS = GridDynamics.of("SimpleSokoban")
TOKENIZER = DYNAMICS.tokenizer()
ENV = GridEnvironment(
    kind="grid", tag="SimpleSokoban", data="play", heldout_rooms=3, actions_per_room=5, steps=2, walk=3
)
SEED = 7


def made(folder: Path, finished: bool = True, **settings: Any) -> Made:
    return Made("play", folder, {"prompts": 12, "samples_per_shard": 16, **settings}, finished, seed=SEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a collect stage leaves."""
    place = tmp_path_factory.mktemp("grid") / "play"
    counts = GridTasks(ENV, made(place, False), TOKENIZER, None).make(lambda: None)
    assert counts["rooms"] == 12 and counts["heldout_rooms"] == 3 and 12 < counts["transitions"] <= 60
    return place


@pytest.fixture
def tasks(folder: Path) -> GridTasks:
    return GridTasks(ENV, made(folder), TOKENIZER, 128)


class Truth:
    """Answers with the true next state."""

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        texts = [TOKENIZER.decode(request.ids) for request in requests]
        ids = [tuple(TOKENIZER.encode(DYNAMICS.next(text[:-1], "UDLR".index(text[-1]) + 1))) for text in texts]
        return [Sample(one, (-0.5,) * len(one), "length", 0) for one in ids]


def test_held_out_rooms_have_layouts_of_their_own(tasks: GridTasks) -> None:
    train, test = ([layout(room.state) for room in tasks.of(split)] for split in ("train", "test"))
    assert len(train) == 12 and len(test) == 3 and not set(train) & set(test)


def test_a_killed_collect_stage_goes_on_after_its_last_whole_shard(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "play"))
    shards = sorted((copy / "shards").glob("shard-*.tar"))
    assert len(shards) > 1
    for path in (shards[-1], shards[-1].with_suffix(".index"), copy / "shards" / "dataset.json"):
        path.unlink()
    kept = shards[0].stat().st_mtime_ns
    GridTasks(ENV, made(copy, False), TOKENIZER, None).make(lambda: None)
    assert shards[0].stat().st_mtime_ns == kept
    assert [p.read_bytes() for p in shards] == [p.read_bytes() for p in sorted((folder / "shards").glob("shard-*.tar"))]


def test_prompts_are_drawn_by_their_number_and_rooms_to_validate_on_are_never_dealt(tasks: GridTasks) -> None:
    rooms = [room.state for room in tasks.of("train")]
    cut = tasks.numbers(SEED)[-4:]
    order, rest = tasks.order(SEED), tasks.order(SEED, without=cut)
    for place in range(40):
        episode = tasks.episode(tasks.of("train")[order(place)], place, 1)
        assert episode.task == make_task(DYNAMICS, rooms, place, 2, 3, fold(SEED, 1)) and episode.sample_index == 1
        assert rest(place) not in cut
    held = [tasks.task(room, i) for i, room in enumerate(tasks.parts(20)[TEST])]
    assert held == [make_task(DYNAMICS, [r.state for r in tasks.of("test")], i, 2, 3, fold(SEED, 3)) for i in range(20)]


def test_lessons_are_the_transitions_of_random_play_each_once_a_pass(tasks: GridTasks) -> None:
    play = list(transitions(DYNAMICS, [room.state for room in tasks.of("train")], 5, SEED))
    assert list(tasks.imitated()) == play
    order = tasks.lesson_order(SEED)
    places = [order(place) for place in range(2 * len(play))]
    assert sorted(places[: len(play)]) == sorted(places[len(play) :]) == list(range(len(play)))
    assert places[: len(play)] != places[len(play) :]
    ((lesson,),) = tasks.lessons(tasks.imitated()[:1], "here")
    assert TOKENIZER.decode(lesson.ids) == play[0]["state"] + "UDLR"[play[0]["action"] - 1] + play[0]["next_state"]
    assert lesson.roles == (Role.PROMPT,) * 37 + (Role.STATE,) * 36


def test_before_the_rooms_are_made_there_is_one_to_look_at(tmp_path: Path) -> None:
    early = GridTasks(ENV, made(tmp_path, False), TOKENIZER, 128)
    assert [room.state for room in early.of("train")] == [DYNAMICS.start(ENV.first_seed)]
    assert early.lesson_order(0)(3) == 0 and len(early.lessons(early.imitated()[:1], "here")[0][0].ids) == 73
    assert early.params(None, 0.5).max_new_tokens == 36


def test_what_a_model_imagined_can_be_imitated(tasks: GridTasks, tmp_path: Path) -> None:
    episode = tasks.episode(tasks.of("train")[0], 0, 0)
    (trajectory,) = tasks.play(Truth(), [episode], tasks.params(36, 1.0), 0)
    assert trajectory.reward == 1.0 and tasks.judgements([episode], [trajectory])[0].all_exact
    lessons = tasks.taught(episode, trajectory, 0.0)
    assert [lesson.sequence for lesson in lessons] == trajectory.sequences and not any(
        lesson.held_out for lesson in lessons
    )
    with ShardWriter(tmp_path / "shards", kind=TEXT) as writer:  # refuses a sample that is not of its kind
        for lesson in lessons:
            writer.write(lesson.fields)
    assert writer.samples == 2


def test_tables_leave_faults_out_and_say_how_each_model_was_trained(tasks: GridTasks) -> None:
    rooms = tasks.parts(8)[TEST]
    asked = [tasks.task(room, i) for i, room in enumerate(rooms)]
    right = [[score_predictions(task, task.truths)] for task in asked]
    wrong: list[list[Any]] = [[score_predictions(task, ["?" * 36] * 2)] for task in asked]
    wrong[0] = [Invalid("server gone")]
    judged = {(name, t, TEST): found for t in (0.0, 1.0) for name, found in (("pretrain", wrong), ("rlvr", right))}
    shown = {("pretrain", TEST): "evaluate-pretrain-t0", ("rlvr", TEST): "evaluate-rlvr-t0"}
    evaluation = Evaluation(["pretrain", "rlvr"], [0.0, 1.0], 1, {TEST: rooms}, judged, "pretrain", "rlvr", shown=shown)
    found = tasks.results(replace(evaluation, trained_by={"pretrain": "sft", "rlvr": "rl"}))
    assert list(found.tables) == ["t0", "t1"] and found.outcome["rlvr/t1/all_exact"] == 1.0
    assert [(row["name"], row["kind"], row["cells"][1]["n"]) for row in found.tables["t1"]["rows"]] == [
        ("copy the state", "baseline", 8),
        ("pretrain: next-state pre-training", "model", 7),
        ("rlvr: after RL with verifiable reward", "model", 8),
        ("the true world", "ceiling", 8),
    ]
    assert (
        found.summary
        and "RLVR raised" in found.summary["headline"]
        and "the same 7 tasks" in found.summary["paragraphs"][0]
    )
    assert [one["rollouts"] for one in found.summary["compare"]] == list(shown.values())


def test_what_cannot_work_is_refused_by_name(tasks: GridTasks, tmp_path: Path) -> None:
    for settings, source, tokenizer, most, message in (
        (ENV, made(tmp_path), ByteTokenizer(), None, "env: the states of a grid are read one token a cell"),
        (ENV, Made("questions", tmp_path, {"games": []}), TOKENIZER, None, "env.data: 'questions' is no collect stage"),
        (ENV, made(tmp_path), TOKENIZER, 64, "model.max_positions = 64: .* take 73"),
        (
            replace(ENV, tag="SimpelSokoban"),
            made(tmp_path),
            TOKENIZER,
            None,
            "env.tag: .* did you mean 'SimpleSokoban'",
        ),
        (replace(ENV, tag="FrozenLake"), made(tmp_path), TOKENIZER, None, "env.tag: 'FrozenLake' has no grid dynamics"),
    ):
        with pytest.raises(ConfigError, match=message):
            GridTasks(settings, source, tokenizer, most)
    with pytest.raises(ConfigError, match="samples: every task is imagined once"):
        tasks.require_judge("test", 2)
    with pytest.raises(ValueError, match="heldout_rooms: at least 1"):
        replace(ENV, steps=0)
