"""Settings of all tests: what a busy machine does to one example of a property is no failure, and the files that take
longest begin first.
"""

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # a machine with a GPU may have only what its tests need
    from hypothesis import HealthCheck, settings

    settings.register_profile("terrella", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("terrella")

# Files of the integration tier that take three to ten minutes: two at a time, none may be left for the end.
LONGEST = [f"integration/test_{name}.py" for name in ("slurm", "vllm", "web", "web_recipe", "colocated", "resume")]
# These bring up a SLURM each, and would wait for one another: one process has both.
SLURM = ("integration/test_slurm.py", "integration/test_served.py")


def _file(item: pytest.Item) -> str:
    return f"{item.path.parent.name}/{item.path.name}"


def _place(item: pytest.Item) -> int:
    return LONGEST.index(_file(item)) if _file(item) in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, all others keep their order; `--dist loadgroup` deals them by file."""
    items.sort(key=_place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("slurm" if _file(item) in SLURM else _file(item)))
