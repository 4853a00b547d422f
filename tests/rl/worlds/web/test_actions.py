"""The action grammars: everything the prompt lists, what the release drops, and text that is no action; nothing is
evaluated.
"""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terrella.rl.worlds.web.actions import WebAction, parse_brackets, parse_call

CALLS = {
    'do(action="Click", element="7")': WebAction("click", 7),
    'do(action="Hover", element="0")': WebAction("hover", 0),
    'do(action="Right Click", element="3")': WebAction("right_click", 3),
    'do(action="Type", argument="a (b) \\"c\\"", element="2")': WebAction("type", 2, 'a (b) "c"'),
    'do(action="Search", argument="red kettle", element="12")': WebAction("search", 12, "red kettle"),
    'do(action="Select Dropdown Option", argument="Price", element="4")': WebAction("select", 4, "Price"),
    'do(action="Scroll Up")': WebAction("scroll_up"),
    'do(action="Scroll Down")': WebAction("scroll_down"),
    'do(action="Press Enter")': WebAction("press", text="Enter"),
    'do(action="Go Backward")': WebAction("back"),
    'do(action="Go Forward")': WebAction("forward"),
    'do(action="Switch Tab", argument="1")': WebAction("switch_tab", text="1"),
    'do(action="Switch Tab", element="1")': WebAction("switch_tab", text="1"),
    'do(action="Wait")': WebAction("wait"),
    "go_backward()": WebAction("back"),
    "go_forward()": WebAction("forward"),
    'exit(message="12 Dock Street")': WebAction("exit", text="12 Dock Street"),
    "exit()": WebAction("exit"),
    'do(action="Click", element=5)': WebAction("click", 5),
}


@pytest.mark.parametrize("text", CALLS)
def test_every_call_of_the_grammar(text: str) -> None:
    assert parse_call(text) == CALLS[text]
    assert parse_call(f"I will do it.\n{text} and so on") == CALLS[text]


def test_comments_stay_and_the_last_call_counts() -> None:
    found = parse_call(
        '# Element: the search field\n# Note: price is 3\ndo(action="Click", '
        'element="1")\ndo(action="Click", element="2")'
    )
    assert found.element == 2 and found.comments == ("# Element: the search field", "# Note: price is 3")
    assert parse_call('do(action="Click", element="1")\nexit(message="x")').kind == "exit"


@pytest.mark.parametrize(
    "text",
    [
        "", "click 3", 'do(action="Fly", element="1")', 'do("Click", "1")', 'do(action="Click")', 'do(action="Click", element="x")',  # noqa: E501
        ('do(action="Type", element="1", '
'argument=open("f"))'), 'do(action="Click", element="1", **{})', 'do(action="Click", element="1"',
        'do(action="Click", element="999999999999")', '__import__("os").system("true")', 'exit(message=__import__("os"))',  # noqa: E501
        f'do(action="Type", element="1", argument=0x{"f" * 4000})',
        'do(action="Switch Tab", argument="last")', 'do(action="Click", element="1"' + "(" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_action_says_why(text: str) -> None:
    found = parse_call(text)
    assert found.kind == "none" and found.error


def test_escaped_halves_of_a_character_become_text_that_can_be_sent() -> None:
    said = parse_call(r'do(action="Search", argument="a \ud83d\ude00 b \ud83d", element="1")').text
    assert said == "a \N{GRINNING FACE} b \N{REPLACEMENT CHARACTER}" and said.encode()


BRACKETS = {
    "click [12]": WebAction("click", 12),
    "hover [3]": WebAction("hover", 3),
    "type [5] [blue [large] kite] [0]": WebAction("type", 5, "blue [large] kite"),
    "type [5] [kite] [1]": WebAction("search", 5, "kite"),
    "type [5] [kite]": WebAction("search", 5, "kite"),
    "press [Control+a]": WebAction("press", text="Control+a"),
    "scroll [down]": WebAction("scroll_down"),
    "scroll [direction=up]": WebAction("scroll_up"),
    "new_tab": WebAction("new_tab"),
    "tab_focus [2]": WebAction("switch_tab", text="2"),
    "close_tab": WebAction("close_tab"),
    "goto [http://map.test/]": WebAction("goto", text="http://map.test/"),
    "go_back": WebAction("back"),
    "go_forward": WebAction("forward"),
    "stop [N/A]": WebAction("exit", text="N/A"),
    "stop": WebAction("exit"),
}


@pytest.mark.parametrize("text", BRACKETS)
def test_bracket_grammar(text: str) -> None:
    assert parse_brackets(text) == BRACKETS[text]
    assert parse_brackets(f"Let me think. In summary, the next action is ```{text}```") == BRACKETS[text]


@given(st.text(max_size=200))
@example("\x1e#")  # a separator that only some count as the end of a line
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_and_any_argument_comes_back(text: str) -> None:
    assert parse_call(text).kind and parse_brackets(text).kind
    for action in (WebAction("type", 3, text), WebAction("exit", text=text)):
        clean = text.replace("\0", "")
        assert parse_call(WebAction(action.kind, action.element, clean).call) == WebAction(
            action.kind, action.element, clean
        )


def test_long_and_nested_text_takes_a_bounded_time() -> None:
    began = time.process_time()
    for text in (
        "do(" * 100_000,
        'do(action="' + "a" * 2_000_000,
        "exit(message=" + "[" * 50_000,
        "```" * 100_000,
        "type [1] [" + "[" * 100_000,
    ):
        assert parse_call(text).kind == "none" and parse_brackets(text).kind == "none"
    assert time.process_time() - began < 5
