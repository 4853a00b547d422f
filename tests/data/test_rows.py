"""A user's own rows: every format gives the same rows, and what is wrong is named by file and line."""

import copy
import gzip
import json
import subprocess
import sys

import pytest

from terrella.core.errors import ConfigError
from terrella.data.rows import demonstration, info_of, read_rows, render_prompt, template_text
from terrella.data.schema import PAIR, TEXT
from terrella.data.shards import ShardWriter

ROWS = [{"question": f"{n}+1? é\u2028", "answer": n + 1, "tags": ["sum"], "note": None if n else "a"} for n in range(5)]
CHAT = [
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"))
]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def datasets_folder(folder, table):
    """What `datasets` writes with save_to_disk: arrow streams, and state.json with their names."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (folder / "cache-0123.arrow").write_bytes((folder / names[0]).read_bytes())  # left by .map()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_every_format_gives_the_same_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\n\n", 1))  # a BOM, an empty line
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_bytes(lines(ROWS))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    datasets_folder(tmp_path / "saved", table)
    (tmp_path / "many").mkdir()
    pq.write_table(table.slice(0, 2), tmp_path / "many" / "train-0.parquet")
    (tmp_path / "many" / "train-1.jsonl").write_bytes(lines(ROWS[2:]))
    for name in ("a.jsonl", "a.jsonl.gz", "list.json", "lines.json", "a.parquet", "saved", "many"):
        rows = read_rows(tmp_path / name)
        assert len(rows) == 5 and list(rows) == ROWS, name
        assert rows[-1] == ROWS[-1] and rows[1:3] == ROWS[1:3]
        assert list(copy.deepcopy(rows)) == ROWS
        with pytest.raises(IndexError):
            rows[5]
    assert read_rows(tmp_path / "a.jsonl").where(1) == f"{tmp_path / 'a.jsonl'}:3"
    assert read_rows(tmp_path / "many").where(2) == f"{tmp_path / 'many' / 'train-1.jsonl'}:1"


def test_shards_are_rows_too(tmp_path):
    with ShardWriter(tmp_path / "text", kind=TEXT) as writer:
        writer.write({"messages.json": CHAT, "meta.json": {"schema": TEXT, "task": "sum"}})
    with ShardWriter(tmp_path / "pair", kind=PAIR) as writer:
        writer.write({"prompt.json": CHAT[:2], "target.json": {"x": 1}, "extra.json": {"schema": PAIR, "index": 3}})
    assert list(read_rows(tmp_path / "text")) == [{"task": "sum", "messages": CHAT}]
    (row,) = read_rows(tmp_path / "pair")
    assert row == {"index": 3, "prompt": CHAT[:2], "answer": '{"x": 1}'}
    assert render_prompt(row, None, "w") == CHAT[:2] and demonstration(row, None) == '{"x": 1}'
    with ShardWriter(tmp_path / "other", kind=None) as writer:
        writer.write({"n.json": 1})
    with pytest.raises(ConfigError, match="samples of another program"):
        read_rows(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"a\.jsonl:3: not JSON: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: a list, not an object"),
        ("a.jsonl", b'{"a": NaN}\n', r"a\.jsonl:1: not JSON: NaN is not JSON"),
        ("a.jsonl", b'{"a": "\xff"}\n', r"a\.jsonl:1: not JSON: .*utf-8"),
        (
            "a.jsonl",
            b'{"a": null}\n{"a": 1}\n{"a": 2.5}\n{"a": "3"}\n',
            r"a\.jsonl:4: column 'a' is text here and a number in .*:2",
        ),
        ("a.jsonl", b"\n \n", r"a\.jsonl: holds no rows"),
        ("a.jsonl", b"", r"a\.jsonl: holds no rows"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], r"a\.jsonl\.gz: not a whole \.gz file"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', r"a\.json:2: not JSON"),
        ("a.json", b'[{"a": 1}, 7]', r"a\.json: item 2: a number, not an object"),
        ("a.json", b"[]", r"a\.json: holds no rows"),
        ("a.parquet", b"PAR1 nothing of the kind", r"a\.parquet: not a whole parquet file"),
        ("a.arrow", b"nothing of the kind", r"a\.arrow: not a whole arrow file"),
        ("a.csv", b"a,b\n", r"a\.csv: rows are read from \.jsonl"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, name, content, words):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name)


def test_what_is_wrong_with_a_folder_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        read_rows(tmp_path / "nowhere")
    folder = tmp_path / "empty"
    (folder / "train").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no \.jsonl.* file here; it has the folders train: name one"):
        read_rows(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"holds the splits train, test; name one, as .*train"):
        read_rows(folder)
    datasets_folder(tmp_path / "saved", pa.Table.from_pylist(ROWS))
    state = (tmp_path / "saved" / "state.json").read_text()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"file": "a.arrow"}]}')
    with pytest.raises(ConfigError, match=r"state\.json: '_data_files' must list names"):
        read_rows(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text(state)
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00001-of-00002\.arrow: state\.json lists it"):
        read_rows(tmp_path / "saved")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("train-0.jsonl", "test-0.jsonl"):
        (mixed / name).write_bytes(lines(ROWS))
    with pytest.raises(ConfigError, match="holds files of test and train, which must not be mixed"):
        read_rows(mixed)
    (mixed / "test-0.jsonl").rename(mixed / "train-1.jsonl")
    (mixed / "train-1.jsonl").write_bytes(lines([{"answer": "two"}]))
    with pytest.raises(
        ConfigError, match=r"train-1\.jsonl:1: column 'answer' is text here and a number in .*-0\.jsonl:1"
    ):
        read_rows(mixed)


def test_a_state_file_of_anybodys_lists_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "state.json").write_text("[1, 2]")
    assert len(read_rows(tmp_path)) == len(ROWS)


@pytest.mark.parametrize(
    ("names", "mixed"),
    [
        (("gsm8k_train.jsonl", "gsm8k_test.jsonl"), "test and train"),
        (("math.Val-0.jsonl", "math.train-0.jsonl"), "train and val"),
        (("train.jsonl", "my-dev2.jsonl"), "dev and train"),
        (("latest-0.jsonl", "contest-1.jsonl", "train-0.jsonl"), None),
        (("gsm8k_train_0.jsonl", "gsm8k_train_1.jsonl", "devices_test.jsonl"), "test and train"),
        (("gsm8k_testing.jsonl", "pretrain-0.jsonl", "gsm8k_train.jsonl"), None),
    ],
)
def test_a_split_is_found_anywhere_in_a_files_name(tmp_path, names, mixed):
    for name in names:
        (tmp_path / name).write_bytes(lines(ROWS))
    if mixed is None:
        assert len(read_rows(tmp_path)) == len(names) * len(ROWS)
        return
    with pytest.raises(ConfigError, match=f"holds files of {mixed}, which must not be mixed; name one file"):
        read_rows(tmp_path)


def test_an_unreadable_column_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"good": [1, 2], "far": pa.array([0, 2**52], pa.timestamp("ms"))})
    pq.write_table(table, tmp_path / "far.parquet")
    rows = read_rows(tmp_path / "far.parquet")
    assert rows[0]["good"] == 1
    with pytest.raises(ConfigError, match=r"far\.parquet: row 2: column 'far' cannot be read"):
        rows[1]
    values = {"good": list(range(999)), "bad": [f"{n}" * 9 for n in range(999)]}
    pq.write_table(pa.table(values), tmp_path / "torn.parquet", use_dictionary=False, compression="zstd")
    start = pq.ParquetFile(tmp_path / "torn.parquet").metadata.row_group(0).column(1).data_page_offset
    torn = bytearray((tmp_path / "torn.parquet").read_bytes())
    torn[start + 40 : start + 90] = bytes(50)
    (tmp_path / "torn.parquet").write_bytes(torn)
    with pytest.raises(ConfigError, match=r"torn\.parquet: column 'bad' cannot be read"):
        read_rows(tmp_path / "torn.parquet")


def test_without_pyarrow_the_line_to_install_it_is_shown(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    code = "import sys; sys.modules['pyarrow'] = None; from terrella.data.rows import read_rows; read_rows('a.parquet')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "a.parquet: the package pyarrow is not installed; pip install 'terrella[data]'" in done.stderr


def test_prompts_demonstrations_and_info():
    chat = {"messages": CHAT, "level": 2}
    assert render_prompt(chat, None, "w") == CHAT[:-1] and demonstration(chat, None) == "4"
    assert info_of(chat) == {"level": 2, "answer": "4"}
    open_chat = {"messages": CHAT[:2]}
    assert render_prompt(open_chat, None, "w") == CHAT[:2]
    assert demonstration(open_chat, None) is None and info_of(open_chat) == {}
    plain = {"prompt": "2+2?", "answer": 4, "response": "four"}
    assert render_prompt(plain, None, "w") == "2+2?"
    assert demonstration(plain, None) == "4" and demonstration(plain, "response") == "four"
    assert info_of(plain) == {"answer": 4, "response": "four"}  # as the file has it, not as text
    assert info_of(plain, None, "response") == {"answer": "four", "response": "four"}
    assert info_of({"prompt": "2+2?", "target": 4}) == {"target": 4, "answer": 4}
    row = {"question": "2+2?", "choices": ["3", "4"]}
    template = "{{ question }}{% for c in choices %}\n{{ loop.index }}) {{ c }}{% endfor %}"
    assert render_prompt(row, template, "w") == "2+2?\n1) 3\n2) 4"
    assert info_of(row, template) == row and demonstration(row, None) is None
    some = "{{ q }}{% if hint %} {{ hint }}{% endif %}{{ more or '' }}"
    assert render_prompt({"q": "2+2?", "hint": None, "more": None}, some, "w") == "2+2?"


def test_a_template_may_be_a_file(tmp_path):
    (tmp_path / "ask.jinja").write_text("Q: {{ question }}\nA:\n")
    assert render_prompt(ROWS[0], str(tmp_path / "ask.jinja"), "w") == "Q: 0+1? é\u2028\nA:"
    assert template_text(str(tmp_path / "ask.jinja")).startswith("Q:")
    with pytest.raises(ConfigError, match=r"template: .*none\.jinja: No such file"):
        template_text(str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"question": "?"}, None, r"f:1: has no column 'prompt' or 'messages' \(columns: question\); set template"),
        ({"prompt": " "}, None, "column 'prompt' must be text"),
        ({"prompt": 7}, None, "column 'prompt' must be text"),
        ({"messages": []}, None, "column 'messages' must be a list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, None, "message 1: needs a role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, "message 1: its content must be text"),
        ({"messages": CHAT[2:]}, None, "nothing before the assistant's answer"),
        ({"a": 1}, "{{ b }}", r"f:1: template: 'b' is undefined \(columns: a\)"),
        ({"a": None, "b": 1}, "{{ b }}{{ a }}=", r"f:1: template: writes an empty cell \(empty here: a\)"),
        ({"a": float("nan")}, "{{ a }}=", r"f:1: template: writes an empty cell \(empty here: a\)"),
        ({"a": {"b": None}}, "{{ a.b }}=", r"writes an empty cell \(empty here: a part of a column\)"),
        ({"a": 1}, "{{ a.__class__.__mro__ }}", "f:1: template: SecurityError"),
        ({"a": 0}, "{{ 1 / a }}", "f:1: template: ZeroDivisionError"),
        ({"a": ""}, "{{ a }}", "makes an empty prompt"),
        ({"a": 1}, "x\n{% if %}", r"template: line 2: .*in '{% if %}'"),
        ({"a": 1}, "question", "uses no column"),
        # prompts that a resume would not meet again
        ({"a": [1, 2]}, "{{ a | random }}", "template: line 1: No filter named 'random'"),
        ({"a": 1}, "{{ a }}{{ lipsum() }}", "f:1: template: 'lipsum' is undefined"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row, template, words):
    with pytest.raises(ConfigError, match=words):
        render_prompt(row, template, "f:1")


def test_an_answer_to_imitate_is_text_or_a_number():
    with pytest.raises(ConfigError, match=r"f:1: no column 'label' \(columns: prompt\)"):
        demonstration({"prompt": "a"}, "label", "f:1")
    several = {"prompt": "a", "answer": ["4", "four"]}  # what a reward accepts
    assert demonstration(several, None) is None and info_of(several) == {"answer": ["4", "four"]}
    assert demonstration({"answer": ""}, None) is None and demonstration({"target": 0}, None) == "0"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{{ n }}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "TimeoutError: did not end within 0.5 s",
        ),
        ("{{ n * 'x' * 10**10 }}", "OverflowError: the result of \\* would be too large"),
        ("{{ n ** (9 ** 9) }}", "OverflowError: the result of \\*\\* would be too large"),
    ],
)
def test_a_template_that_never_ends_or_fills_the_memory_is_refused(
    template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrella.data.rows.RENDER_S", 0.5)
    with pytest.raises(ConfigError, match=rf"rows:1: template: {words}"):
        render_prompt({"n": 3}, template, "rows:1")
    assert render_prompt({"n": 3}, "{{ n * 2 ** 4 }} {{ 'ab' * n }}", "rows:1") == "48 ababab"
