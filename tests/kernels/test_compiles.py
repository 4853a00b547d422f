"""Every kernel of the project compiles for an H100, and reads and writes memory in wide words; see compile_cases.py.
Needs no GPU.
"""

import json

from terrella.tests.sampling import in_turn

# a few numbers a row; rows of any length, which begin anywhere
NARROW = {"logprob._finish_kernel", "logprob._merge_kernel", "advantage._group_kernel", "advantage._spread_kernel"}
NARROW |= {"copying._propose_kernel"}  # compares a text with itself at every distance
NARROW |= {"decode_attention._notes_kernel"}  # the few experts of a token

ROWS = {"logprob._stats_kernel", "logprob._backward_kernel"}  # wide for every vocabulary, odd ones too


@in_turn("kernels compiled")
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(outcome_of) -> None:
    done = outcome_of("test_compiles.py")
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wide: dict[str, int] = {}
    for one in compiled[1:]:
        assert one["cubin"] > 0
        wide[one["kernel"]] = max(one["wide"], wide.get(one["kernel"], 0))
    assert set(compiled[0]["all"]) == set(wide), "a kernel that compile_cases.py does not call"
    assert {name for name, count in wide.items() if count == 0} <= NARROW
    assert all(one["wide"] for one in compiled[1:] if one["kernel"] in ROWS)
