"""The web table: empty answer, true list, invalid answers left out."""

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.rewards.web_page import NOTHING
from terrella.rl.web_pages.changes import Changes
from terrella.rl.web_pages.evaluate import judge_pages, table

TRUTHS = [NOTHING, Changes(("[1] link 'a'",)).write(), Changes((), ("[2] link 'b'", "[3] link 'c'")).write()]


def test_table() -> None:
    answers = [NOTHING, Invalid("gone"), TRUTHS[2]]
    told = table(TRUTHS, [("m", "model", judge_pages(TRUTHS, answers, "strict"))], "strict", "Pages")
    base, mine, ceiling = ([c["value"] for c in line["cells"]] for line in told["rows"])
    assert base[2:] == pytest.approx([1 / 3, 0.0, 1 / 3]) and mine[2:] == [1.0, 1.0, 1.0] and ceiling == [1.0] * 5
    assert told["rows"][1]["cells"][2]["n"] == 2 and "2 of them change" in told["note"]


def test_faithful_pays_the_empty_answer() -> None:
    told = table(TRUTHS, [], "faithful", "Pages")
    assert told["rows"][0]["cells"][3]["value"] > 0.5 and "None as an item" in told["note"]
