"""Plays several small recipes one after the other in one process, which is far quicker than a launch each. Helper
module, not a test.

Run as `python -m terrella.tests.launch.own_lane CASES.json`: [run, [recipe, setting, ...]] or [file, text to write into
it], in order. The last error of every run goes to CASES.errors.json.
"""

import json
import os
import sys
from pathlib import Path

from terrella.core import run as runs
from terrella.core.errors import TerrellaError
from terrella.launch import recipe
from terrella.launch.worker import run_stages

if __name__ == "__main__":
    file, errors = Path(sys.argv[1]), {}
    for name, what in json.loads(file.read_text()):
        if isinstance(what, str):
            Path(name).write_text(what)
            continue
        base, *settings = what
        run, lease = runs.create(Path("runs", name), recipe.load(base, tuple(settings)))
        os.environ[runs.LEASE_VARIABLE] = run.token
        try:
            run_stages(run.path, 0, 1)
        except TerrellaError as error:
            errors[name] = f"{type(error).__name__}: {error}"
        finally:
            lease.release()
    file.with_suffix(".errors.json").write_text(json.dumps(errors))
