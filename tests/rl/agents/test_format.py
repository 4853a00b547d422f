"""Prompts from the instantiated world, parsing of what models write, the format penalty, grounding of states."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.agents.format import FORMATS, Turn, ground, has_states, messages, parse, play, prefix
from terrella.rl.worlds.sokoban import Sokoban
from terrella.rl.worlds.tasks import load_tasks
from terrella.tests.rl.worlds.parsed import parse_lake, parse_sokoban, parse_sudoku

TASKS = load_tasks()


def test_the_prefix_speaks_of_the_configured_world() -> None:
    grid = TASKS["SokobanDifferentGridVocab"]
    text = prefix(grid, grid.make(), "think")
    assert (
        "W: wall, .: empty, G: target, C: box on target, B: box, A: player, @: player on target" in text
        and "√" not in text
    )
    words = TASKS["SokobanDifferentActionVocab"]
    assert "\nLeft, Right, Up, Down\n" in prefix(words, words.make(), "think")
    state = TASKS["SimpleSokoban"]
    assert "Sample response" in prefix(state, state.make(), "state") and "Sample response" not in prefix(
        state, state.make(), "think"
    )
    assert "available actions" not in prefix(TASKS["Sudoku"], TASKS["Sudoku"].make(), "think")


@pytest.mark.parametrize("tag", ["SimpleSokoban", "FrozenLake", "FrozenLake6x6", "Sudoku"])
def test_the_sample_response_parses_and_follows_the_rules_of_its_world(tag: str) -> None:
    sample = TASKS[tag].state_instruction.split("Sample response:\n")[1]
    parsed = parse(sample, "state", 5)
    assert parsed.ok and parsed.actions
    if tag == "SimpleSokoban":
        from terrella.rl.worlds import sokoban

        state = parse_sokoban(parsed.observation)
        for word in parsed.actions:
            state = sokoban.next_text(state, Sokoban().parse_action(word))
        assert parse_sokoban(parsed.prediction) == state
    elif tag.startswith("FrozenLake"):
        assert parse_lake(parsed.observation)[0] == "P" and parse_lake(parsed.prediction)[2] == "P"
    else:
        from terrella.rl.worlds import sudoku

        board = [list(line) for line in parse_sudoku(parsed.observation)]
        for move in map(sudoku.parse_move, parsed.actions):
            board[move[0]][move[1]] = move[2]
        assert tuple(map(tuple, board)) == parse_sudoku(parsed.prediction)
        assert sudoku.count_solutions(board) == 1


def test_roles_alternate_and_the_window_keeps_numbers() -> None:
    task = TASKS["SimpleSokoban"]
    world = task.make()
    start = world.reset(123)
    history = [
        Turn(start, 10, "<think> a </think> <answer> Up </answer>", -0.1),
        Turn(start, 9, "<answer>", -0.2),
        Turn(start, 8),
    ]
    chat = messages(task, world, history, "think")
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "Turn 1:" in chat[1]["content"] and chat[3]["content"].startswith("Reward:\n-0.1\n\nTurn 2:\nState:\n######")
    assert "You have 8 actions left." in chat[-1]["content"] and FORMATS["think"] in chat[-1]["content"]
    windowed = messages(task, world, history, "think", window=1)
    assert len(windowed) == 2 and "Turn 3:" in windowed[1]["content"] and "Turn 1:" not in windowed[1]["content"]


@pytest.mark.parametrize(
    ("text", "fmt", "ok", "actions"),
    [
        ("<think> go </think> <answer> Up || Down </answer>", "think", True, ("Up", "Down")),
        ("<think></think><think> go </think><answer>Up||</answer> tail", "think", True, ("Up",)),
        ("<think> go <answer> Up </answer>", "think", False, ()),
        ("<answer>Up</answer>", "think", False, ()),
        ("<answer>Up || Left<|im_end|></answer>", "answer", True, ("Up", "Left")),
        (
            "<think> <observation>s</observation> t <prediction>n</prediction> </think> <answer>Up</answer>",
            "state",
            True,
            ("Up",),
        ),
        (
            "<think> <prediction>n</prediction> <observation>s</observation> </think> <answer>Up</answer>",
            "state",
            False,
            ("Up",),
        ),
        ("<think> no tags </think> <answer>Up</answer>", "state", False, ("Up",)),
        ("<answer>Up || Down</answer>", "state", False, ("Up", "Down")),
        ("<think> a </think> <answer> || </answer>", "think", True, ()),
        ("", "think", False, ()),
    ],
)
def test_parse(text: str, fmt: str, ok: bool, actions: tuple[str, ...]) -> None:
    parsed = parse(text, fmt, 5)
    assert (parsed.ok, parsed.actions) == (ok, actions)
    if parsed.ok and actions:
        again = parse(parsed.response, fmt, 5)
        assert again.response == parsed.response and again.actions == actions


def test_only_the_first_actions_count() -> None:
    assert parse("<think>x</think><answer>a||b||c</answer>", "think", 2).actions == ("a", "b")


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<answer>", "</answer>", "<observation>", "</prediction>", " ", "||", "Up", "\n"]
        )
    )
)
def test_parse_takes_anything(parts: list[str]) -> None:
    for fmt in ("answer", "think", "state"):
        parsed = parse("".join(parts), fmt, 5)
        assert (
            isinstance(parsed.actions, tuple) and len(parsed.actions) <= 5 and not any("<" in a for a in parsed.actions)
        )


def test_hostile_text_is_linear() -> None:
    start = time.process_time()
    for bait in ("<think>", "</think> ", "<answer>", "</think>" + " " * 50, "<observation><prediction>"):
        parse(bait * 20_000, "state", 5)
        ground("<think>" + bait * 5_000, "s", "n")
    assert time.process_time() - start < 5


def test_play_drops_unknown_words_once_and_stops_at_the_budget() -> None:
    world = Sokoban()
    world.reset(123)  # solved by Down, Left, Up
    wrong = play(world, ("jump", "Down", "fly"), 10)
    assert wrong.penalty == -0.1 and wrong.executed == ("Down",) and wrong.reward == pytest.approx(-0.1)
    assert play(world, (), 9).penalty == -0.1
    cut = play(world, ("Left", "Up", "Up"), 1)
    assert cut.executed == ("Left",) and cut.truncated and cut.done and not cut.info["success"]
    won = play(world, ("up", "Down"), 8)
    assert (
        won.done
        and not won.truncated
        and won.executed == ("up",)
        and won.info["success"]
        and won.reward == pytest.approx(10.9)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), junk=st.text("ab<>/\\1 ", max_size=20))
def test_grounded_spans_equal_the_states_of_the_world(seed: int, junk: str) -> None:
    world = Sokoban()
    world.reset(seed)
    before = world.render("text_with_coordinates")
    play(world, ("Up", "Left"), 10)
    after = world.render("text_with_coordinates")
    response = (
        f"<think> <observation>{junk}</observation> because <prediction>\\1 {junk}</prediction> </think> <answer> Up "
        "|| Left </answer>"
    )
    parsed = parse(ground(response, before, after), "state", 5)
    assert (
        parsed.ok and parsed.observation == before and parsed.prediction == after and parsed.actions == ("Up", "Left")
    )
    assert ground("<think> none </think>", before, after) == "<think> none </think>"


def test_tag_filter() -> None:
    good = "<THINK> <Observation>s</Observation> t <prediction>n</prediction> </think> <answer>Up</answer>"
    assert has_states(good) and not has_states(good.replace("prediction", "guess"))
