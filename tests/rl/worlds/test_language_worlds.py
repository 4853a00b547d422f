"""Sudoku, Countdown, QA, Bandit and the tags file: rules by hand, adversarial answers, round trips."""

import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError
from terrella.rl.worlds import countdown, qa, sudoku
from terrella.rl.worlds.bandit import Bandit
from terrella.rl.worlds.tasks import load_tasks, rotation
from terrella.tests.rl.worlds.parsed import parse_countdown, parse_sudoku


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_sudoku_is_unique_with_six_blanks_and_its_text_round_trips(seed: int) -> None:
    world = sudoku.Sudoku()
    world.reset(seed)
    board = [list(line) for line in world.given]
    blanks = [(r, c) for r in range(4) for c in range(4) if not board[r][c]]
    assert len(blanks) == 6 and sudoku.count_solutions([line[:] for line in board], 5) == 1
    for number, (r, c) in enumerate(blanks):
        assert parse_sudoku(world.render("text_with_coordinates")) == tuple(map(tuple, world.board))
        result = world.step(f"{r + 1},{c + 1},{world.solution[r][c]}")
        assert result.info["action_is_effective"] and result.reward == float(number == 5) == float(result.done)
    assert world.render("text_with_coordinates").endswith("No empty positions are left.") and result.info["success"]
    assert parse_sudoku(world.render("text_with_coordinates")) == world.solution


def test_sudoku_moves() -> None:
    world = sudoku.Sudoku()
    world.reset(123)  # | 3 2 4 1 | . 4 . . | 2 . 3 . | 4 3 . 2
    invalid = ["", "one,two,three", "1,1,3", "5,1,1", "2,1,9", "2,1", "row 2 col", "2,1,99999999999"]
    for action in invalid:
        info = world.step(action).info
        assert not info["action_is_valid"] and not info["action_is_effective"], action
    assert world.step("2,1,4").info == {"action_is_effective": False, "action_is_valid": True, "success": False}
    assert world.step("place 1 at row 2 col 1").info["action_is_effective"] and world.board[1][0] == 1
    assert world.step("2 3 2").info["action_is_effective"]
    for _ in range(18):
        assert not world.step("nonsense").done
    assert world.step("nonsense").done  # the thirtieth step
    with pytest.raises(ValueError, match="size"):
        sudoku.Sudoku(size=5)
    with pytest.raises(ValueError, match="does not describe"):
        parse_sudoku("| 1 . | . 1 \nEmpty position to be filled is at (1,2).")


def test_countdown_scores() -> None:
    assert countdown.score("(2 + 6) * 3", [6, 2, 3], 24) == (1.0, "solved")
    assert countdown.score("2 + 6 + 3", [6, 2, 3], 24) == (0.1, "other value")
    assert countdown.score("8 * 3", [6, 2, 3], 24)[0] == countdown.score("2+6+3+3", [6, 2, 3], 24)[0] == 0.0
    assert countdown.score("1/3 + 1/3 + 1/3", [1, 3, 1, 3, 1, 3], 1) == (1.0, "solved")
    assert countdown.evaluate("-(4) / 8") == (Fraction(-1, 2), Counter({4: 1, 8: 1}))


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('x')",
        "9**9**9**9",
        "(lambda: 1)()",
        "1 if 1 else 2",
        "[1,2][0]",
        "'a'*9",
        "True + 1",
        "1e3",
        "1//1",
        "1/(1-1)",
    ]
    + ["(" * 190, "-" * 199 + "1", "1+" * 99 + "1", "9" * 100_000, "1 +", "\x00", "1\n+1", "((1))" * 30, "1;2"],
)
def test_countdown_refuses_everything_else_quickly(attack: str) -> None:
    start = time.process_time()
    reward, reason = countdown.score(attack, [1, 1], 3)
    assert reward == 0.0 and reason and time.process_time() - start < 0.5


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), additive=st.booleans())
def test_countdown_instances_are_solvable(seed: int, additive: bool) -> None:
    nums, target = countdown.make_instance(countdown.CountdownConfig(additive=additive), seed)
    assert len(nums) in (3, 4) and all(1 <= n <= 99 for n in nums) and 0 < target <= 1000
    if additive:
        assert countdown.score(countdown.additive_solution(nums, target) or "", nums, target) == (1.0, "solved")
    world = countdown.Countdown(additive=additive)
    assert parse_countdown(world.reset(seed)) == (nums, target)


