"""Sources of converters as people have them: folders in any order, odd records, damaged files, another source than
before.
"""

import json
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from terrella.core.errors import ConfigError
from terrella.data.convert import convert
from terrella.data.convert.text_game import row_problem
from terrella.data.shards import ShardSet


class Killed(Exception):
    pass


def killed_after(records):
    calls = 0

    def tell(done, report):
        nonlocal calls
        calls += 1
        if calls == records:
            raise Killed

    return tell


def write_chats(path, word, count=6):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{word} {i}", "completion": "z" * 400} for i in range(count)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(folder):
    return [sample["messages.json"][0]["content"] for sample in map(ShardSet(folder).__getitem__, range(12))]


@pytest.mark.parametrize(("converter", "ending"), [("chat", "jsonl"), ("hf", "parquet")])
@pytest.mark.parametrize("stop", [5, 11])
def test_a_resumed_conversion_passes_over_no_folder(tmp_path, converter, ending, stop):
    """As paths a/x comes before a-1/x, as the text that a cursor holds after it."""
    for folder in ("a", "a-1"):
        write_chats(tmp_path / "source" / folder / f"x.{ending}", folder)
    convert(converter, tmp_path / "source", tmp_path / "whole", max_bytes=6000)
    with pytest.raises(Killed):
        convert(converter, tmp_path / "source", tmp_path / "torn", max_bytes=6000, tell=killed_after(stop))
    convert(converter, tmp_path / "source", tmp_path / "torn", max_bytes=6000, resume=True)
    assert len(ShardSet(tmp_path / "torn")) == 12
    assert prompts(tmp_path / "torn") == prompts(tmp_path / "whole")


def test_a_resumed_crawl_passes_over_no_game(tmp_path):
    """As files a-b.py comes before a.py, as games a before a-b."""
    (tmp_path / "data" / "games").mkdir(parents=True)
    for name in ("a", "a-b"):
        (tmp_path / "data" / "games" / f"{name}.py").write_text("")
    (tmp_path / "data" / "rules_human_written").mkdir()
    for name in ("object", "action", "score"):
        (tmp_path / "data" / "rules_human_written" / f"{name}_rules.json").write_text('{"dishwasher": "rules"}')
    state = {"objects": [], "taskDesc": "t", "lastAction": "a", "max_UUID": 0}
    example = {"current_state": state, "tick_state": state, "current_score_state": {}, "next_score_state": {}}
    examples = tmp_path / "data" / "examples.json"
    examples.write_text(json.dumps({"full": {"action": example, "tick": example}}))
    material = {"rules": tmp_path / "data" / "rules_human_written", "examples": examples}
    order = []
    convert(
        "text-game-crawl", tmp_path, None, **material, tell=lambda done, report: order.append(dict(report.examples))
    )
    assert order[-1] == {"no playthrough": ["a", "a-b"]}


def test_another_source_or_option_is_not_mixed_in(tmp_path):
    for name in ("one", "two"):
        write_chats(tmp_path / f"{name}.jsonl", name, 12)
    with pytest.raises(Killed):
        convert("chat", tmp_path / "one.jsonl", tmp_path / "out", max_bytes=6000, tell=killed_after(9))
    with pytest.raises(ConfigError, match=r"out: was started with source 'one\.jsonl', not 'two\.jsonl'"):
        convert("chat", tmp_path / "two.jsonl", tmp_path / "out", max_bytes=6000, resume=True)
    with pytest.raises(ConfigError, match="was started with converter 'chat', not 'webdataset'"):
        convert("webdataset", tmp_path / "one.jsonl", tmp_path / "out", resume=True, kind="text_trajectory/1")
    report = convert("chat", tmp_path / "one.jsonl", tmp_path / "out", max_bytes=6000, resume=True)
    assert report.written == 12

    (tmp_path / "clips").mkdir()
    for i in range(6):
        image = np.random.default_rng(i).integers(0, 256, (4, 20, 20, 3), np.uint8)
        np.savez(tmp_path / "clips" / f"{i}.npz", image=image, action=np.zeros((4, 2), np.float32))
    with pytest.raises(Killed):
        train = {"split": "train", "max_bytes": 20_000}
        convert("npz", tmp_path / "clips", tmp_path / "train", **train, tell=killed_after(5))
    with pytest.raises(ConfigError, match=r"started with options \{'split': 'train'\}, not \{'split': 'test'\}"):
        convert("npz", tmp_path / "clips", tmp_path / "train", split="test", resume=True)


