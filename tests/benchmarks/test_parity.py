"""The comparison of training in fp8 with bf16: its text and its table."""

from pathlib import Path

from terrella.benchmarks.parity import read_pieces, table


def test_pieces_are_the_text_cut_with_one_byte_more_than_a_row(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_bytes(b"fghij")
    (tmp_path / "a.py").write_bytes(b"abcde")
    (tmp_path / "c.bin").write_bytes(b"not text")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.py").write_bytes(b"not shown")
    assert read_pieces(tmp_path, 2) == [b"abc", b"def", b"ghi"]


def test_a_run_lies_inside_the_band_or_so_far_outside() -> None:
    def run(form: str, seed: int, *values: float) -> dict:
        return {"format": form, "seed": seed, "curve": [[10 * i, value] for i, value in enumerate(values, 1)]}

    lines = table([run("bf16", 0, 3.0, 2.0), run("bf16", 1, 3.2, 2.1), run("fp8", 0, 3.1, 2.15), run("fp8", 1, 2.9)])
    assert lines == [
        "step 10: bf16 3.0000 to 3.2000 (2 seeds); fp8 seed 0 3.1000 inside; fp8 seed 1 2.9000 -0.1000",
        "step 20: bf16 2.0000 to 2.1000 (2 seeds); fp8 seed 0 2.1500 +0.0500",
    ]
    assert table([run("fp8", 0, 1.0)]) == []
