"""Files that others wrote and read."""

import json

from terrella.core.files import json_lines
from terrella.rl.web_pages.data import load_transitions
from terrella.rl.webrl.release import read_lines, write_lines

ODD = "one\u2028two\u2029three\x85four\x0bfive"  # separators that str.splitlines cuts at and JSON leaves as they are


def test_only_a_line_feed_ends_a_line_of_json() -> None:
    text = f'"{ODD}"\r\n\n"b"\n'
    assert [(n, line.strip()) for n, line in json_lines(text)] == [(1, f'"{ODD}"'), (3, '"b"')]


def test_rows_with_odd_separators_come_back(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_lines(path, [{"html": ODD}, {"html": "b"}])
    assert read_lines(path) == [{"html": ODD}, {"html": "b"}]
    row = {**load_transitions()[0].to_row(), "url": ODD}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_transitions(path)[0].to_row() == row