def test_an_odd_record_costs_only_itself(tmp_path):
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    odd = [7, "text", {"messages": ["a role"]}, {"messages": [3]}, {"messages": [{"role": "user"}, None]}]
    lines = [json.dumps(record) for record in [*odd, good]]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines, "1" * 5000, "[" * 100_000]) + "\n")
    report = convert("chat", tmp_path / "chat.jsonl", None)
    assert (report.read, report.written) == (8, 1) and report.dropped["not a record"] == 2

    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    odd = [7, {"conversations": ["x"]}, {"conversations": [{"from": ["human"], "value": "q"}]}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([*odd, shared]))
    report = convert("sharegpt", tmp_path / "sharegpt.json", None)
    assert (report.read, report.written) == (4, 1)

    for name, row in {
        "reward": {"prompt": [{"role": "user", "content": "q"}], "reward_model": "x"},
        "prompt": {"prompt": ["q"], "reward_model": {"ground_truth": "x"}},
    }.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        report = convert("rlvr-parquet", tmp_path / f"{name}.parquet", None)
        assert report.written == 0 and sum(report.dropped.values()) == 1

    for folder, text in {"traces": "5\n", "actions": '{"score": 1}'}.items():
        (tmp_path / "webrl" / folder).mkdir(parents=True)
        (tmp_path / "webrl" / folder / f"1.{'jsonl' if folder == 'traces' else 'json'}").write_text(text)
    assert convert("webrl", tmp_path / "webrl", None).dropped == {"not readable: TypeError": 1}


def test_what_is_wrong_with_a_transition_is_named():
    thing = {"uuid": 1, "properties": {}, "contains": []}
    state = {"objects": [thing], "taskDesc": "t", "lastAction": "a", "max_UUID": 2}
    names = ("current_state", "action_state", "tick_state")
    row = {"game": "g", "state_id": 0, **dict.fromkeys(names, state), "current_score_state": {}, "next_score_state": {}}
    assert row_problem(row) is None
    bare = {name: value for name, value in state.items() if name != "max_UUID"}
    for changed, words in {
        "state_id": ("7", "state_id: expected integer, found str"),
        "current_state": (bare, "current_state: 'max_UUID' is missing"),
        "tick_state": ({**state, "objects": [{"uuid": 1}]}, "tick_state.objects[0]: 'properties' is missing"),
        "game": (None, "game: expected string, found NoneType"),
    }.items():
        assert row_problem({**row, changed: words[0]}) == words[1]
    assert row_problem({**row, "tick_state": {**state, "objects": []}}) == "tick_state has no objects, or a uuid twice"


def test_a_damaged_source_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "whole.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", json.dumps({"prompt": "q", "completion": "a"}) * 50)
    raw = bytearray((tmp_path / "whole.zip").read_bytes())
    (tmp_path / "cut.zip").write_bytes(raw[: len(raw) // 2])
    raw[40] ^= 255
    (tmp_path / "changed.zip").write_bytes(raw)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing of the kind")
    (tmp_path / "bad.arrow").write_bytes(b"nothing of the kind")
    (tmp_path / "latin.json").write_bytes(b'[{"a": "\xff"}]')
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "0.json").write_text("{bad")
    for converter, name, words in (
        ("chat", "cut.zip", r"cut\.zip: not a whole zip file"),
        ("chat", "changed.zip", r"changed\.zip: not a whole zip file"),
        ("hf", "bad.parquet", r"bad\.parquet: not a whole parquet file"),
        ("hf", "bad.arrow", r"bad\.arrow: not a whole arrow file"),
        ("sharegpt", "latin.json", r"latin\.json: not JSON"),
        ("web-tasks", "tasks", r"tasks/0\.json: not JSON"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(converter, tmp_path / name, None)


def test_a_damaged_clip_costs_only_itself(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "a.npz", image=image, action=np.zeros((3, 2), np.float32))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(raw[: len(raw) // 2])
    raw[300] ^= 255
    (tmp_path / "changed.npz").write_bytes(raw)
    report = convert("npz", tmp_path, None)
    assert report.written == 1 and report.dropped == {"not a usable episode": 2}
