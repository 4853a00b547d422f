"""Videos in the report: what is a picture gets in, what is not stays out; tables in which less is better."""

import base64
import json
from pathlib import Path

import numpy as np

from terrella.data.png import decode_png, encode_apng, encode_png
from terrella.launch.report import build_report
from terrella.launch.report.clips import picture
from terrella.launch.report.health import below_baseline


def frames(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 6, 9, 3), dtype=np.uint8)


def test_animated_png_holds_every_frame() -> None:
    data = encode_apng(frames(), 200)
    assert (decode_png(data) == frames()[0]).all()  # a reader without animation shows the first
    assert data.count(b"fcTL") == 3 and data.count(b"fdAT") == 2 and data.count(b"acTL") == 1


def test_pillow_reads_the_animation() -> None:
    import io

    import pytest

    image = pytest.importorskip("PIL.Image").open(io.BytesIO(encode_apng(frames(), 200)))
    assert image.n_frames == 3
    for i in range(3):
        image.seek(i)
        assert (np.asarray(image.convert("RGB")) == frames()[i]).all()


def test_only_pictures_are_shown() -> None:
    good = base64.b64encode(encode_png(frames()[0])).decode()
    assert picture(good) == good
    assert (
        picture('"><script>alert(1)</script>') is None
        and picture(base64.b64encode(b"GIF89a").decode()) is None
        and picture(7) is None
    )


def test_report_carries_clips(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "videos").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\n")
    moving, sheet = (base64.b64encode(d).decode() for d in (encode_apng(frames(), 200), encode_png(frames()[0])))
    clip = {
        "title": "<b>clip</b>",
        "panels": ["given", "truth"],
        "rows": ["truth"],
        "frames": 2,
        "moving": moving,
        "sheet": sheet,
    }
    clip["metrics"] = {"base": {"mae": [0.25, 0.5]}}
    (run / "videos" / "evaluate.json").write_text(json.dumps({"title": "Held-out", "clips": [clip, {"moving": "x"}]}))
    text = build_report(run).read_text()
    assert f"data:image/png;base64,{moving}" in text and "<b>clip</b>" not in text and "&lt;b&gt;clip" in text
    assert "<td>0.25</td>" in text and "1 clips could not be read" in text


def test_less_can_be_better() -> None:
    def table(lower: list[str]) -> dict:
        rows = [
            {"name": "still", "kind": "baseline", "cells": [{"value": 0.5}]},
            {"name": "m", "kind": "model", "cells": [{"value": 0.4}]},
        ]
        return {"title": "t", "columns": ["mae"], "rows": rows, "lower": lower}

    assert below_baseline(table([])) is not None and below_baseline(table(["mae"])) is None
