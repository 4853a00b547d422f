"""Seeded damage to every kind of file of a killed run: never silent with a changed result, never unnamed, never a
hang.
"""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from terrella.tests.attacks.conftest import Victim
from terrella.tests.attacks.damage import ANY, TARGETS, attack, judge


def assail(victim: Victim, folder: Path, target: str, seeds: range) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for seed in seeds:
        run = victim.copy(folder / f"{seed}")
        made = attack(run, target, seed)
        begun = time.monotonic()
        verdict = judge(made, run, victim.start(run, 900.0), victim.expected)
        verdicts[verdict] += 1
        print(
            f"{target} {seed}: {made.kind} {made.file.relative_to(run)}: {verdict} ({time.monotonic() - begun:.0f} s)",
            flush=True,
        )
        shutil.rmtree(run)
    return verdicts


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_of_the_damage(victim: Victim, tmp_path: Path, target: str) -> None:
    verdicts = assail(victim, tmp_path, target, range(2))
    assert set(verdicts) <= {"harmless", "named", "refused"}, verdicts


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_all_the_damage(victim: Victim, tmp_path: Path, target: str) -> None:
    verdicts = assail(victim, tmp_path, target, range(100, 125))
    assert set(verdicts) <= {"harmless", "named", "refused"}, verdicts


@pytest.mark.full
def test_damage_to_any_file_of_a_run_on_rows_of_ones_own(own_victim: Victim, tmp_path: Path) -> None:
    verdicts = assail(own_victim, tmp_path, ANY, range(100, 160))
    assert set(verdicts) <= {"harmless", "named", "refused"}, verdicts
