"""Settings of all tests: what a busy machine does to one example of a property is no failure, and the files that take
longest begin first.
"""

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # a machine with a GPU may have only what its tests need
    from hypothesis import HealthCheck, settings

    settings.register_profile("terrella", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("terrella")

# Files of the integration tier that take three to ten minutes: two at a time, none may be left for the end. Two of them
# bring up a SLURM, of which there is one at a time: they do not stand beside each other.
LONGEST = [
    f"integration/test_{name}.py" for name in ("slurm", "vllm", "web", "served", "web_recipe", "colocated", "resume")
]


def _place(item: pytest.Item) -> int:
    name = f"{item.path.parent.name}/{item.path.name}"
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, all others keep their order; `--dist loadfile` deals them."""
    items.sort(key=_place)
