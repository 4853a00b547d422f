"""The video benchmark records one row a metric; metrics whose weights are not here are left out, not written as 0."""

from pathlib import Path

import pytest

from terrella.benchmarks import record, video


def test_rows_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRELLA_LPIPS", str(tmp_path))
    out = tmp_path / "results.csv"
    video.main(["--frames", "2", "--size", "16", "--seconds", "0", "--out", str(out)])
    rows = record.read(out)
    assert [row.metric for row in rows] == ["mae", "mse", "psnr", "ssim"]
    assert all(row.bench == "video" and row.unit == "frames/s" and 0 < row.p20 <= row.value <= row.p80 for row in rows)
    assert "lpips_alex: no weights" in capsys.readouterr().out
    assert video.DECODER.frame_tokens == 16 and video.DECODER.context_tokens == 256
