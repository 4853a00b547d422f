"""The scripted teacher: its thoughts tell the truth of every transition, and its lessons are right answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.convert.text_game import is_changed, is_gold
from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.language_tasks import Made
from terrella.rl.text_games.config import TextGameEnvironment
from terrella.rl.text_games.crawl import GAMES, crawl, crawl_all, prompt_writer, prompts
from terrella.rl.text_games.rows import action_of, changed_by_action
from terrella.rl.text_games.splits import RatioSampler, drawn, split_rows
from terrella.rl.text_games.tasks import TextGameTasks
from terrella.rl.text_games.thoughts import thought

ENV = TextGameEnvironment(
    kind="text-game", data="lessons", games=["weigh-stones", "fill-bucket"], seeds=1, prompt="rules", thoughts=12
)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return crawl_all(list(GAMES), range(1))


def test_a_thought_says_what_the_action_did_then_what_time_did(rows: list[dict]) -> None:
    for row in rows:
        said = thought(row)
        assert said.startswith(action_of(row) + ": ") and "{" not in said
        acted, _, ticked = said.partition(" Then time passes")
        assert ("so it changes nothing." in acted) != changed_by_action(row)
        score, new = row["current_score_state"], row["next_score_state"]
        assert ("The score stays." in ticked) == (score == new)
        if not is_changed(row):
            assert ticked == ", which changes nothing. The score stays."
    told = [thought(row) for row in rows]
    tomato = next(said for said in told if "tomato (ID: 7) comes into being" in said)
    assert "pot (ID: 4) now contains tomato" in tomato and "The score becomes 2." in tomato
    won = next(row for row in rows if row["next_score_state"]["gameWon"])
    assert thought(won).endswith(", and the game is won.")
    lost = {**won, "next_score_state": {**won["next_score_state"], "gameWon": False}}
    assert thought(lost).endswith(", and the game is lost.")


def test_a_reason_is_true_of_the_state(rows: list[dict]) -> None:
    """Every reason of the common verbs names a property that the state has, and the action did nothing."""
    found = set()
    for row in rows:
        acted = thought(row).partition(" Then time")[0].removeprefix(action_of(row) + ": ")
        if not acted.endswith(", so it changes nothing."):
            continue
        reason = acted.removesuffix(", so it changes nothing.")
        things = {t["name"]: t["properties"] for t in row["current_state"]["objects"]}
        (held,) = (t["contains"] for t in row["current_state"]["objects"] if t["type"] == "Agent")
        checks = {
            " is not moveable": lambda name: not things[name]["isMoveable"],
            " is held already": lambda name: name in held,
            " is no container": lambda name: not things[name]["isContainer"],
            " is closed": lambda name: not things[name]["isOpen"],
            " is not openable": lambda name: not things[name].get("isOpenable"),
            " is open already": lambda name: things[name]["isOpen"],
            " is closed already": lambda name: not things[name]["isOpen"],
            " is not activatable": lambda name: not things[name].get("isActivatable"),
            " is on already": lambda name: things[name]["isOn"],
            " is off already": lambda name: not things[name]["isOn"],
        }
        for end, check in checks.items():
            if reason.endswith(end):
                found.add(end)
                assert check(reason.removesuffix(end)), reason
        if reason.startswith("the agent does not hold "):
            assert reason.removeprefix("the agent does not hold ") not in held
    assert len(found) == 10


def test_lessons_are_a_few_training_rows_with_right_reasoned_answers(tmp_path: Path) -> None:
    made = Made("lessons", tmp_path / "lessons", {"samples_per_shard": 64}, finished=False, seed=3)
    counts = TextGameTasks(ENV, made, ByteTokenizer(), None).make(lambda: None)
    tasks = TextGameTasks(ENV, replace(made, finished=True), ByteTokenizer(), None)
    assert (counts["train_rows"], counts["test_rows"], counts["unseen_rows"]) == (12, 0, 0)
    lessons = tasks.of("train")
    assert 6 <= sum(question.gold for question in lessons) < 12  # gold to others as in training, 1 : 0.4
    for question in lessons:
        assert question.judge(question.lesson, "binary", "strict") == (1.0, "")
        assert question.lesson.endswith("\n" + question.answer) and "time passes" in question.lesson
        assert "{" not in question.lesson.removesuffix(question.answer)
        assert "Objects and their rules" in question.prompt and "examples" not in question.prompt
    held_out = split_rows(crawl_all(ENV.games, range(1)), seed=3).test
    asked = {prompt_writer("rules")(row) for row in held_out}
    assert not asked & {question.prompt for question in lessons}
    many = replace(ENV, thoughts=100_000)
    with pytest.raises(ConfigError, match=r"env\.thoughts: only \d+ rows can be drawn; lower it"):
        TextGameTasks(many, made, ByteTokenizer(), None).make(lambda: None)
    with pytest.raises(ValueError, match="thoughts: 0 or more rows of games"):
        replace(ENV, games=[], train="somewhere")


def test_rows_are_drawn_once_each_and_by_the_seed(rows: list[dict]) -> None:
    few = drawn(rows, 40, 0.4, 1)
    ids = [(row["game"], row["state_id"]) for row in few]
    assert len(set(ids)) == 40 and few == drawn(rows, 40, 0.4, 1) != drawn(rows, 40, 0.4, 2)
    assert len(drawn(rows, len(rows), None, 1)) == len(rows)
    # RL reads the rows in an order of its own: its first ones are not those that were imitated
    stream = RatioSampler([is_gold(row) for row in rows], ratio=0.4, seed=1)
    first = {(rows[i]["game"], rows[i]["state_id"]) for i in map(stream.__getitem__, range(40))}
    assert len(first & set(ids)) < 20


def test_a_question_with_rules_is_the_full_one_without_its_examples() -> None:
    row = next(iter(crawl(GAMES["weigh-stones"], range(1))))
    short, full = prompt_writer("rules")(row), prompts()(row)
    assert prompt_writer("full")(row) == full and len(short) < len(full) / 2
    state = full.rpartition("Now the game to simulate.\n")[2].rpartition("Think")[0]
    assert state in short and "The form of the answer: {'modified': [{'name'" in short
