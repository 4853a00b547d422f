"""`terrella worlds score`: a model behind an address that copies scores as copying does, and one that knows the
games as the true world.
"""

import json

import pytest
from click.testing import CliRunner

from terrella.core.errors import ConfigError
from terrella.launch.cli import cli
from terrella.launch.score import Asked, score
from terrella.rl.rewards.web_page import NOTHING
from terrella.rl.text_games.evaluate import EMPTY, oracle_answers
from terrella.rl.text_games.ranking import plan_gain
from terrella.rl.text_games.world import true_predictor
from terrella.tests.rl.exchange.scripted_model import served


@pytest.fixture(autouse=True)
def few_games_to_judge_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrella.launch.score.JUDGED", 8)


def test_an_address_that_copies(tmp_path) -> None:
    def lazy(messages: list[dict[str, str]]) -> str:
        return NOTHING if "CURRENT OBSERVATION" in messages[-1]["content"] else f"The final answer is: {EMPTY}"

    out = tmp_path / "table.json"
    with served(lazy) as url:
        args = [
            "worlds",
            "score",
            f"{url}#lazy",
            "--n",
            "20",
            "--walks",
            "4",
            "--steps",
            "4",
            "--game",
            "open-strongbox",
            "--train",
            "1",
            "--out",
            str(out),
        ]
        done = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert done.exit_code == 0 and "policy ranking, true world" in done.output
    table = json.loads(out.read_text())
    copy, lazy_row, true = table["rows"]
    assert [cell["value"] for cell in lazy_row["cells"]] == [cell["value"] for cell in copy["cells"]]
    assert [cell["value"] for cell in true["cells"]] == [1.0] * 5
    assert copy["cells"][1]["value"] == copy["cells"][3]["value"] == 0.0
    ranking = table["ranking"]
    assert ranking["true world"]["r"] == pytest.approx(1.0) and ranking["true world"]["mmrv"] == 0.0
    assert ranking["copy"]["r"] is None and ranking["copy"]["mmrv"] > 0
    assert ranking["copy"]["true"] == ranking["true world"]["imagined"]
    assert ranking["copy"]["planning"]["value"] == ranking["lazy"]["planning"]["value"] == 0.0  # all plans look alike
    assert ranking["true world"]["planning"]["value"] > 0 and "planning gain,  true world" in done.output
    assert ranking["lazy"]["training"] == ranking["copy"]["training"] and "training gain,  lazy" in done.output


def test_one_that_knows_the_games() -> None:
    def knows(questions: list) -> list:
        rows = [q.row for q in questions]
        return true_predictor(rows) if "max_UUID" in rows[0]["current_state"] else oracle_answers(rows)

    table = score([("knows", knows)], Asked(16, 4, 4, ("open-strongbox",), "bare", ("text-game",), train=2))
    cells = table["rows"][1]["cells"]
    assert [cell["value"] for cell in cells[:3]] == [1.0] * 3 and cells[3]["n"] == 0
    assert table["ranking"]["knows"]["r"] == pytest.approx(1.0)
    assert table["ranking"]["knows"]["planning"] == table["ranking"]["true world"]["planning"]
    agents = {name: found["training"] for name, found in table["ranking"].items()}
    assert agents["knows"] == agents["true world"] and agents["copy"]["gain"]["value"] == 0.0
    assert agents["copy"]["before"] == agents["knows"]["before"] and agents["knows"]["gain"]["n"] == 8


def test_the_gain_of_a_plan_is_its_true_score_above_the_mean() -> None:
    assert plan_gain([0.0, 1.0, 2.0], [0.0, 0.0, 9.0]) == 1.0
    assert plan_gain([0.0, 1.0, 2.0], [5.0, 5.0, 0.0]) == -0.5  # a model that is wrong costs
    assert plan_gain([0.0, 1.0, 2.0], [3.0, 3.0, 3.0]) == 0.0


def test_an_address_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="#NAME"):
        CliRunner().invoke(cli, ["worlds", "score", "http://localhost:9/v1"], catch_exceptions=False)
