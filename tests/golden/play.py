"""Plays golden cases one after the other in one process, which is far quicker than a launch each. Helper module, not a
test.

Run as `python -m terrella.tests.golden.play CASE...` inside a folder: runs lie in its runs/, what they read in its
inputs/.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

from terrella.core import run as runs
from terrella.core.ports import free_port
from terrella.launch import recipe

from .inputs import make_inputs, unpack_old_run

CASES = Path(__file__).parent / "cases"
PLAYED, FAILED = "played", "failed.txt"  # in the folder of a run
OLD = "sokoban-ppo@old"  # a case whose run was begun by earlier code
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}
# Two processes, one for each core; a case may read the runs that stand before it in its lane.
LANES = (
    (
        "text-game",
        "text-game-sft",
        "text-game-rlvr",
        "text-game-1gpu",
        "text-game-rlvr-1gpu",
        "text-game-sft-1gpu",
        "web-page",
        "web-page-rlvr-1gpu",
        "web-page-sft-1gpu",
        "spa-sokoban",
        "spa-countdown",
        "spa-sokoban-tiny",
        "demo",
        "sokoban-worlds",
        "own-data",
        "own-env",
        "own-grpo",
        "own-sft",
    ),
    (
        "sokoban",
        "sokoban-ppo",
        OLD,
        "video",
        "video-gpu",
        "video-rt1",
        "video-rt1-single",
        "video-rt1-released",
        "mpc-sites-tiny",
        "mpc-sites",
        "webrl",
        "webrl-grpo",
        "webrl-sites-1gpu",
        "webrl-arms",
    ),
)
PATIENCE_S = 3600.0  # of a busy machine; two free cores need less than two minutes


def load(case: str) -> recipe.Recipe:
    """The settings of a case; what follows an @ tells its runs apart."""
    return recipe.load(str(CASES / f"{case.partition('@')[0]}.yaml"))


def play(case: str) -> None:
    """Run one case to its end, as its only rank."""
    from terrella.launch.worker import run_stages

    run, lease = runs.create(Path("runs", case), load(case))
    os.environ[runs.LEASE_VARIABLE] = run.token
    try:
        if run_stages(run.path, 0, 1):
            raise RuntimeError(f"{case}: was asked to stop")
    finally:
        lease.release()


# of WebRL: the same stages again
LATER_PHASE = re.compile(r".*-([2-9]|\d\d)-(tasks|played|rollout|replay|critic|actor)")


def graph(config: recipe.Recipe) -> tuple[str, ...]:
    """The kinds of a recipe's stages in order, with the first phase of WebRL alone, whoever judges its episodes: the
    case webrl plays the same stages with a reward model's verdicts between them."""
    return tuple(
        stage.kind for stage in config.stages if not LATER_PHASE.fullmatch(stage.name) and stage.kind != "web-judge"
    )


def play_all(folder: Path, lanes: tuple[tuple[str, ...], ...] = LANES) -> None:
    """Play the lanes beside each other; a case that fails leaves failed.txt in its run and does not hold up the
    others.
    """
    make_inputs(folder / "inputs")
    unpack_old_run(folder / "runs" / OLD)
    started = []
    deadline = time.monotonic() + PATIENCE_S
    try:
        for number, lane in enumerate(lanes):
            with open(folder / f"lane-{number}.log", "wb") as log:
                words = [sys.executable, "-m", "terrella.tests.golden.play", *lane]
                place = os.environ | ALONE | {"MASTER_PORT": str(free_port())}
                started.append(subprocess.Popen(words, cwd=folder, env=place, stdout=log, stderr=log))
        for process in started:
            # the cases that it left undone are missed by those who look for them
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=60)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begun = time.process_time()
        try:
            play(name)
            Path("runs", name, PLAYED).touch()
        except Exception:
            traceback.print_exc()
            Path("runs", name).mkdir(parents=True, exist_ok=True)
            Path("runs", name, FAILED).write_text(traceback.format_exc())
        print(f"{name}: {time.process_time() - begun:.1f} s of CPU time", flush=True)