def test_countdown_file_keeps_only_additive_rows(tmp_path) -> None:
    file = tmp_path / "countdown.jsonl"
    file.write_text('{"nums": [2, 3, 4], "target": 24}\n{"nums": [2, 3, 4], "target": 5}\n')
    world = countdown.Countdown(file=str(file))
    assert world.reset(0) == world.reset(7) == "Target: 5, nums: [2, 3, 4]"
    assert world.step("4 + 3 - 2").info["success"]


@pytest.mark.parametrize(("kind", "name"), [(countdown.Countdown, "countdown"), (qa.QA, "qa")])
def test_a_bad_file_of_rows_is_named(kind, name: str, tmp_path) -> None:
    tag, file = tmp_path / "tag.yaml", tmp_path / "rows.jsonl"
    tag.write_text(f"Mine: {{world: {name}, config: {{file: {file}}}}}\n")
    with pytest.raises(ConfigError, match=r"tag.yaml:1: Mine.config.file: .*rows.jsonl: no such file"):
        load_tasks(tag)
    row = '{"nums": [1, 2], "target": 3, "query": "1 + 2?", "response": "The answer is: 3"}\n'
    for text, problem in (
        (row + "{}\n", "rows.jsonl:2: KeyError"),
        (row + row.replace("?", r"\ud800"), "rows.jsonl:2: .*surrogates not allowed"),
        ("3\n", "rows.jsonl:1: TypeError"),
        ("", "no "),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_tasks(tag)["Mine"].make()
    file.write_text(row)
    assert kind(file=str(file)).rows is kind(file=str(file)).rows  # read once


def test_qa_halves_with_each_try(tmp_path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"query": "Half of 3?", "response": "The answer is: no. So... The answer is: 3 / 2 "}\n')
    world = qa.QA(file=str(file))
    assert world.reset(5) == "Half of 3?"
    assert world.step("2").reward == 0.0 and world.step("1.5").reward == 0.0
    result = world.step(" 3/2")
    assert result.reward == 0.25 and result.done and result.info["success"]
    answers = {qa.make_question(seed)[1] for seed in range(200)}
    assert len(answers) > 20 and all(answer.isdigit() for answer in answers)


def test_bandit_pays_by_chance_and_succeeds_by_choice() -> None:
    world = Bandit()
    paid = []
    for seed in range(2000):
        world.reset(seed, sample=seed % 5)
        result = world.step(world.parse_action("dragon"))
        assert result.info["success"] and result.done
        paid.append(result.reward)
    assert set(paid) == {0.0, 1.0} and sum(paid) / 2000 == pytest.approx(0.25, abs=0.04)
    world.reset(0)
    low = world.step(world.parse_action("PHOENIX"))
    assert low.reward == 0.1 and not low.info["success"]
    assert {world.reset(seed).split(" and ")[0] for seed in range(20)} == {"Two arms: Dragon", "Two arms: Phoenix"}


def test_tags_of_a_user(tmp_path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "Tiny:\n  world: sokoban\n  max_actions: 5\n  instruction: Push.\n  config: {height: 5, width: 5}\n"
    )
    task = load_tasks(file)["Tiny"]
    assert task.max_actions == 5 and len(task.make().reset(1)) == 29
    for text, problem in [
        ("A:\n  world: chess\n", "my.yaml:1: A.world"),
        ("A:\n  world: sokoban\n  config: {boxs: 2}\n", "boxs"),
        ("A:\n  world: frozen_lake\n  config: {size: 1}\n", "size"),
        ("A:\n  wrold: sokoban\n", "wrold"),
        ("A: 3\n", "mapping"),
        ("- A\n", "my.yaml:1: a file of tags is a mapping"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_tasks(file)
    with pytest.raises(ConfigError, match="no such file"):
        load_tasks(tmp_path / "absent.yaml")
    file.write_bytes("A: {world: bandit, instruction: h\u00e9}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"my.yaml: cannot be read as a text file"):
        load_tasks(file)


def test_tags_take_turns_by_weight() -> None:
    """Any stretch of the rotation has each tag's share of it, to one."""
    turns = rotation({"a": 1, "b": 3, "c": 0})
    assert Counter(turns) == {"a": 250, "b": 750} and rotation({"a": 5.0}) == ["a"]
    assert all(turns[at : at + 8].count("a") == 2 for at in range(0, 960, 8))
    assert Counter(rotation({"a": 0.1, "b": 0.1, "c": 0.1})) == {"a": 334, "b": 333, "c": 333}
