"""What a run on data of one's own would only miss in its middle, or at its end, is refused before its first stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core.errors import ConfigError
from terrella.launch import recipe
from terrella.launch.commands.check import check as command
from terrella.launch.commands.check_recipe import alone
from terrella.launch.worker import check_stages

TUNE = """name: tune
model: {layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 48, vocab: 259, max_positions: 64}
ranks: 1
precision: {params: fp32}
env: {kind: data, train: rows.jsonl, reward: "my.py:score"}
stages:
  - {kind: start, name: start}
  - {kind: sft, name: sft, init: start, sequences_per_step: 8, steps: 4, optimizer: {lr: 1.0e-3}}
  - {kind: eval, name: evaluate, models: [start, sft], before: start, after: sft, max_new_tokens: 4, n: 4}
"""
MY = """from terrella import Environment

def score(prompt, answer, info):
    return 1.0

def two(prompt, answer):
    return 1.0

class Echo(Environment):
    def tasks(self, split):
        return ["a"]
    def play(self, task):
        yield task
        return 1.0
"""
REINFORCED = """- kind: rl
    name: sft
    init: start
    algorithm: {kind: grpo}
    prompts_per_step: 4
    samples_per_prompt: 4
    steps: 2
    max_new_tokens: 4
    optimizer: {lr: 1.0e-3}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(MY)
    (tmp_path / "tune.yaml").write_text(TUNE)
    write_rows(tmp_path)
    return tmp_path


def write_rows(place: Path, count: int = 10, **spoilt: dict[str, str]) -> None:
    """Rows of sums; `row5={...}` changes the columns of the fifth."""
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} | spoilt.get(f"row{n + 1}", {}) for n in range(count)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(place: Path, *settings: str) -> None:
    config = recipe.load(str(place / "tune.yaml"), settings)
    check_stages(list(config.stages), alone(config, place / "run"))


def test_rows_and_reward_that_are_right_pass(place: Path) -> None:
    check(place)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scroe", r"my\.py has no 'scroe'; did you mean 'score'"),
        ("Echo", r"my\.py:Echo is an Environment, and a reward function is needed here"),
        ("two", r"my\.py:two\(prompt, answer\): a reward takes \(prompt, answer, info\)"),
    ],
)
def test_a_reward_is_loaded_before_the_first_stage(place: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.reward: .*{said}"):
        check(place, f"env.reward={place / 'my.py'}:{name}")


def test_a_reward_that_cannot_be_imported_is_named_before_the_first_stage(place: Path) -> None:
    (place / "my.py").write_text("import nowhere_at_all\n" + MY)
    with pytest.raises(ConfigError, match=r"^env\.reward: .*my\.py.*nowhere_at_all"):
        check(place)


@pytest.mark.parametrize(
    ("row", "spoilt", "said"),
    [
        ("row5", {"answer": ""}, r"^stages: sft: .*rows\.jsonl:5: has no answer to imitate"),
        ("row8", {"prompt": "x" * 90}, r"^stages: sft: .*rows\.jsonl:8: prompt and answer have 93 tokens"),
        ("row10", {"prompt": "x" * 61}, r"rows\.jsonl:10: .* 61 tokens, .* stages\.evaluate\.max_new_tokens = 4"),
    ],
)
def test_rows_that_cannot_be_used_are_named_before_the_first_stage(place: Path, row: str, spoilt, said: str) -> None:
    write_rows(place, **{row: spoilt})
    with pytest.raises(ConfigError, match=said):
        check(place)


def test_rows_that_rl_has_no_room_for_are_named_before_the_first_stage(place: Path) -> None:
    tuned = next(line for line in TUNE.splitlines(keepends=True) if "kind: sft" in line).lstrip()
    (place / "tune.yaml").write_text(TUNE.replace(tuned, REINFORCED))
    write_rows(place, row5={"answer": ""}, row8={"prompt": "x" * 61}, row10={"prompt": "x" * 60})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:8: .* 61 tokens, .* stages\.sft\.max_new_tokens = 4 exceed"):
        check(place)


@pytest.mark.parametrize("env", ["{kind: data, train: rows.jsonl, reward: 'my.py:score'}", "{kind: 'my.py:Echo'}"])
def test_a_rehearsal_is_refused_for_lengths_that_it_would_not_meet(place: Path, env: str) -> None:
    """It has shorter answers: 40 tokens and 16 would fit into 64 positions."""
    write_rows(place, row10={"prompt": "x" * 40})
    (place / "my.py").write_text(MY.replace('["a"]', '["x" * 40]'))
    scored = "  - {kind: eval, name: evaluate, models: [start], max_new_tokens: 32}\n"
    text = TUNE[: TUNE.index("  - {kind: sft")] + scored
    (place / "tune.yaml").write_text(text.replace('{kind: data, train: rows.jsonl, reward: "my.py:score"}', env))
    for option in ([], ["--rehearse"]):
        done = CliRunner().invoke(command, [str(place / "tune.yaml"), *option])
        said = done.output + str(done.exception)
        assert "40 tokens" in said and "max_new_tokens = 32" in said and "rehearsing" not in said, said


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_rows_to_hold_one_out_are_counted(place: Path, count: int) -> None:
    write_rows(place, count)
    with pytest.raises(ConfigError) as caught:
        check(place)
    said = str(caught.value)
    assert said.startswith("env: has no test task for stage 'evaluate': "), said
    rows = f"rows.jsonl has {count} row{'s' if count > 1 else ''}, "
    assert all(words in said for words in (rows, "env.hold_out_every = 10", "--test FILE (env.test)")), said


def test_rows_to_evaluate_on_alone_are_not_trained_on(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"no train task for stage 'sft': name .* --data FILE \(env\.train\)"):
        check(place, "env.train=null", f"env.test={place / 'rows.jsonl'}")
