"""docs/notebook.ipynb runs from its first cell to its last in an empty folder, and what it trains learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.tests.sampling import in_turn

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
CHECK = """
rows = {row["name"]: row["cells"][0] for row in made.results["evaluate"]["rows"]}
assert rows["rl"]["low"] > max(rows["start"]["high"], rows["empty answer"]["value"]), rows
assert (made.export / "README.md").is_file()
"""
PATIENCE_S = 900.0  # of a busy machine; a free one needs half a minute


@in_turn("notebook")
@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in CELLS] + [CHECK]
    code = f"scope = {{'__name__': '__main__'}}\nfor source in {sources!r}:\n    exec(source, scope)\n"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "empty answer" in done.stdout and "raised the mean reward" in done.stdout, done.stdout
